//! Logs a source's problems when they appear and when they are resolved.

use std::collections::{BTreeMap, BTreeSet};

use tracing::{info, warn};

use crate::source::{Problem, SourceReport, UnknownKind};

/// The problems and unsupported kinds that have been logged, so that each one is logged only once.
#[derive(Debug, Default)]
pub(super) struct ProblemLog {
    problems: BTreeMap<Problem, Problem>,
    unknown: BTreeSet<UnknownKind>,
    rejected_total: u64,
    ignored_total: u64,
}

impl ProblemLog {
    /// Logs the problems that are new in a report and those that have been resolved, and fills in the
    /// report's totals.
    pub(super) fn log_changes(&mut self, report: &mut SourceReport) {
        let problems: BTreeMap<Problem, Problem> = report
            .problems
            .iter()
            .map(|problem| (problem.without_position(), problem.clone()))
            .collect();
        let new = problems
            .iter()
            .filter(|(key, _)| !self.problems.contains_key(*key));
        for (_, problem) in new {
            let Problem {
                origin,
                document,
                line,
                object,
                field,
                reason,
                ignored,
            } = problem;
            let (what, total) = if *ignored {
                ("field ignored", &mut self.ignored_total)
            } else {
                ("manifest rejected", &mut self.rejected_total)
            };
            *total += 1;
            // Only a syntax error has a line of its own.
            let (line, first_line) = if object.is_none() && field.is_none() {
                (*line, None)
            } else {
                (None, *line)
            };
            warn!(
                origin,
                document, line, first_line, object, field, reason, "{what}"
            );
        }
        let resolved = self
            .problems
            .iter()
            .filter(|(key, _)| !problems.contains_key(*key));
        for (_, problem) in resolved {
            let Problem {
                origin,
                object,
                field,
                reason,
                ..
            } = problem;
            info!(origin, object, field, reason, "problem resolved");
        }
        self.problems = problems;
        for unknown in &report.unknown_kinds {
            if self.unknown.insert(unknown.clone()) {
                let UnknownKind { file, kind } = unknown;
                info!(file, kind, "kind not supported");
            }
        }
        report.rejected_total = self.rejected_total;
        report.ignored_total = self.ignored_total;
    }
}
