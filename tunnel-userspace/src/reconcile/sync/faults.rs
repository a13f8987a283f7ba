use std::collections::BTreeMap;

use tunnel_common::reason::Reason;

use crate::{
    model::ObjectName,
    plan::PortName,
    reconcile::problems::{Problem, Problems},
};

/// The problems of Services, and how often each reason was met.
#[derive(Debug, Default)]
pub(crate) struct Faults {
    problems: BTreeMap<ObjectName, Problems>,
    counts: BTreeMap<Reason, u64>,
}

impl Faults {
    /// The problems there are.
    pub(crate) const fn problems(&self) -> &BTreeMap<ObjectName, Problems> {
        &self.problems
    }

    /// How often each reason was met, since the start.
    pub(crate) const fn counts(&self) -> &BTreeMap<Reason, u64> {
        &self.counts
    }

    /// Counts a reason.
    pub(super) fn count(&mut self, reason: Reason) {
        let count = self.counts.entry(reason).or_default();
        *count += 1;
    }

    /// Takes the problems of a Service as they are now, and logs those that were not known before. Where
    /// it was not tried to the end, those that were known may still be.
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
                log(name, problem);
            }
        }
        for name in known.keys().filter(|name| !problems.contains_key(*name)) {
            tracing::info!(port = %name, "programmed as planned again");
        }
        if !problems.is_empty() {
            self.problems.insert(service.clone(), problems);
        }
    }

    /// The Services for which there was no room.
    pub(super) fn without_room(&self) -> impl Iterator<Item = &ObjectName> {
        let is_full = |problem: &Problem| {
            matches!(
                problem.reason,
                Reason::FrontsFull | Reason::SlotsFull | Reason::BackendsFull | Reason::SourcesFull
            )
        };
        let problems = self.problems.iter();
        let refused = problems.filter(move |(_, ports)| ports.values().any(is_full));
        refused.map(|(service, _)| service)
    }
}

fn log(name: &PortName, problem: &Problem) {
    let reason = problem.reason.label();
    tracing::warn!(port = %name, reason, text = %problem.text, "not programmed as planned");
}
