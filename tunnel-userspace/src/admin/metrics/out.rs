//! Metrics as they are written.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeMetric as _, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::reconcile::Histogram;

pub(super) struct Out<'a>(pub(super) DescriptorEncoder<'a>);

impl Out<'_> {
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: impl Into<f64>) -> fmt::Result {
        let encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value.into()).encode(encoder)
    }

    pub(super) fn gauges<W: AsRef<str>>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (W, f64)>,
    ) -> fmt::Result {
        let mut encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (word, value) in values {
            let labels = [(label, word.as_ref())];
            ConstGauge::new(value).encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    /// As [`Self::gauges`], with several labels.
    pub(super) fn labelled_gauges<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = ([(&'a str, &'a str); N], f64)>,
    ) -> fmt::Result {
        let mut encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        for (labels, value) in values {
            ConstGauge::new(value).encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    pub(super) fn histograms<'a>(
        &mut self,
        name: &str,
        help: &str,
        label: &str,
        values: impl IntoIterator<Item = (&'a str, &'a Histogram)>,
    ) -> fmt::Result {
        let mut encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Histogram)?;
        for (word, histogram) in values {
            let labels = [(label, word)];
            let mut encoder = encoder.encode_family(&labels)?;
            let (sum, count) = (histogram.sum(), histogram.count());
            encoder.encode_histogram::<NoLabelSet>(sum, count, histogram.buckets(), None)?;
        }
        Ok(())
    }

    pub(super) fn total(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Counter)?;
        ConstCounter::new(value).encode(encoder)
    }

    pub(super) fn counters<'a, const N: usize>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = ([(&'a str, &'a str); N], u64)>,
    ) -> fmt::Result {
        let mut encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Counter)?;
        for (labels, value) in values {
            ConstCounter::new(value).encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }
}

#[expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "a metric is a float, and counts of entries are far below 2^52"
)]
pub(super) const fn number(count: usize) -> f64 {
    count as f64
}
