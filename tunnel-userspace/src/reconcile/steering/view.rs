//! The state of steering for the status, and the log messages about its problems.

use std::{collections::BTreeSet, time::Duration};

use serde::{Deserialize, Serialize};
use tracing::{info, warn};
use tunnel_common::reason::Reason;

use super::SteeringReconciler;
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

impl<M> SteeringReconciler<M> {
    /// Returns one problem for all unallocated keys together, since there may be thousands of them, or `None`
    /// if there are none.
    pub(super) fn full_problem(&self) -> Option<SteeringProblem> {
        let first = self.plan.targets.get(self.unallocated.first()?)?;
        let others = self.unallocated.len() - 1;
        Some(SteeringProblem {
            reason: Reason::SteeringFull,
            node: None,
            object: format!("{first} and {others} more"),
            text: Reason::SteeringFull.meaning().to_owned(),
        })
    }

    /// Replaces the problems and logs those that are new or resolved.
    pub(super) fn replace_problems(&mut self, problems: BTreeSet<SteeringProblem>, now: Duration) {
        for problem in problems.difference(&self.known_problems) {
            *self.reason_counts.entry(problem.reason).or_default() += 1;
        }
        let log = &mut self.problem_log;
        log.log_changes(&self.known_problems, &problems, now);
        self.known_problems = problems;
    }

    /// Returns the state of steering for the status.
    #[must_use]
    pub fn view(&self) -> SteeringView {
        SteeringView {
            edge_nodes: self.plan.edge_nodes,
            entries: self.keys.len(),
            unprogrammed: self.unallocated.len(),
            failing: self.has_failed,
            problems: describe(&self.known_problems, true),
            unconfirmed: describe(&self.known_problems, false),
        }
    }
}

/// The maximum number of problems to log after one change.
const MAX_PER_CHANGE: usize = 10;
/// The maximum number of log messages per [`WINDOW`].
const MAX_PER_WINDOW: usize = 60;
const WINDOW: Duration = Duration::from_mins(1);

/// A log message about problems.
#[derive(Debug, Eq, PartialEq)]
enum Message<'a> {
    New(&'a SteeringProblem),
    Resolved(&'a SteeringProblem),
    /// The number of new and resolved problems that are not logged.
    LeftOut(usize),
}

/// The number of log messages about problems, which the addresses of Nodes can provoke.
#[derive(Debug, Default)]
pub(super) struct ProblemLog {
    /// The start of the current window, as the time since boot.
    since: Duration,
    logged: usize,
    left_out: usize,
}

impl ProblemLog {
    /// Logs the problems that are new or resolved. Beyond a limit, only their number is logged.
    pub(super) fn log_changes(
        &mut self,
        old: &BTreeSet<SteeringProblem>,
        new: &BTreeSet<SteeringProblem>,
        now: Duration,
    ) {
        for message in self.messages(old, new, now) {
            message.log();
        }
    }

    fn messages<'a>(
        &mut self,
        old: &'a BTreeSet<SteeringProblem>,
        new: &'a BTreeSet<SteeringProblem>,
        now: Duration,
    ) -> Vec<Message<'a>> {
        let appeared = new.difference(old).map(Message::New);
        let mut messages: Vec<_> = appeared
            .chain(old.difference(new).map(Message::Resolved))
            .collect();
        if now.saturating_sub(self.since) >= WINDOW {
            (self.since, self.logged) = (now, 0);
        }
        let room = MAX_PER_WINDOW - self.logged;
        // The last message in a window reports how many others are left out.
        let most = MAX_PER_CHANGE.min(room.saturating_sub(1));
        self.left_out += messages.len().saturating_sub(most);
        messages.truncate(most);
        if self.left_out > 0 && room > 0 {
            messages.push(Message::LeftOut(std::mem::take(&mut self.left_out)));
        }
        self.logged += messages.len();
        messages
    }
}

impl Message<'_> {
    fn log(&self) {
        match self {
            Self::New(problem) => {
                let reason = problem.reason.label();
                let SteeringProblem { object, text, .. } = problem;
                if problem.is_error() {
                    warn!(reason, object, text, "cannot steer everything");
                } else {
                    warn!(reason, object, text, "steering an unconfirmed address");
                }
            }
            Self::Resolved(SteeringProblem { object, text, .. }) => {
                info!(object, text, "steering problem resolved");
            }
            Self::LeftOut(count) => warn!(
                count,
                "more steering problems are new or resolved; culvert status shows the current ones"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_common::reason::Reason;

    use super::*;

    fn problems(numbers: std::ops::Range<usize>) -> BTreeSet<SteeringProblem> {
        let problem = |number| SteeringProblem {
            reason: Reason::AddressUnconfirmed,
            node: None,
            object: format!("Node edge-{number:04}: status.addresses"),
            text: "nothing confirms 10.1.2.3".to_owned(),
        };
        numbers.map(problem).collect()
    }

    #[test]
    fn a_few_problems_are_all_logged() {
        let (mut log, old, new) = (ProblemLog::default(), problems(0..2), problems(1..3));
        let (added, removed) = (problems(2..3), problems(0..1));
        let expected: Vec<_> = added
            .iter()
            .map(Message::New)
            .chain(removed.iter().map(Message::Resolved))
            .collect();
        assert_eq!(log.messages(&old, &new, WINDOW), expected);
        assert_eq!(log.messages(&new, &new, WINDOW), []);
    }

    #[test]
    fn problems_beyond_the_limits_are_only_counted() {
        let (mut log, none, many) = (ProblemLog::default(), problems(0..0), problems(0..1000));

        let messages = log.messages(&none, &many, WINDOW);
        assert_eq!(messages.len(), 11);
        assert_eq!(messages.last(), Some(&Message::LeftOut(990)));

        let mut logged = messages.len();
        for _ in 0..20 {
            logged += log.messages(&many, &none, WINDOW).len();
            logged += log.messages(&none, &many, WINDOW * 3 / 2).len();
        }
        assert_eq!(logged, 60);

        let messages = log.messages(&many, &none, WINDOW * 2);
        let left_out = match messages.last() {
            Some(Message::LeftOut(count)) => *count,
            other => panic!("{other:?}"),
        };
        assert_eq!(messages.len(), 11);
        // 1000 of each of 40 changes, and of this one, except those logged.
        assert!(left_out > 30_000, "{left_out}");
    }
}
