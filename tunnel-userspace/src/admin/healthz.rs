//! `/healthz` and `/livez`, compatible with kube-proxy (`pkg/proxy/healthcheck/proxy_health.go`).

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use serde::Serialize;

use super::NodeViews;
use crate::{clock::monotonic, reconcile::ReconcileStats};

/// The time for which writes may keep failing before the daemon counts as unhealthy: twice kube-proxy's sync
/// period.
const MAX_FAILURE_TIME: Duration = Duration::from_secs(60);

/// The time for which the reconcile loop may be busy before it counts as hung. Writing all Services at once,
/// and an audit, each take a few seconds.
pub(super) const MAX_BUSY_TIME: Duration = Duration::from_secs(60);

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
    let (is_hung, now) = (is_hung(views), monotonic());
    let is_working = is_running && !is_hung && is_working(&stats, now);
    evaluate(&stats, is_working, with_eligibility, Timestamp::now())
}

/// Returns true if the reconcile loop has been busy for so long that it must be hung. The wall clock may be set
/// at any time, so only the monotonic clock counts.
pub(super) fn is_hung(views: &NodeViews) -> bool {
    let heartbeat = *views.heartbeat.borrow();
    has_elapsed(heartbeat, MAX_BUSY_TIME, monotonic())
}

fn is_working(stats: &ReconcileStats, now: Duration) -> bool {
    stats.synced && !has_elapsed(stats.failing_from, MAX_FAILURE_TIME, now)
}

/// Returns true if more than `limit` has passed since a time of the monotonic clock.
fn has_elapsed(since: Option<Duration>, limit: Duration, now: Duration) -> bool {
    since.is_some_and(|since| now.saturating_sub(since) > limit)
}

fn evaluate(
    stats: &ReconcileStats,
    is_working: bool,
    with_eligibility: bool,
    now: Timestamp,
) -> Health {
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
    use tokio::sync::watch;

    use super::*;
    use crate::admin::{
        fixture::{self, ready_stats},
        readiness::Readiness,
    };

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).expect("a time")
    }

    #[test]
    fn a_daemon_that_waits_for_its_sources_is_not_healthy() {
        let waiting = ReconcileStats {
            synced: false,
            ..ready_stats()
        };
        let (_stats, receiver) = watch::channel(waiting);
        assert!(!response(&fixture::views(receiver), true).is_positive);

        let (_stats, receiver) = watch::channel(ready_stats());
        let starting = NodeViews {
            starting: watch::channel(Some("waiting".to_owned())).1,
            ..fixture::views(receiver)
        };
        assert!(!response(&starting, true).is_positive);
    }

    #[test]
    fn writes_may_fail_for_a_minute_by_the_monotonic_clock() {
        let is_positive = |seconds| {
            let stats = ReconcileStats {
                // The wall clock has been set forwards by years since the first failure.
                failing_since: Some(Timestamp::UNIX_EPOCH),
                failing_from: monotonic().checked_sub(Duration::from_secs(seconds)),
                ..ready_stats()
            };
            let (_stats, receiver) = watch::channel(stats);
            response(&fixture::views(receiver), false).is_positive
        };

        assert!(is_positive(10));
        assert!(!is_positive(61));
    }

    #[test]
    fn a_daemon_whose_reconcile_loop_hangs_is_neither_live_nor_ready() {
        for (seconds, is_live) in [(10, true), (61, false)] {
            let (_stats, receiver) = watch::channel(ready_stats());
            let views = NodeViews {
                heartbeat: watch::channel(monotonic().checked_sub(Duration::from_secs(seconds))).1,
                ..fixture::views(receiver)
            };

            let live = response(&views, false);
            assert_eq!((live.is_positive, live.healthy), (is_live, is_live));
            assert_eq!(response(&views, true).is_positive, is_live);
            let ready = Readiness::of(&views);
            let reasons: &[&str] = if is_live {
                &[]
            } else {
                &["the reconcile loop has made no progress for 60 s"]
            };
            assert_eq!(ready.reasons, reasons);
        }
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
        for (stats, is_working, eligible, last, healthy) in [
            (&written, true, Some(true), today, true),
            (&leaving, true, Some(false), past, true),
            (&written, false, None, past, false),
            (&ReconcileStats::default(), false, None, NEVER, false),
        ] {
            let health = evaluate(stats, is_working, eligible.is_some(), now());

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
