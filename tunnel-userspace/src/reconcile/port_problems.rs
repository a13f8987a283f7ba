use std::{collections::BTreeMap, sync::Arc};

use tunnel_common::reason::Reason;

use crate::{model::ObjectName, plan::PortName};

/// A problem that keeps a service port from being programmed as planned.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortProblem {
    /// The reason for the problem. Problems are counted by reason.
    pub reason: Reason,
    /// A description for operators. Snapshots share it, since one Service may have many ports.
    pub text: Arc<str>,
}

impl PortProblem {
    /// Creates a problem.
    pub(super) fn new(reason: Reason, text: impl Into<Arc<str>>) -> Self {
        let text = text.into();
        Self { reason, text }
    }
}

/// The problems with one Service's ports.
pub(super) type PortProblems = BTreeMap<PortName, PortProblem>;

/// The maximum number of a Service's ports that are logged at once.
const MAX_LOGGED: usize = 10;

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
        for problem in problems.values() {
            self.count(problem.reason);
        }
        let is_new = |(name, problem): &(&PortName, &PortProblem)| {
            let known = known.get(*name);
            known.is_none_or(|known| {
                known.reason != problem.reason || !is_full(problem) && known.text != problem.text
            })
        };
        let new: Vec<_> = problems.iter().filter(is_new).collect();
        for (name, problem) in new.iter().take(MAX_LOGGED) {
            let reason = problem.reason.label();
            let text = &problem.text;
            tracing::warn!(port = %name, reason, %text, "not programmed as planned");
        }
        if let Some(ports @ 1..) = new.len().checked_sub(MAX_LOGGED) {
            tracing::warn!(%service, ports, "more ports of the Service are not programmed as planned");
        }
        let resolved = known.keys().filter(|name| !problems.contains_key(*name));
        for name in resolved.clone().take(MAX_LOGGED) {
            tracing::info!(port = %name, "programmed as planned again");
        }
        if let Some(ports @ 1..) = resolved.count().checked_sub(MAX_LOGGED) {
            tracing::info!(%service, ports, "more ports of the Service are programmed as planned again");
        }
        if !problems.is_empty() {
            self.by_service.insert(service.clone(), problems);
        }
    }

    /// Returns the Services with a port that did not fit into the maps.
    pub(super) fn services_without_room(&self) -> impl Iterator<Item = &ObjectName> {
        let problems = self.by_service.iter();
        let refused = problems.filter(|(_, ports)| ports.values().any(is_full));
        refused.map(|(service, _)| service)
    }

    /// Returns true if a port of a Service did not fit into the maps, or if a write failed.
    pub(super) fn is_incomplete(&self, service: &ObjectName) -> bool {
        let ports = self.by_service.get(service).into_iter().flatten();
        ports
            .into_iter()
            .any(|(_, problem)| is_full(problem) || problem.reason == Reason::WriteFailed)
    }

    /// Returns the Services with a port for which too few free slots were in a row.
    pub(super) fn fragmented_services(&self) -> impl Iterator<Item = &ObjectName> {
        let is_fragmented = |problem: &PortProblem| problem.reason == Reason::SlotsFragmented;
        let problems = self.by_service.iter();
        let fragmented = problems.filter(move |(_, ports)| ports.values().any(is_fragmented));
        fragmented.map(|(service, _)| service)
    }

    /// Returns how many ports did not fit into the share of each namespace.
    pub(super) fn ports_beyond_share(&self) -> BTreeMap<Arc<str>, usize> {
        let mut namespaces = BTreeMap::new();
        for (service, ports) in &self.by_service {
            let is_beyond =
                |problem: &&PortProblem| problem.reason == Reason::NamespaceShareExceeded;
            let beyond = ports.values().filter(is_beyond).count();
            if beyond > 0 {
                *namespaces
                    .entry(Arc::clone(&service.namespace))
                    .or_default() += beyond;
            }
        }
        namespaces
    }
}

/// Returns true if a port did not fit into the maps.
const fn is_full(problem: &PortProblem) -> bool {
    matches!(
        problem.reason,
        Reason::FrontendsFull
            | Reason::SlotsFull
            | Reason::SlotsReduced
            | Reason::SlotsFragmented
            | Reason::BackendsFull
            | Reason::SourceRangesFull
            | Reason::NamespaceShareExceeded
    )
}
