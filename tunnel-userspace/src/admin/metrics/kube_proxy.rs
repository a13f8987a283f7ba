//! What means the same as with kube-proxy, under its names (kube-proxy
//! `pkg/proxy/metrics/metrics.go`). A pass here writes both families, so what is of passes is the
//! same for both.

use std::fmt;

use jiff::Timestamp;

use super::{
    Answers,
    out::{Out, number},
};
use crate::{
    model::{ByFamily, Family},
    reconcile::{Histogram, Stats},
};

/// The label that says which family.
const FAMILY: &str = "ip_family";

/// Both families, by what kube-proxy calls them.
const FAMILIES: [(&str, Family); 2] = [("IPv4", Family::V4), ("IPv6", Family::V6)];

pub(super) fn encode(out: &mut Out<'_>, stats: &Stats, answers: &Answers) -> fmt::Result {
    passes(out, stats)?;
    changes(out, stats)?;
    gaps(out, stats)?;
    let help = "From the change of a Pod or Service to its last write here";
    let programming = &stats.sync.programming;
    let values = FAMILIES.map(|(word, family)| (word, programming.of(family)));
    let name = "kubeproxy_network_programming_duration_seconds";
    out.histograms(name, help, FAMILY, values)?;
    for (endpoint, name) in [
        ("/healthz", "kubeproxy_proxy_healthz"),
        ("/livez", "kubeproxy_proxy_livez"),
    ] {
        let asked = answers.iter().filter(|((asked, _), _)| *asked == endpoint);
        let counts: Vec<_> = asked.map(|((_, code), n)| (code.to_string(), *n)).collect();
        let labelled = counts
            .iter()
            .map(|(code, n)| ([("code", code.as_str())], *n));
        out.counters(name, "Answers, by code", labelled)?;
    }
    Ok(())
}

fn passes(out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
    let sync = &stats.sync;
    let both = |histogram: &'_ Histogram| FAMILIES.map(|(word, _)| (word, histogram.clone()));
    for (name, help, histogram) in [
        (
            "kubeproxy_sync_proxy_rules_duration_seconds",
            "How long passes over changed Services took",
            &sync.all,
        ),
        (
            "kubeproxy_sync_full_proxy_rules_duration_seconds",
            "How long passes over every Service took",
            &sync.full,
        ),
        (
            "kubeproxy_sync_partial_proxy_rules_duration_seconds",
            "How long passes over some Services took",
            &sync.partial,
        ),
    ] {
        let both = both(histogram);
        let values = both.iter().map(|(word, histogram)| (*word, histogram));
        out.histograms(name, help, FAMILY, values)?;
    }
    let seconds = |at: Option<Timestamp>| at.map_or(0.0, |at| at.as_duration().as_secs_f64());
    for (name, help, at) in [
        (
            "kubeproxy_sync_proxy_rules_last_timestamp_seconds",
            "When the last pass ended that left nothing to be written",
            stats.last_whole_pass_at,
        ),
        (
            "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds",
            "When the last change came",
            sync.last_queued_at,
        ),
    ] {
        let values = FAMILIES.map(|(word, _)| (word, seconds(at)));
        out.gauges(name, help, FAMILY, values)?;
    }
    Ok(())
}

fn changes(out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
    let sync = &stats.sync;
    let services = ByFamily {
        v4: sync.service_changes,
        v6: sync.service_changes,
    };
    let pending = ByFamily {
        v4: sync.pending_services,
        v6: sync.pending_services,
    };
    for (what, total, pending) in [
        ("service", services, pending),
        ("endpoint", sync.endpoint_changes, sync.pending_endpoints),
    ] {
        let name = format!("kubeproxy_sync_proxy_rules_{what}_changes");
        let values = FAMILIES.map(|(word, family)| ([(FAMILY, word)], *total.of(family)));
        out.counters(&name, "Changes that were seen", values)?;
        let name = format!("{name}_pending");
        let values = FAMILIES.map(|(word, family)| (word, number(*pending.of(family))));
        let help = "Services with changes that are not written yet";
        out.gauges(&name, help, FAMILY, values)?;
    }
    Ok(())
}

fn gaps(out: &mut Out<'_>, stats: &Stats) -> fmt::Result {
    let help = "Service ports of policy Local with endpoints, but none on this node";
    let name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total";
    let values = FAMILIES.iter().flat_map(|(word, family)| {
        let gaps = stats.sync.gaps.of(*family);
        let labels = |policy| [(FAMILY, *word), ("traffic_policy", policy)];
        [
            (labels("internal"), number(gaps.internal)),
            (labels("external"), number(gaps.external)),
        ]
    });
    out.labelled_gauges(name, help, values)
}
