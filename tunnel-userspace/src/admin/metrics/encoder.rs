//! Encodes metrics in the OpenMetrics text format.

use std::fmt;

use prometheus_client::{
    encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric, NoLabelSet},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
};

use crate::reconcile::Histogram;

pub(super) struct MetricsEncoder<'a>(pub(super) DescriptorEncoder<'a>);

impl MetricsEncoder<'_> {
    pub(super) fn gauge(&mut self, name: &str, help: &str, value: impl Into<f64>) -> fmt::Result {
        let kind = MetricType::Gauge;
        let encoder = self.0.encode_descriptor(name, help, None, kind)?;
        ConstGauge::new(value.into()).encode(encoder)
    }

    pub(super) fn gauges<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, f64)>,
    ) -> fmt::Result {
        let values = values.into_iter();
        let values = values.map(|(labels, value)| (labels, ConstGauge::new(value)));
        self.family(name, help, MetricType::Gauge, values)
    }

    pub(super) fn total(&mut self, name: &str, help: &str, value: u64) -> fmt::Result {
        let kind = MetricType::Counter;
        let encoder = self.0.encode_descriptor(name, help, None, kind)?;
        ConstCounter::new(value).encode(encoder)
    }

    pub(super) fn counters<L: EncodeLabelSet>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = (L, u64)>,
    ) -> fmt::Result {
        let values = values.into_iter();
        let values = values.map(|(labels, value)| (labels, ConstCounter::new(value)));
        self.family(name, help, MetricType::Counter, values)
    }

    fn family<L: EncodeLabelSet, M: EncodeMetric>(
        &mut self,
        name: &str,
        help: &str,
        kind: MetricType,
        values: impl Iterator<Item = (L, M)>,
    ) -> fmt::Result {
        let mut encoder = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, value) in values {
            value.encode(encoder.encode_family(&labels)?)?;
        }
        Ok(())
    }

    pub(super) fn histograms<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = ([(&'a str, &'a str); 1], &'a Histogram)>,
    ) -> fmt::Result {
        let kind = MetricType::Histogram;
        let mut encoder = self.0.encode_descriptor(name, help, None, kind)?;
        for (labels, histogram) in values {
            let mut encoder = encoder.encode_family(&labels)?;
            let (sum, count) = (histogram.sum, histogram.count());
            encoder.encode_histogram::<NoLabelSet>(sum, count, &histogram.buckets, None)?;
        }
        Ok(())
    }
}

/// Converts a count to a metric's value.
#[expect(
    clippy::as_conversions,
    clippy::cast_precision_loss,
    reason = "the value of a metric is an f64, and the counts are far below 2^52"
)]
pub(super) fn number(count: impl TryInto<u64>) -> f64 {
    count.try_into().unwrap_or(u64::MAX) as f64
}
