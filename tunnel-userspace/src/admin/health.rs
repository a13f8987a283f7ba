//! What load balancers and probes ask, as kube-proxy answers it
//! (kube-proxy `pkg/proxy/healthcheck/proxy_health.go`).

use jiff::{SignedDuration, Timestamp};
use serde::Serialize;
use tunnel_common::reason::Reason;

use super::Views;
use crate::{reconcile::Stats, source::Server};

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
    let is_ready = views.ready.borrow().is_none();
    judge(
        &views.stats.borrow(),
        is_ready,
        asks_eligible,
        Timestamp::now(),
    )
}

fn judge(stats: &Stats, is_ready: bool, asks_eligible: bool, now: Timestamp) -> Health {
    let is_stuck = stats
        .failing_since
        .is_some_and(|since| now.duration_since(since) > PATIENCE);
    let is_working = is_ready && stats.synced && !is_stuck;
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

/// An answer to `/readyz`.
#[derive(Debug, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Readiness {
    pub(super) ready: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    reasons: Vec<String>,
}

/// Whether the maps hold everything that the sources have told.
pub(super) fn readiness(views: &Views) -> Readiness {
    let starting = views.ready.borrow().clone();
    ready(starting, &views.stats.borrow(), (views.source)().server)
}

fn ready(starting: Option<String>, stats: &Stats, server: Option<Server>) -> Readiness {
    let unsynced =
        (starting.is_none() && !stats.synced).then(|| "nothing is programmed yet".to_owned());
    let failing = stats.failing_since.map(|since| {
        let ports = count(stats, Reason::WriteFailed);
        format!("not everything could be written since {since} (service ports: {ports})")
    });
    // A source may be ahead of the maps: what they hold is what counts.
    let stale = stats.stale.then(|| {
        let stale = server.and_then(|server| server.stale);
        let stale = stale.unwrap_or_else(|| "what it says now is being written".to_owned());
        format!("the API server was not heard of since the start: {stale}")
    });
    let reasons: Vec<String> = [starting, unsynced, failing, stale]
        .into_iter()
        .flatten()
        .chain(unwritten(stats))
        .collect();
    Readiness {
        ready: reasons.is_empty(),
        reasons,
    }
}

/// What is in no map. An address that another Service has is left out by the rules, and waits for
/// nothing.
fn unwritten(stats: &Stats) -> impl Iterator<Item = String> {
    let full = [Reason::FrontsFull, Reason::SlotsFull, Reason::BackendsFull];
    let full = full.map(|reason| (reason, count(stats, reason), "service ports"));
    let steering = (
        Reason::SteeringFull,
        stats.steering.homeless,
        "ports of nodes",
    );
    let failing = stats.steering.failing;
    let is_failing = failing.then(|| "not everything could be steered: a write failed".to_owned());
    full.into_iter()
        .chain([steering])
        .filter(|(_, count, _)| *count > 0)
        .map(|(reason, count, what)| format!("{count} {what} {}", reason.meaning()))
        .chain(is_failing)
}

fn count(stats: &Stats, reason: Reason) -> usize {
    stats.problems.get(reason.label()).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_is_ready_when_the_maps_hold_what_the_api_server_has_told() {
        let failing = Stats {
            failing_since: Some(now()),
            ..good()
        };
        let is_ready = |starting: Option<&str>, stats: &Stats| {
            ready(starting.map(str::to_owned), stats, None).ready
        };

        assert!(is_ready(None, &good()));
        assert!(!is_ready(Some("waiting"), &good()));
        assert!(!is_ready(None, &Stats::default()));
        assert!(!is_ready(None, &failing));
    }

    #[test]
    fn news_of_the_api_server_count_once_they_are_in_the_maps() {
        let server = |stale: Option<&str>| {
            Some(Server {
                stale: stale.map(str::to_owned),
                ..Server::default()
            })
        };
        let stale = Stats {
            stale: true,
            ..good()
        };

        let before = ready(None, &stale, server(Some("of yesterday")));
        let meanwhile = ready(None, &stale, server(None));
        let after = ready(None, &good(), server(None));

        assert_eq!(
            before.reasons,
            ["the API server was not heard of since the start: of yesterday"]
        );
        assert_eq!(
            meanwhile.reasons,
            ["the API server was not heard of since the start: what it says now is being written"]
        );
        assert!(after.ready);
    }

    #[test]
    fn what_found_no_room_in_a_map_is_told_with_its_count() {
        let problems = [
            (Reason::FrontsFull, 2),
            (Reason::BackendsFull, 1),
            (Reason::FrontClaimed, 5),
        ];
        let problems = problems.map(|(reason, count)| (reason.label().to_owned(), count));
        let full = Stats {
            problems: problems.into(),
            ..good()
        };
        let mut unsteered = good();
        unsteered.steering.homeless = 3;
        let mut failing = good();
        failing.steering.failing = true;
        let mut claimed = full.clone();
        claimed
            .problems
            .retain(|reason, _| reason == Reason::FrontClaimed.label());

        assert_eq!(
            ready(None, &full, None).reasons,
            [
                "2 service ports not programmed: bpf.maps.fronts is used up",
                "1 service ports not programmed: bpf.maps.backends is used up",
            ]
        );
        assert_eq!(
            ready(None, &unsteered, None).reasons,
            ["3 ports of nodes not steered: bpf.maps.steering or a steering prefix is used up"]
        );
        assert!(!ready(None, &failing, None).ready);
        assert!(ready(None, &claimed, None).ready);
    }

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
