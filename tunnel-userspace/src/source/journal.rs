use std::collections::{BTreeMap, BTreeSet};

use tracing::{info, warn};

use crate::source::{Problem, Report, UnknownKind};

/// What the log has been told, so that each thing is told once.
#[derive(Debug, Default)]
pub(super) struct Journal {
    problems: BTreeMap<Problem, Problem>,
    unknown: BTreeSet<UnknownKind>,
    refused_total: u64,
}

impl Journal {
    /// Logs what is new in a report, and what is over. Gives how many problems there ever were.
    pub(super) fn tell(&mut self, report: &Report) -> u64 {
        let problems: BTreeMap<Problem, Problem> = report
            .problems
            .iter()
            .map(|problem| (problem.without_place(), problem.clone()))
            .collect();
        for (
            _,
            Problem {
                origin,
                document,
                line,
                object,
                field,
                reason,
            },
        ) in problems
            .iter()
            .filter(|(key, _)| !self.problems.contains_key(*key))
        {
            self.refused_total = self.refused_total.saturating_add(1);
            warn!(
                origin,
                document, line, object, field, reason, "manifest refused"
            );
        }
        for (
            _,
            Problem {
                origin,
                document: _,
                line: _,
                object,
                field,
                reason,
            },
        ) in self
            .problems
            .iter()
            .filter(|(key, _)| !problems.contains_key(*key))
        {
            info!(origin, object, field, reason, "problem resolved");
        }
        self.problems = problems;
        for unknown in &report.unknown_kinds {
            if self.unknown.insert(unknown.clone()) {
                let UnknownKind { file, kind } = unknown;
                info!(file, kind, "kind left alone");
            }
        }
        self.refused_total
    }
}
