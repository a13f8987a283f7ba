//! Prometheus (OpenMetrics text): kube-proxy's names where they mean the same, ours beside them.

use std::{collections::BTreeMap, fmt, sync::Arc};

use prometheus_client::{
    collector::Collector,
    encoding::{DescriptorEncoder, EncodeMetric as _, text},
    metrics::{MetricType, counter::ConstCounter, gauge::ConstGauge},
    registry::Registry,
};
use tunnel_common::reason::Reason;

use super::Views;
use crate::reconcile::Stats;

/// The media type of the text format.
pub(super) const CONTENT_TYPE: &str = "application/openmetrics-text; version=1.0.0; charset=utf-8";

/// Counts of answers by health endpoint and code.
pub(super) type Answers = BTreeMap<(&'static str, u16), u64>;

/// Every metric, as text.
pub(super) fn render(views: &Arc<Views>, answers: Answers) -> Result<String, fmt::Error> {
    let mut registry = Registry::default();
    registry.register_collector(Box::new(Metrics {
        views: Arc::clone(views),
        answers,
    }));
    let mut text = String::new();
    text::encode(&mut text, &registry)?;
    Ok(text)
}

struct Metrics {
    views: Arc<Views>,
    answers: Answers,
}

impl fmt::Debug for Metrics {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Metrics").finish_non_exhaustive()
    }
}

impl Collector for Metrics {
    fn encode(&self, encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let mut out = Out(encoder);
        let stats = self.views.stats.borrow().clone();
        let is_ready = u32::from(self.views.ready.borrow().is_none());
        out.gauge(
            "culvert_ready",
            "Whether Services are translated as they should be",
            is_ready,
        )?;
        self.reasons(&mut out, &stats)?;
        self.maps(&mut out, &stats)?;
        out.gauge(
            "culvert_services",
            "Services that were read",
            number(stats.services),
        )?;
        let objects = self.views.source.borrow().problems.len();
        out.gauge(
            "culvert_objects_refused",
            "Objects that were not read",
            number(objects),
        )?;
        let drift = [([("map", "all")], stats.drift)];
        out.counters(
            "culvert_map_drift",
            "Differences between the maps and what was known",
            drift,
        )?;
        let delay = stats.last_delay_seconds;
        out.gauge(
            "culvert_program_delay_seconds",
            "From the last change to its last write",
            delay,
        )?;
        self.kube_proxy(&mut out, &stats)
    }
}

impl Metrics {
    fn reasons(&self, out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
        let mut counts: Vec<(Reason, u64)> = (self.views.counters)().unwrap_or_else(|error| {
            tracing::warn!(%error, "cannot read the kernel's counters");
            Vec::new()
        });
        for reason in Reason::ALL
            .into_iter()
            .filter(|reason| !reason.is_of_kernel())
        {
            let count = if reason == Reason::ObjectRefused {
                self.views.source.borrow().refused_total
            } else {
                stats
                    .counts
                    .get(reason.label())
                    .copied()
                    .unwrap_or_default()
            };
            counts.push((reason, count));
        }
        let labelled = counts
            .iter()
            .map(|(reason, n)| ([("reason", reason.label())], *n));
        out.counters(
            "culvert_reason",
            "How connects, datagrams and objects ended",
            labelled,
        )
    }

    fn maps(&self, out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
        let room = self.views.setup.maps;
        let used = [
            ("front", number(stats.fronts)),
            ("slot", stats.slots.into()),
            ("be", stats.backends.into()),
        ];
        out.gauges("culvert_map_entries", "Entries in use", "map", used)?;
        let room = [
            ("front", f64::from(room.fronts)),
            ("slot", room.slots.into()),
            ("be", room.backends.into()),
        ];
        out.gauges(
            "culvert_map_capacity_entries",
            "Entries there is room for",
            "map",
            room,
        )?;
        let refused = stats
            .problems
            .iter()
            .map(|(reason, n)| (reason, number(*n)));
        let help = "Service ports that are not programmed as planned";
        out.gauges("culvert_service_ports_refused", help, "reason", refused)
    }

    fn kube_proxy(&self, out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
        let help = "When the last pass over changed Services ended";
        let last = stats
            .last_pass_at
            .map_or(0.0, |at| at.as_duration().as_secs_f64());
        out.gauge(
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
            help,
            last,
        )?;
        for (endpoint, name) in [
            ("/healthz", "kubeproxy_proxy_healthz"),
            ("/livez", "kubeproxy_proxy_livez"),
        ] {
            let asked = self
                .answers
                .iter()
                .filter(|((asked, _), _)| *asked == endpoint);
            let counts: Vec<_> = asked.map(|((_, code), n)| (code.to_string(), *n)).collect();
            let labelled = counts
                .iter()
                .map(|(code, n)| ([("code", code.as_str())], *n));
            out.counters(name, "Answers, by code", labelled)?;
        }
        Ok(())
    }
}

struct Out<'a>(DescriptorEncoder<'a>);

impl Out<'_> {
    fn gauge(&mut self, name: &str, help: &str, value: impl Into<f64>) -> fmt::Result {
        let encoder = self
            .0
            .encode_descriptor(name, help, None, MetricType::Gauge)?;
        ConstGauge::new(value.into()).encode(encoder)
    }

    fn gauges<W: AsRef<str>>(
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

    fn counters<'a>(
        &mut self,
        name: &str,
        help: &str,
        values: impl IntoIterator<Item = ([(&'a str, &'a str); 1], u64)>,
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
const fn number(count: usize) -> f64 {
    count as f64
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use tokio::sync::{mpsc, watch};

    use super::*;
    use crate::{
        admin::{Maps, Setup},
        source::Report,
    };

    fn views(stats: Stats) -> Arc<Views> {
        let maps = Maps {
            fronts: 10,
            slots: 20,
            backends: 30,
        };
        let word = String::new;
        let setup = Setup {
            version: word(),
            pid: 1,
            node: word(),
            started: word(),
            cgroup: word(),
            pins: word(),
            layout: 1,
            refusing: word(),
            maps,
        };
        Arc::new(Views {
            setup,
            ready: watch::channel(None).1,
            stats: watch::channel(stats).1,
            queries: mpsc::channel(1).0,
            network: watch::Sender::default().subscribe(),
            source: watch::channel(Arc::new(Report::default())).1,
            counters: Box::new(|| Ok(vec![(Reason::Translated, 7)])),
            listening: watch::Sender::new(BTreeMap::new()),
        })
    }

    fn rendered(stats: Stats) -> String {
        let answers = Answers::from([(("/healthz", 200), 3), (("/livez", 503), 1)]);
        render(&views(stats), answers).expect("rendered")
    }

    #[test]
    fn counters_of_the_kernel_and_of_the_daemon_stand_in_one_metric() {
        let counts = BTreeMap::from([("fronts_full".to_owned(), 2)]);
        let text = rendered(Stats {
            counts,
            ..Stats::default()
        });

        assert!(
            text.contains("culvert_reason_total{reason=\"translated\"} 7\n"),
            "{text}"
        );
        assert!(
            text.contains("culvert_reason_total{reason=\"fronts_full\"} 2\n"),
            "{text}"
        );
        assert!(
            text.contains("kubeproxy_proxy_healthz_total{code=\"200\"} 3\n"),
            "{text}"
        );
        assert!(text.ends_with("# EOF\n"), "{text}");
    }

    #[test]
    fn the_page_on_metrics_names_each_metric_and_each_reason_and_no_other() {
        let page = include_str!("../../../docs/metrics.md");
        let first_cells = page.lines().filter_map(|line| line.strip_prefix("| `"));
        let named: BTreeSet<_> = first_cells
            .filter_map(|rest| rest.split('`').next())
            .collect();
        let text = rendered(Stats::default());
        let types = text.lines().filter_map(|line| line.strip_prefix("# TYPE "));
        let mut wanted: BTreeSet<String> = types
            .map(|line| match line.split_once(' ') {
                Some((name, "counter")) => format!("{name}_total"),
                Some((name, _)) => name.to_owned(),
                None => line.to_owned(),
            })
            .collect();
        wanted.extend(Reason::ALL.map(|reason| reason.label().to_owned()));

        assert_eq!(named, wanted.iter().map(String::as_str).collect());
    }
}
