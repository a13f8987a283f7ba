//! Spreads the retries of very many Services that did not fit into the maps over time.

use std::{
    collections::{BTreeMap, VecDeque},
    mem,
    sync::Arc,
};

use super::port_problems::ProblemTracker;
use crate::model::ObjectName;

/// The number of a namespace's ports with a problem at which no further Service of the namespace is retried at
/// the same time.
const MAX_PORTS: usize = 1024;

/// The Services that did not fit into the maps and are to be retried. Each namespace has a queue of its own, so
/// that a namespace with very many ports neither keeps the others waiting nor delays changes to their Services.
#[derive(Debug, Default)]
pub(super) struct RefusedRetries {
    by_namespace: BTreeMap<Arc<str>, Queue>,
    /// True if entries have been freed since Services were last taken.
    is_planned: bool,
}

/// The Services of a namespace that are to be retried.
#[derive(Debug, Default)]
struct Queue {
    services: VecDeque<ObjectName>,
    /// True if entries have been freed since the queue was last filled.
    is_outdated: bool,
}

impl RefusedRetries {
    /// Plans a retry of all Services that did not fit into the maps, because entries have been freed.
    pub(super) const fn plan(&mut self) {
        self.is_planned = true;
    }

    /// Returns true if a Service is to be retried.
    pub(super) fn is_planned(&self) -> bool {
        self.is_planned || !self.by_namespace.is_empty()
    }

    /// Takes the Services that are to be retried now.
    pub(super) fn take(&mut self, problems: &ProblemTracker) -> Vec<ObjectName> {
        let without_room = problems.services_without_room();
        if mem::take(&mut self.is_planned) {
            for namespace in without_room.keys() {
                let queue = self.by_namespace.entry(Arc::clone(namespace));
                queue.or_default().is_outdated = true;
            }
        }
        let mut taken = Vec::new();
        self.by_namespace.retain(|namespace, queue| {
            if queue.services.is_empty() && mem::take(&mut queue.is_outdated) {
                let services = without_room.get(namespace).into_iter().flatten();
                queue.services = services.cloned().collect();
            }
            let mut ports = 0;
            while ports < MAX_PORTS
                && let Some(service) = queue.services.pop_front()
            {
                ports += problems.of_service(&service).map_or(0, BTreeMap::len);
                taken.push(service);
            }
            queue.is_outdated || !queue.services.is_empty()
        });
        taken
    }
}

#[cfg(test)]
mod tests {
    use tunnel_common::{addr::Protocol, reason::Reason};

    use super::*;
    use crate::{
        model::Family,
        plan::PortName,
        reconcile::port_problems::{PortProblem, PortProblems},
    };

    /// Sets the number of a Service's ports that did not fit into the maps.
    fn set(tracker: &mut ProblemTracker, (namespace, name): (&str, &str), ports: usize) {
        let service = ObjectName::new(namespace, name);
        let name = |port| PortName {
            service: service.clone(),
            port: format!("p{port}").into(),
            protocol: Protocol::TCP,
            family: Family::V4,
        };
        let problem = PortProblem::new(Reason::NamespaceShareExceeded, "");
        let problems: PortProblems = (0..ports).map(|it| (name(it), problem.clone())).collect();
        tracker.replace(&service, problems, true);
    }

    #[test]
    fn a_namespace_with_many_ports_is_retried_in_parts_and_does_not_delay_others() {
        let (mut retries, mut tracker) = (RefusedRetries::default(), ProblemTracker::default());
        for name in ["1", "2", "3", "4"] {
            set(&mut tracker, ("many", name), MAX_PORTS - 1);
        }
        set(&mut tracker, ("few", "1"), 1);
        let mut take = |tracker: &ProblemTracker, is_freed: bool| {
            if is_freed {
                retries.plan();
            }
            let taken = retries.take(tracker);
            let names = taken.iter().map(ToString::to_string).collect::<Vec<_>>();
            (names.join(" "), retries.is_planned())
        };
        let row = |names: &str, is_planned| (names.to_owned(), is_planned);

        assert_eq!(take(&tracker, false), row("", false));
        assert_eq!(take(&tracker, true), row("few/1 many/1 many/2", true));
        assert_eq!(take(&tracker, false), row("many/3 many/4", false));
        // Entries are freed before the end of a round.
        assert_eq!(take(&tracker, true), row("few/1 many/1 many/2", true));
        assert_eq!(take(&tracker, true), row("few/1 many/3 many/4", true));
        set(&mut tracker, ("few", "1"), 0);
        set(&mut tracker, ("many", "1"), 0);
        assert_eq!(take(&tracker, false), row("many/2 many/3", true));
        assert_eq!(take(&tracker, false), row("many/4", false));
    }
}
