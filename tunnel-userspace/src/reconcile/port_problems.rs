use std::collections::BTreeMap;

use tunnel_common::reason::Reason;

use crate::{model::ObjectName, plan::PortName};

/// A problem that keeps a service port from being programmed as planned.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortProblem {
    /// The reason for the problem. Problems are counted by reason.
    pub reason: Reason,
    /// A description for operators.
    pub text: String,
}

/// The problems with one Service's ports.
pub(super) type PortProblems = BTreeMap<PortName, PortProblem>;

impl PortProblem {
    /// Returns the problem for a port that doesn't fit into the maps. `wanted` is the number of backends in
    /// the port's plan, and `draining` is the number of removed backends whose indices are still in use by
    /// open connections.
    pub(super) fn no_room(reason: Reason, wanted: usize, draining: usize) -> Self {
        let mut text = format!("{} ({wanted} backends wanted", reason.meaning());
        if reason == Reason::BackendsFull && draining > 0 {
            text.push_str(&format!(
                "; open connections still use the indices of {draining} removed backends"
            ));
        }
        text.push(')');
        Self { reason, text }
    }
}

/// The current problems of all Services, and the number of times each reason has occurred.
#[derive(Debug, Default)]
pub(super) struct ProblemTracker {
    pub(super) by_service: BTreeMap<ObjectName, PortProblems>,
    pub(super) reason_counts: BTreeMap<Reason, u64>,
}

impl ProblemTracker {
    /// Increments a reason's counter.
    pub(super) fn count(&mut self, reason: Reason) {
        *self.reason_counts.entry(reason).or_default() += 1;
    }

    /// Replaces a Service's problems and logs those that are new or resolved. If some of the Service's ports
    /// were not tried, its previous problems are kept as well.
    pub(super) fn replace(
        &mut self,
        service: &ObjectName,
        mut problems: PortProblems,
        all_ports_tried: bool,
    ) {
        let known = self.by_service.remove(service).unwrap_or_default();
        if !all_ports_tried {
            for (name, problem) in &known {
                let entry = problems.entry(name.clone());
                entry.or_insert_with(|| problem.clone());
            }
        }
        for (name, problem) in &problems {
            self.count(problem.reason);
            if known.get(name) != Some(problem) {
                let reason = problem.reason.label();
                let text = &problem.text;
                tracing::warn!(port = %name, reason, %text, "not programmed as planned");
            }
        }
        for name in known.keys().filter(|name| !problems.contains_key(*name)) {
            tracing::info!(port = %name, "programmed as planned again");
        }
        if !problems.is_empty() {
            self.by_service.insert(service.clone(), problems);
        }
    }

    /// Returns the Services with a port that did not fit into the maps.
    pub(super) fn services_without_room(&self) -> impl Iterator<Item = &ObjectName> {
        let is_full = |problem: &PortProblem| {
            matches!(
                problem.reason,
                Reason::FrontendsFull
                    | Reason::SlotsFull
                    | Reason::BackendsFull
                    | Reason::SourceRangesFull
            )
        };
        let problems = self.by_service.iter();
        let refused = problems.filter(move |(_, ports)| ports.values().any(is_full));
        refused.map(|(service, _)| service)
    }
}
