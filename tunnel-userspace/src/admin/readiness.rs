//! The one answer to the question if Services are translated as they should be: `/readyz`, the
//! headline and the exit code of `culvert status`, `culvert_ready` and the log all give it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::Serialize;
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};
use tunnel_common::reason::Reason;

use super::Views;
use crate::drain;

/// How long the log waits after an answer; a step of the start is told at once.
const PACE: Duration = Duration::from_secs(2);

/// An answer to `/readyz`.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Readiness {
    pub(super) ready: bool,
    /// Why not.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) reasons: Vec<String>,
}

impl Readiness {
    /// The answer now.
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
        // A source may be ahead of the maps: what they hold is what counts.
        if stats.stale {
            let stale = server.as_ref().and_then(|server| server.stale.as_deref());
            let stale = stale.unwrap_or("what it says now is being written");
            reasons.push(format!(
                "the API server was not heard of since the start: {stale}"
            ));
        }
        // What the API server said once stays in the maps when it goes.
        let trouble = server.and_then(|server| server.trouble);
        if let Some(why) = trouble.filter(|_| is_starting || stats.stale) {
            reasons.push(format!("the API server can't be asked: {why}"));
        }
        // An address that another Service has is left out by the rules, and waits for nothing.
        let full = [Reason::FrontsFull, Reason::SlotsFull, Reason::BackendsFull];
        let full = full.map(|reason| (reason, count(reason), "service ports"));
        let unsteered = stats.steering.homeless;
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

    /// Ready, unless there are reasons, or ports that are not ours yet.
    pub(super) fn because(mut reasons: Vec<String>, listening: &BTreeMap<String, String>) -> Self {
        let ports = listening.iter();
        reasons.extend(ports.map(|(port, why)| format!("cannot listen on {port}: {why}")));
        Self {
            ready: reasons.is_empty(),
            reasons,
        }
    }

    /// Why not, in one line; nothing if it is ready.
    pub(super) fn summary(&self) -> Option<String> {
        (!self.ready).then(|| self.reasons.join("; "))
    }
}

/// Returns why the name of this node in the config is that of no Node, where there should be one: the
/// API server is a source, or some Node is known. Before all sources were heard, nothing is known.
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

/// Logs the answer each time that it changes, until the drain begins.
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
        // Counts in the reasons may change with each pass.
        tokio::select! {
            () = drain::begun(&mut draining) => return,
            Ok(()) = starting.changed() => {}
            () = sleep(PACE) => {}
        }
    }
}

#[cfg(test)]
mod tests;
