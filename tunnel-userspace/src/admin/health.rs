//! What load balancers and probes ask, as kube-proxy answers it
//! (kube-proxy `pkg/proxy/healthcheck/proxy_health.go`).

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;

use super::Views;
use crate::reconcile::Stats;

/// How long writes may fail before the node is not healthy, in seconds: twice kube-proxy's sync
/// period.
const PATIENCE: SignedDuration = SignedDuration::from_secs(60);

/// What is said where nothing was written yet: Go's zero time.
const NEVER: &str = "0001-01-01T00:00:00Z";

/// An answer: `nodeEligible` is there for `/healthz` only. `healthy` is about the daemon alone.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Health {
    last_updated: String,
    current_time: String,
    #[serde(skip_serializing_if = "Option::is_none")]
    node_eligible: Option<bool>,
    pub(super) healthy: bool,
    /// Whether the answer is yes.
    #[serde(skip)]
    pub(super) is_good: bool,
    /// By family; nothing until the first write. One task writes both, so they say the same.
    #[serde(skip_serializing_if = "Option::is_none")]
    status: Option<Families>,
}

#[derive(Debug, Serialize)]
struct Families {
    #[serde(rename = "IPv4")]
    v4: Written,
    #[serde(rename = "IPv6")]
    v6: Written,
}

/// When what a family needs was last written as a whole, and whether nothing waits for it too long.
#[derive(Clone, Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Written {
    last_updated: String,
    healthy: bool,
}

/// The answer to `/healthz` (whether load balancers may send traffic here) or `/livez` (whether
/// the daemon does its work).
pub(super) fn of(views: &Views, asks_eligible: bool) -> Health {
    let is_running = views.starting.borrow().is_none();
    judge(
        &views.stats.borrow(),
        is_running,
        asks_eligible,
        Timestamp::now(),
    )
}

fn judge(stats: &Stats, is_running: bool, asks_eligible: bool, now: Timestamp) -> Health {
    let is_stuck = stats
        .failing_since
        .is_some_and(|since| now.duration_since(since) > PATIENCE);
    let is_working = is_running && stats.synced && !is_stuck;
    let is_eligible = !asks_eligible || stats.node_eligible;
    let last = stats.last_whole_pass_at.filter(|_| stats.synced);
    let written = last.map(|last| Written {
        last_updated: last.to_string(),
        healthy: is_working,
    });
    // Whoever looks for an old time is to find none where all is well.
    let is_good = is_working && is_eligible;
    let shown = if is_good { Some(now) } else { last };
    Health {
        last_updated: shown.map_or_else(|| NEVER.to_owned(), |at| at.to_string()),
        current_time: now.to_string(),
        node_eligible: asks_eligible.then_some(stats.node_eligible),
        healthy: is_working,
        is_good,
        status: written.map(|written| Families {
            v4: written.clone(),
            v6: written,
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn good() -> Stats {
        Stats {
            synced: true,
            node_eligible: true,
            ..Stats::default()
        }
    }

    fn now() -> Timestamp {
        Timestamp::from_second(1_800_000_000).expect("a time")
    }

    #[test]
    fn a_daemon_that_waits_for_its_sources_is_not_healthy() {
        let stats = Stats {
            synced: false,
            ..good()
        };

        assert!(!judge(&stats, true, true, now()).is_good);
        assert!(!judge(&good(), false, true, now()).is_good);
    }

    #[test]
    fn writes_that_fail_for_a_moment_are_not_held_against_it() {
        let since = |seconds| {
            Some(
                now()
                    .saturating_sub(SignedDuration::from_secs(seconds))
                    .expect("a time"),
            )
        };
        let for_a_moment = Stats {
            failing_since: since(10),
            ..good()
        };
        let for_long = Stats {
            failing_since: since(61),
            ..good()
        };

        assert!(judge(&for_a_moment, true, false, now()).is_good);
        assert!(!judge(&for_long, true, false, now()).is_good);
    }

    #[test]
    fn a_node_that_is_going_away_lives_but_takes_no_traffic() {
        let stats = Stats {
            node_eligible: false,
            ..good()
        };

        assert!(!judge(&stats, true, true, now()).is_good);
        assert!(judge(&stats, true, false, now()).is_good);
    }

    #[test]
    fn an_answer_is_what_kube_proxy_would_say() {
        let written = Stats {
            last_whole_pass_at: Some(Timestamp::from_second(1_799_999_000).expect("a time")),
            ..good()
        };
        let text = |stats: &Stats, is_ready, asks_eligible| {
            let health = judge(stats, is_ready, asks_eligible, now());
            serde_json::to_string(&health).expect("JSON")
        };
        let (past, now) = ("2027-01-15T07:43:20Z", "2027-01-15T08:00:00Z");
        let family = |healthy| format!(r#"{{"lastUpdated":"{past}","healthy":{healthy}}}"#);
        let status = |healthy| {
            let family = family(healthy);
            format!(r#""status":{{"IPv4":{family},"IPv6":{family}}}"#)
        };

        assert_eq!(
            text(&written, true, true),
            format!(
                r#"{{"lastUpdated":"{now}","currentTime":"{now}","nodeEligible":true,"healthy":true,{}}}"#,
                status(true)
            )
        );
        // A node that is to go is no fault of the daemon.
        let leaving = Stats {
            node_eligible: false,
            ..written.clone()
        };
        assert_eq!(
            text(&leaving, true, true),
            format!(
                r#"{{"lastUpdated":"{past}","currentTime":"{now}","nodeEligible":false,"healthy":true,{}}}"#,
                status(true)
            )
        );
        assert_eq!(
            text(&written, false, false),
            format!(
                r#"{{"lastUpdated":"{past}","currentTime":"{now}","healthy":false,{}}}"#,
                status(false)
            )
        );
        assert_eq!(
            text(&Stats::default(), false, false),
            format!(r#"{{"lastUpdated":"{NEVER}","currentTime":"{now}","healthy":false}}"#)
        );
    }
}
