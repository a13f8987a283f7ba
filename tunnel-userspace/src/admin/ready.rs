//! The one answer to the question if Services are translated as they should be: `/readyz`, the
//! headline and the exit code of `culvert status`, `culvert_ready` and the log all give it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::Serialize;
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};
use tunnel_common::reason::Reason;

use super::Views;
use crate::{drain, reconcile::Stats, source::Server};

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
        let listening = views.listening.borrow().clone();
        judge(
            starting,
            &views.stats.borrow(),
            (views.source)().server.as_ref(),
            &listening,
        )
    }

    /// Ready, unless there are reasons, or ports that are not ours yet.
    pub(super) fn because(
        reasons: impl Iterator<Item = String>,
        listening: &BTreeMap<String, String>,
    ) -> Self {
        let ports = listening.iter();
        let ports = ports.map(|(port, why)| format!("cannot listen on {port}: {why}"));
        let reasons: Vec<_> = reasons.chain(ports).collect();
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

fn judge(
    starting: Option<String>,
    stats: &Stats,
    server: Option<&Server>,
    listening: &BTreeMap<String, String>,
) -> Readiness {
    // What the API server said once stays in the maps when it goes.
    let is_unheard = starting.is_some() || stats.stale;
    let trouble = server.and_then(|server| server.trouble.as_ref());
    let trouble = trouble.filter(|_| is_unheard);
    let trouble = trouble.map(|why| format!("the API server can't be asked: {why}"));
    let unsynced =
        (starting.is_none() && !stats.synced).then(|| "nothing is programmed yet".to_owned());
    let failing = stats.failing_since.map(|since| {
        let ports = count(stats, Reason::WriteFailed);
        format!("not everything could be written since {since} (service ports: {ports})")
    });
    // A source may be ahead of the maps: what they hold is what counts.
    let stale = stats.stale.then(|| {
        let stale = server.and_then(|server| server.stale.as_deref());
        let stale = stale.unwrap_or("what it says now is being written");
        format!("the API server was not heard of since the start: {stale}")
    });
    let reasons = [starting, unsynced, failing, stale, trouble];
    let reasons = reasons.into_iter().flatten().chain(unwritten(stats));
    Readiness::because(reasons, listening)
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
