//! The node's readiness, decided in one function: `/readyz`, the headline and exit code of `culvert
//! status`, `culvert_ready` and the log all report it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::Serialize;
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};
use tunnel_common::reason::Reason;

use super::Views;
use crate::drain;

/// The minimum interval between two checks for the log; a step of the start is logged at once.
const PACE: Duration = Duration::from_secs(2);

/// A response to `/readyz`.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Readiness {
    pub(super) ready: bool,
    /// The reasons if it is not ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) reasons: Vec<String>,
}

impl Readiness {
    /// Returns the current readiness.
    pub(super) fn of(views: &Views) -> Self {
        let starting = views.starting.borrow().clone();
        let stats = views.stats.borrow().clone();
        let server = (views.source)().server;
        let count = |reason: Reason| stats.problems.get(reason.label()).copied().unwrap_or(0);
        let is_starting = starting.is_some();
        let mut reasons = Vec::from_iter(starting);
        if !is_starting && !stats.synced {
            reasons.push("nothing is programmed yet".to_owned());
        }
        if let Some(since) = stats.failing_since {
            let ports = count(Reason::WriteFailed);
            reasons.push(format!(
                "not everything could be written since {since} (service ports: {ports})"
            ));
        }
        // A source may be ahead of the maps; readiness depends on the content of the maps.
        if stats.stale {
            let stale = server.as_ref().and_then(|server| server.stale.as_deref());
            let stale = stale.unwrap_or("what it says now is being written");
            reasons.push(format!(
                "the API server was not heard of since the start: {stale}"
            ));
        }
        // The maps keep the API server's objects when it becomes unreachable.
        let trouble = server.and_then(|server| server.error);
        if let Some(why) = trouble.filter(|_| is_starting || stats.stale) {
            reasons.push(format!("the API server can't be asked: {why}"));
        }
        // Only full maps count: an address claimed by another Service is left out by the rules, and is
        // not pending.
        let full = [
            Reason::FrontendsFull,
            Reason::SlotsFull,
            Reason::BackendsFull,
        ];
        let full = full.map(|reason| (reason, count(reason), "service ports"));
        let unsteered = stats.steering.unprogrammed;
        let unsteered = (Reason::SteeringFull, unsteered, "ports of nodes");
        for (reason, count, what) in full.into_iter().chain([unsteered]) {
            if count > 0 {
                reasons.push(format!("{count} {what} {}", reason.meaning()));
            }
        }
        if stats.steering.failing {
            reasons.push("not everything could be steered: a write failed".to_owned());
        }
        Self::because(reasons, &views.listening.borrow())
    }

    /// Builds a readiness that is false if there are reasons, or ports that could not be bound yet.
    pub(super) fn because(mut reasons: Vec<String>, listening: &BTreeMap<String, String>) -> Self {
        let ports = listening.iter();
        reasons.extend(ports.map(|(port, why)| format!("cannot listen on {port}: {why}")));
        Self {
            ready: reasons.is_empty(),
            reasons,
        }
    }

    /// Returns the reasons in one line; `None` if it is ready.
    pub(super) fn summary(&self) -> Option<String> {
        (!self.ready).then(|| self.reasons.join("; "))
    }
}

/// Returns a message if no Node has the configured name of this node, although one is expected: the API
/// server is a source, or some Node is known. Returns `None` before all sources have synced.
pub(super) fn nameless(views: &Views) -> Option<String> {
    let stats = views.stats.borrow().clone();
    let report = (views.source)();
    let nodes = report.objects.get(&crate::model::Kind::Node);
    let is_wanted = report.server.is_some() || nodes.is_some_and(|count| *count > 0);
    let is_missing = stats.synced && !stats.stale && !stats.node_known;
    (is_wanted && is_missing).then(|| {
        format!(
            "nodeName {}: there is no Node of this name, so its zone, addresses and taints are not \
             known, and endpoints are local by this name alone",
            views.setup.node
        )
    })
}

/// Logs each change of the readiness, until the drain begins.
pub async fn log_readiness(views: Arc<Views>, mut draining: watch::Receiver<bool>) {
    let mut starting = views.starting.clone();
    let mut stats = views.stats.clone();
    let mut listening = views.listening.subscribe();
    let (mut told, mut named) = (None, None);
    loop {
        let is_starting = starting.borrow_and_update().is_some();
        let readiness = Readiness::of(&views);
        if told.as_ref() != Some(&readiness) {
            match readiness.summary() {
                None => info!("ready"),
                Some(why) if is_starting => info!(why, "not ready yet"),
                Some(why) => warn!(why, "not ready"),
            }
            told = Some(readiness);
        }
        let problem = nameless(&views);
        if named != problem {
            match &problem {
                Some(problem) => warn!(problem, "this node has no Node object"),
                None => info!("this node has a Node object now"),
            }
            named = problem;
        }
        tokio::select! {
            () = drain::begun(&mut draining) => return,
            Ok(()) = starting.changed() => continue,
            Ok(()) = stats.changed() => {}
            Ok(()) = listening.changed() => {}
        }
        // Limits the rate of log lines: counts in the reasons may change with each sync.
        tokio::select! {
            () = drain::begun(&mut draining) => return,
            Ok(()) = starting.changed() => {}
            () = sleep(PACE) => {}
        }
    }
}

#[cfg(test)]
mod tests;
