//! `/healthz` and `/livez`, compatible with kube-proxy (`pkg/proxy/healthcheck/proxy_health.go`).

use std::collections::BTreeMap;

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::NodeViews;
use crate::reconcile::ReconcileStats;

/// The time for which writes may keep failing before the daemon counts as unhealthy: twice kube-proxy's sync
/// period.
const MAX_FAILURE_TIME: SignedDuration = SignedDuration::from_secs(60);

/// The value of `lastUpdated` before the first write: Go's zero time.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// The response to `/healthz` or `/livez`. Only `/healthz` includes `nodeEligible`. `healthy` describes the
/// daemon, not the node.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Health {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    pub(super) healthy: bool,
    /// True if the HTTP status is 200.
    #[serde(skip)]
    pub(super) is_positive: bool,
    /// The status of each address family; empty until the first write. Both families have the same status,
    /// since every sync writes both.
    #[serde(skip_serializing_if = "BTreeMap::is_empty")]
    status: BTreeMap<&'static str, FamilyStatus>,
}

/// The entry for one address family in `status`.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct FamilyStatus {
    last_updated: String,
    healthy: bool,
}

/// Returns the response to `/healthz` or, if `with_eligibility` is false, to `/livez`. Only `/healthz` takes
/// into account whether load balancers may send traffic to this node.
pub(super) fn response(views: &NodeViews, with_eligibility: bool) -> Health {
    let is_running = views.starting.borrow().is_none();
    let stats = views.stats.borrow().clone();
    evaluate(&stats, is_running, with_eligibility, Timestamp::now())
}

fn evaluate(
    stats: &ReconcileStats,
    is_running: bool,
    with_eligibility: bool,
    now: Timestamp,
) -> Health {
    let is_stuck = stats
        .failing_since
        .is_some_and(|since| now.duration_since(since) > MAX_FAILURE_TIME);
    let is_working = is_running && stats.synced && !is_stuck;
    let is_eligible = !with_eligibility || stats.node_eligible;
    let last = stats.last_complete_sync_at.filter(|_| stats.synced);
    let family_status = last.map(|last| FamilyStatus {
        last_updated: last.to_string(),
        healthy: is_working,
    });
    let by_family = |status: FamilyStatus| ["IPv4", "IPv6"].map(|family| (family, status.clone()));
    // A positive response contains the current time, so that clients that check the time never consider it
    // outdated.
    let is_positive = is_working && is_eligible;
    let last_updated = if is_positive { Some(now) } else { last };
    Health {
        last_updated: last_updated.map_or_else(|| NEVER.to_owned(), |at| at.to_string()),
        current_time: now.to_string(),
        node_eligible: with_eligibility.then_some(stats.node_eligible),
        healthy: is_working,
        is_positive,
        status: family_status.into_iter().flat_map(by_family).collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::admin::fixture::ready_stats;

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).expect("a time")
    }

    #[test]
    fn a_daemon_that_waits_for_its_sources_is_not_healthy() {
        let stats = ReconcileStats {
            synced: false,
            ..ready_stats()
        };

        assert!(!evaluate(&stats, true, true, now()).is_positive);
        assert!(!evaluate(&ready_stats(), false, true, now()).is_positive);
    }

    #[test]
    fn writes_may_fail_for_a_minute() {
        let is_positive = |seconds| {
            let stats = ReconcileStats {
                failing_since: Some(now() - SignedDuration::from_secs(seconds)),
                ..ready_stats()
            };
            evaluate(&stats, true, false, now()).is_positive
        };

        assert!(is_positive(10));
        assert!(!is_positive(61));
    }

    #[test]
    fn a_node_that_is_being_removed_is_live_but_not_eligible() {
        let stats = ReconcileStats {
            node_eligible: false,
            ..ready_stats()
        };

        assert!(!evaluate(&stats, true, true, now()).is_positive);
        assert!(evaluate(&stats, true, false, now()).is_positive);
    }

    #[test]
    fn a_response_equals_that_of_kube_proxy() {
        let written = ReconcileStats {
            last_complete_sync_at: Some(Timestamp::from_second(1_799_999_000).expect("a time")),
            ..ready_stats()
        };
        // The daemon stays healthy while its node is being removed.
        let leaving = ReconcileStats {
            node_eligible: false,
            ..written.clone()
        };
        let (past, today) = ("2027-01-15T07:43:20Z", "2027-01-15T08:00:00Z");
        for (stats, is_running, eligible, last, healthy) in [
            (&written, true, Some(true), today, true),
            (&leaving, true, Some(false), past, true),
            (&written, false, None, past, false),
            (&ReconcileStats::default(), false, None, NEVER, false),
        ] {
            let health = evaluate(stats, is_running, eligible.is_some(), now());

            let eligible = eligible.map(|it| format!(r#""nodeEligible":{it},"#));
            let eligible = eligible.unwrap_or_default();
            let family = format!(r#"{{"lastUpdated":"{past}","healthy":{healthy}}}"#);
            let status = format!(r#","status":{{"IPv4":{family},"IPv6":{family}}}"#);
            let status = if last == NEVER { "" } else { &status };
            let wanted = format!(
                r#"{{"lastUpdated":"{last}","currentTime":"{today}",{eligible}"healthy":{healthy}{status}}}"#
            );
            assert_eq!(serde_json::to_string(&health).expect("JSON"), wanted);
        }
    }
}
