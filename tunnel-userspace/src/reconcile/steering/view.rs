//! The state of steering for the status, and the log messages about its problems.

use std::collections::BTreeSet;

use serde::{Deserialize, Serialize};
use tracing::{info, warn};

use crate::plan::SteeringProblem;

/// The state of steering, as shown in the status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct SteeringView {
    /// The number of edge nodes.
    pub edge_nodes: usize,
    /// The number of address and port pairs that are steered.
    pub entries: usize,
    /// The number of address and port pairs that are not steered because a map or a steering prefix is full.
    #[serde(default)]
    pub unprogrammed: usize,
    /// True if a write failed and will be retried.
    #[serde(default)]
    pub failing: bool,
    /// The current problems, each with the object it concerns.
    pub problems: Vec<String>,
    /// The addresses that are steered although nothing confirms that they belong to their Nodes.
    #[serde(default)]
    pub unconfirmed: Vec<String>,
}

/// Describes the problems that are errors, or, if `is_error` is false, the others.
pub(super) fn describe(problems: &BTreeSet<SteeringProblem>, is_error: bool) -> Vec<String> {
    let problems = problems.iter();
    let problems = problems.filter(|problem| problem.is_error() == is_error);
    let texts = problems.map(|problem| format!("{}: {}", problem.object, problem.text));
    texts.collect()
}

/// Logs the problems that are new or resolved.
pub(super) fn log_changes(old: &BTreeSet<SteeringProblem>, new: &BTreeSet<SteeringProblem>) {
    for problem in new.difference(old) {
        let reason = problem.reason.label();
        let SteeringProblem { object, text, .. } = problem;
        if problem.is_error() {
            warn!(reason, object, text, "cannot steer everything");
        } else {
            warn!(reason, object, text, "steering an unconfirmed address");
        }
    }
    for problem in old.difference(new) {
        let SteeringProblem { object, text, .. } = problem;
        info!(object, text, "steering problem resolved");
    }
}
