//! Metrics with kube-proxy's names and meanings (`pkg/proxy/metrics/metrics.go`). Every sync writes both
//! address families, so the sync metrics are the same for both.

use std::fmt;

use jiff::Timestamp;
use tunnel_common::reason::Reason;

use super::{
    HealthResponses,
    encoder::{MetricsEncoder, number},
};
use crate::{model::Family, reconcile::ReconcileStats};

/// The name of the label that holds the address family.
const FAMILY: &str = "ip_family";

/// Returns a labelled value for each address family.
fn by_family<T>(value: impl Fn(Family) -> T) -> [([(&'static str, &'static str); 1], T); 2] {
    [("IPv4", Family::V4), ("IPv6", Family::V6)]
        .map(|(label, family)| ([(FAMILY, label)], value(family)))
}

pub(super) fn encode(
    out: &mut MetricsEncoder<'_>,
    stats: &ReconcileStats,
    responses: &HealthResponses,
) -> fmt::Result {
    encode_syncs(out, stats)?;
    encode_changes(out, stats)?;
    encode_no_local_endpoints(out, stats)?;
    let help = "Time from the change of a Pod or Service to its last write on this node";
    let name = "kubeproxy_network_programming_duration_seconds";
    let values = by_family(|family| stats.sync.programming_latency.get(family));
    out.histograms(name, help, values)?;
    for (endpoint, name) in [
        ("/healthz", "kubeproxy_proxy_healthz"),
        ("/livez", "kubeproxy_proxy_livez"),
    ] {
        let by_code = responses.iter().filter(|((path, _), _)| *path == endpoint);
        let labelled = by_code.map(|((_, code), n)| ([("code", *code)], *n));
        out.counters(name, "Responses by code", labelled)?;
    }
    Ok(())
}

/// kube-proxy deletes entries of connection tracking whose endpoints are gone (`pkg/proxy/conntrack/reconciler.go`). The
/// programs let a flow's next datagram choose another backend instead.
pub(super) fn encode_reconciler(
    out: &mut MetricsEncoder<'_>,
    counts: &[(Reason, u64)],
) -> fmt::Result {
    let help = "Flows of datagrams that left a backend that no longer serves";
    let name = "kubeproxy_conntrack_reconciler_deleted_entries";
    let count_of = |reason| {
        let count = counts.iter().find(|(it, _)| *it == reason);
        count.map_or(0, |(_, count)| *count)
    };
    let counts = by_family(|family| match family {
        Family::V4 => count_of(Reason::DatagramsMovedV4),
        Family::V6 => count_of(Reason::DatagramsMovedV6),
    });
    out.counters(name, help, counts)
}

fn encode_syncs(out: &mut MetricsEncoder<'_>, stats: &ReconcileStats) -> fmt::Result {
    let sync = &stats.sync;
    let help = "Duration of syncs";
    let name = "kubeproxy_sync_proxy_rules_duration_seconds";
    out.histograms(name, help, by_family(|_| &sync.all))?;
    let help = "Duration of syncs of all Services";
    let name = "kubeproxy_sync_full_proxy_rules_duration_seconds";
    out.histograms(name, help, by_family(|_| &sync.full))?;
    let help = "Duration of syncs of the changed Services";
    let name = "kubeproxy_sync_partial_proxy_rules_duration_seconds";
    out.histograms(name, help, by_family(|_| &sync.partial))?;
    let seconds = |at: Option<Timestamp>| at.map_or(0.0, |at| at.as_duration().as_secs_f64());
    let help = "Time of the last complete sync, as a Unix time";
    let name = "kubeproxy_sync_proxy_rules_last_timestamp_seconds";
    out.gauges(
        name,
        help,
        by_family(|_| seconds(stats.last_complete_sync_at)),
    )?;
    let help = "Time of the last received change, as a Unix time";
    let name = "kubeproxy_sync_proxy_rules_last_queued_timestamp_seconds";
    out.gauges(name, help, by_family(|_| seconds(sync.last_queued_at)))
}

fn encode_changes(out: &mut MetricsEncoder<'_>, stats: &ReconcileStats) -> fmt::Result {
    let sync = &stats.sync;
    let services = (
        by_family(|_| sync.service_changes),
        by_family(|_| sync.pending_services),
    );
    let endpoints = (
        by_family(|family| *sync.endpoint_changes.get(family)),
        by_family(|family| *sync.pending_endpoints.get(family)),
    );
    for (what, (total, pending)) in [("service", services), ("endpoint", endpoints)] {
        let name = format!("kubeproxy_sync_proxy_rules_{what}_changes");
        out.counters(&name, "Received changes", total)?;
        let help = "Services with changes that are not written yet";
        let pending = pending.map(|(labels, count)| (labels, number(count)));
        out.gauges(&format!("{name}_pending"), help, pending)?;
    }
    Ok(())
}

fn encode_no_local_endpoints(out: &mut MetricsEncoder<'_>, stats: &ReconcileStats) -> fmt::Result {
    let help = "Service ports of policy Local with endpoints, but none on this node";
    let name = "kubeproxy_sync_proxy_rules_no_local_endpoints_total";
    let counts = by_family(|family| stats.sync.no_local_endpoints.get(family));
    let values = counts.into_iter().flat_map(|([family], counts)| {
        [("internal", counts.internal), ("external", counts.external)]
            .map(|(policy, count)| ([family, ("traffic_policy", policy)], number(count)))
    });
    out.gauges(name, help, values)
}
