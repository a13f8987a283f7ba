//! Decides whether the node is ready. The result appears in `/readyz`, the metric `culvert_ready`, the log,
//! and the headline and exit code of `culvert status`.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::Serialize;
use tokio::{sync::watch, time::sleep};
use tracing::{info, warn};
use tunnel_common::reason::Reason;

use super::{NodeViews, healthz};
use crate::drain;

/// The minimum interval between two log lines about readiness. Startup steps are logged without this delay.
const LOG_INTERVAL: Duration = Duration::from_secs(2);

/// The response to `/readyz`.
#[derive(Clone, Debug, Default, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Readiness {
    pub(super) ready: bool,
    /// The reasons why the node is not ready.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) reasons: Vec<String>,
}

impl Readiness {
    /// Returns the node's current readiness.
    pub(super) fn of(views: &NodeViews) -> Self {
        let starting = views.starting.borrow().clone();
        let stats = views.stats.borrow().clone();
        let server = (views.source_report)().server;
        let count = |reason: Reason| stats.problems.get(reason.label()).copied().unwrap_or(0);
        let is_starting = starting.is_some();
        let mut reasons = Vec::from_iter(starting);
        reasons.extend(views.stopping.borrow().clone());
        if !is_starting && !stats.synced {
            reasons.push("nothing is programmed yet".to_owned());
        }
        reasons.extend(views.attachment.borrow().problems.iter().cloned());
        reasons.extend(stats.probe_problem.clone());
        reasons.extend(views.packets.borrow().unavailable());
        if healthz::is_hung(views) {
            let limit = healthz::MAX_BUSY_TIME.as_secs();
            reasons.push(format!(
                "the reconcile loop has made no progress for {limit} s"
            ));
        }
        if let Some(since) = stats.failing_since {
            let ports = count(Reason::WriteFailed);
            reasons.push(format!(
                "writes to the maps fail since {since} ({ports} service ports not written)"
            ));
        }
        // The API server may already have responded, but its objects are not in the maps yet.
        if stats.stale {
            let stale = server.as_ref().and_then(|server| server.stale.as_deref());
            reasons.push(stale.map_or_else(
                || "the first response of the API server is being written".to_owned(),
                |stale| format!("no response from the API server since the start: {stale}"),
            ));
        }
        // Once the API server's objects are in the maps, the node stays ready even if the server fails.
        let error = server.and_then(|server| server.error);
        if let Some(why) = error.filter(|_| is_starting || stats.stale) {
            reasons.push(format!("requests to the API server fail: {why}"));
        }
        // A full map makes the node not ready. A frontend that is not programmed because another Service owns
        // it does not affect readiness.
        let full = [
            Reason::FrontendsFull,
            Reason::SlotsFull,
            Reason::BackendsFull,
        ];
        let full = full.map(|reason| (reason, count(reason), "service ports"));
        let unprogrammed = stats.steering.unprogrammed;
        let unprogrammed = (Reason::SteeringFull, unprogrammed, "ports of nodes");
        for (reason, count, what) in full.into_iter().chain([unprogrammed]) {
            if count > 0 {
                reasons.push(format!("{count} {what} {}", reason.meaning()));
            }
        }
        if stats.steering.failing {
            reasons.push("writes to the steering maps fail".to_owned());
        }
        Self::from_reasons(reasons, &views.unbound_ports.borrow())
    }

    /// Builds the readiness from the given reasons, plus one for each port that is not bound yet. The node is
    /// ready if there are none.
    pub(super) fn from_reasons(
        mut reasons: Vec<String>,
        listening: &BTreeMap<String, String>,
    ) -> Self {
        let ports = listening.iter();
        reasons.extend(ports.map(|(port, why)| format!("cannot listen on {port}: {why}")));
        Self {
            ready: reasons.is_empty(),
            reasons,
        }
    }

    /// Returns the reasons on one line, or `None` if the node is ready.
    pub(super) fn summary(&self) -> Option<String> {
        (!self.ready).then(|| self.reasons.join("; "))
    }
}

/// Returns a message if no Node object has this node's name. Returns `None` until the sources have synced,
/// and if no Node is expected because the API server is not a source and the manifests contain no Nodes.
pub(super) fn missing_node(views: &NodeViews) -> Option<String> {
    let stats = views.stats.borrow().clone();
    let report = (views.source_report)();
    let nodes = report.objects.get(&crate::model::Kind::Node);
    let is_wanted = report.server.is_some() || nodes.is_some_and(|count| *count > 0);
    let is_missing = stats.synced && !stats.stale && !stats.node_known;
    (is_wanted && is_missing).then(|| {
        format!(
            "nodeName {}: no Node has this name, so its zone, addresses and taints are unknown; \
             endpoints are local if their nodeName equals this name",
            views.setup.node
        )
    })
}

/// Logs each change in readiness until the drain begins.
pub async fn log_readiness(views: Arc<NodeViews>, mut draining: watch::Receiver<bool>) {
    let mut starting = views.starting.clone();
    let mut stats = views.stats.clone();
    let mut listening = views.unbound_ports.subscribe();
    let mut attachment = views.attachment.clone();
    let (mut logged, mut logged_problem) = (None, None);
    loop {
        let is_starting = starting.borrow_and_update().is_some();
        let readiness = Readiness::of(&views);
        if logged.as_ref() != Some(&readiness) {
            match readiness.summary() {
                None => info!("ready"),
                Some(why) if is_starting => info!(why, "not ready yet"),
                Some(why) => warn!(why, "not ready"),
            }
            logged = Some(readiness);
        }
        let problem = missing_node(&views);
        if logged_problem != problem {
            match &problem {
                Some(problem) => warn!(problem, "this node has no Node object"),
                None => info!("this node has a Node object now"),
            }
            logged_problem = problem;
        }
        tokio::select! {
            () = drain::begun(&mut draining) => return,
            Ok(()) = starting.changed() => continue,
            Ok(()) = stats.changed() => {}
            Ok(()) = listening.changed() => {}
            Ok(()) = attachment.changed() => {}
        }
        // Any sync may change a count in the reasons, so the log lines are rate-limited.
        tokio::select! {
            () = drain::begun(&mut draining) => return,
            Ok(()) = starting.changed() => {}
            () = sleep(LOG_INTERVAL) => {}
        }
    }
}

#[cfg(test)]
mod tests;
