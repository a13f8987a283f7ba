use std::collections::BTreeMap;

use tunnel_common::reason::Reason;

use crate::{model::ObjectName, plan::PortName};

/// The cause for which a service port is not programmed as planned.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Problem {
    /// The reason to count.
    pub reason: Reason,
    /// The description, for operators.
    pub text: String,
}

/// The problems of a Service, by port.
pub(super) type Problems = BTreeMap<PortName, Problem>;

impl Problem {
    /// Returns the problem of a plan whose backends don't fit into the maps.
    pub(super) fn no_room(reason: Reason, wanted: usize, kept: usize) -> Self {
        let mut text = format!("{} ({wanted} backends wanted", reason.meaning());
        if reason == Reason::BackendsFull && kept > 0 {
            text.push_str(&format!(
                "; open connections keep the indices of {kept} backends that are gone"
            ));
        }
        text.push(')');
        Self { reason, text }
    }
}

/// The problems of Services, and the counter of each reason.
#[derive(Debug, Default)]
pub(super) struct Faults {
    pub(super) problems: BTreeMap<ObjectName, Problems>,
    pub(super) counts: BTreeMap<Reason, u64>,
}

impl Faults {
    /// Counts a reason.
    pub(super) fn count(&mut self, reason: Reason) {
        *self.counts.entry(reason).or_default() += 1;
    }

    /// Replaces the problems of a Service, and logs the new ones. If the Service was not tried to the
    /// end, its previous problems stay.
    pub(super) fn note(
        &mut self,
        service: &ObjectName,
        mut problems: Problems,
        was_tried_to_the_end: bool,
    ) {
        let known = self.problems.remove(service).unwrap_or_default();
        if !was_tried_to_the_end {
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
            self.problems.insert(service.clone(), problems);
        }
    }

    /// Returns the Services that found no room in the maps.
    pub(super) fn without_room(&self) -> impl Iterator<Item = &ObjectName> {
        let is_full = |problem: &Problem| {
            matches!(
                problem.reason,
                Reason::FrontendsFull
                    | Reason::SlotsFull
                    | Reason::BackendsFull
                    | Reason::SourceRangesFull
            )
        };
        let problems = self.problems.iter();
        let refused = problems.filter(move |(_, ports)| ports.values().any(is_full));
        refused.map(|(service, _)| service)
    }
}
