use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

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

/// The maximum number of ports that warnings list for each Service and reason.
const MAX_LISTED: usize = 4;

/// The current problems of all Services, and the number of times each reason has occurred. Very many ports may
/// have problems, so each change updates only the entries of its Service.
#[derive(Debug, Default)]
pub(super) struct ProblemTracker {
    by_namespace: BTreeMap<Arc<str>, BTreeMap<ObjectName, ServiceProblems>>,
    /// The number of ports with a problem, by reason.
    ports: BTreeMap<Reason, usize>,
    /// The number of ports that did not fit into the share of their namespace, by namespace.
    beyond_share: BTreeMap<Arc<str>, usize>,
    /// The Services with a port that did not fit into the maps, by namespace.
    without_room: BTreeMap<Arc<str>, BTreeSet<ObjectName>>,
    pub(super) reason_counts: BTreeMap<Reason, u64>,
}

/// The problems with one Service's ports, and the warnings about them.
#[derive(Debug)]
struct ServiceProblems {
    ports: PortProblems,
    warnings: Vec<(Reason, String)>,
}

impl ProblemTracker {
    /// Increments a reason's counter.
    pub(super) fn count(&mut self, reason: Reason) {
        *self.reason_counts.entry(reason).or_default() += 1;
    }

    /// Replaces a Service's problems. Counts and logs those that are new, and logs those that are resolved. If
    /// some of the Service's ports were not tried, its previous problems are kept as well.
    pub(super) fn replace(
        &mut self,
        service: &ObjectName,
        mut problems: PortProblems,
        all_ports_tried: bool,
    ) {
        let known = self.remove(service);
        let is_known = |(name, problem): &(&PortName, &PortProblem)| {
            let known = known.get(*name);
            known.is_some_and(|known| known.reason == problem.reason)
        };
        // Each failed write counts, since the kernel has refused it once more.
        let is_counted =
            |it: &(&PortName, &PortProblem)| it.1.reason == Reason::WriteFailed || !is_known(it);
        for (_, problem) in problems.iter().filter(is_counted) {
            self.count(problem.reason);
        }
        if !all_ports_tried {
            for (name, problem) in &known {
                let entry = problems.entry(name.clone());
                entry.or_insert_with(|| problem.clone());
            }
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
            self.insert(service, problems);
        }
    }

    /// Adds the problems of a Service that has none yet.
    fn insert(&mut self, service: &ObjectName, ports: PortProblems) {
        for problem in ports.values() {
            *self.ports.entry(problem.reason).or_default() += 1;
        }
        let beyond = count_beyond_share(&ports);
        if beyond > 0 {
            let namespace = Arc::clone(&service.namespace);
            *self.beyond_share.entry(namespace).or_default() += beyond;
        }
        if ports.values().any(is_full) {
            let namespace = Arc::clone(&service.namespace);
            let services = self.without_room.entry(namespace).or_default();
            services.insert(service.clone());
        }
        let problems = ServiceProblems {
            warnings: warnings_of(&ports),
            ports,
        };
        let namespace = Arc::clone(&service.namespace);
        let services = self.by_namespace.entry(namespace).or_default();
        services.insert(service.clone(), problems);
    }

    /// Removes and returns a Service's problems.
    fn remove(&mut self, service: &ObjectName) -> PortProblems {
        let Some(services) = self.by_namespace.get_mut(&service.namespace) else {
            return PortProblems::new();
        };
        let Some(ServiceProblems { ports, .. }) = services.remove(service) else {
            return PortProblems::new();
        };
        if services.is_empty() {
            self.by_namespace.remove(&service.namespace);
        }
        for problem in ports.values() {
            subtract(&mut self.ports, &problem.reason, 1);
        }
        let beyond = count_beyond_share(&ports);
        subtract(&mut self.beyond_share, &service.namespace, beyond);
        if let Some(services) = self.without_room.get_mut(&service.namespace) {
            services.remove(service);
            if services.is_empty() {
                self.without_room.remove(&service.namespace);
            }
        }
        ports
    }

    /// Returns the problems with a Service's ports.
    pub(super) fn of_service(&self, service: &ObjectName) -> Option<&PortProblems> {
        let services = self.by_namespace.get(&service.namespace)?;
        services.get(service).map(|problems| &problems.ports)
    }

    /// Returns the number of ports with a problem, by reason.
    pub(super) const fn ports(&self) -> &BTreeMap<Reason, usize> {
        &self.ports
    }

    /// Returns the Services with a port that did not fit into the maps, by namespace.
    pub(super) const fn services_without_room(&self) -> &BTreeMap<Arc<str>, BTreeSet<ObjectName>> {
        &self.without_room
    }

    /// Returns true if a port of a Service did not fit into the maps, or if a write failed.
    pub(super) fn is_incomplete(&self, service: &ObjectName) -> bool {
        let mut ports = self.of_service(service).into_iter().flatten();
        ports.any(|(_, problem)| is_full(problem) || problem.reason == Reason::WriteFailed)
    }

    /// Returns the Services with a port for which too few free slots were in a row.
    pub(super) fn fragmented_services(&self) -> impl Iterator<Item = &ObjectName> {
        let is_fragmented = |problem: &PortProblem| problem.reason == Reason::SlotsFragmented;
        let services = self.by_namespace.values().flatten();
        let fragmented = services.filter(move |(_, it)| it.ports.values().any(is_fragmented));
        fragmented.map(|(service, _)| service)
    }

    /// Returns how many ports did not fit into the share of each namespace.
    pub(super) const fn ports_beyond_share(&self) -> &BTreeMap<Arc<str>, usize> {
        &self.beyond_share
    }

    /// Returns, for each namespace, the warnings about its Services. At most [`MAX_LISTED`] ports of a Service
    /// are listed for each reason.
    pub(super) fn warnings(
        &self,
    ) -> impl Iterator<Item = impl Iterator<Item = (&ObjectName, &(Reason, String))>> {
        self.by_namespace.values().map(|services| {
            services.iter().flat_map(|(service, problems)| {
                let warnings = problems.warnings.iter();
                warnings.map(move |warning| (service, warning))
            })
        })
    }
}

/// Returns how many ports did not fit into the share of their namespace.
fn count_beyond_share(ports: &PortProblems) -> usize {
    let reasons = ports.values().map(|problem| problem.reason);
    reasons
        .filter(|reason| *reason == Reason::NamespaceShareExceeded)
        .count()
}

/// Subtracts from a number, and removes the number if it is 0 then.
fn subtract<K: Ord>(numbers: &mut BTreeMap<K, usize>, key: &K, subtrahend: usize) {
    if let Some(number) = numbers.get_mut(key) {
        *number -= subtrahend;
        if *number == 0 {
            numbers.remove(key);
        }
    }
}

/// Returns the reasons and descriptions of a Service's problems. At most [`MAX_LISTED`] ports are listed for
/// each reason, so that a Service with thousands of ports doesn't displace the problems of others.
fn warnings_of(ports: &PortProblems) -> Vec<(Reason, String)> {
    let mut by_reason: BTreeMap<Reason, Vec<_>> = BTreeMap::new();
    for (port, problem) in ports {
        by_reason
            .entry(problem.reason)
            .or_default()
            .push((port, problem));
    }
    let mut listed = Vec::new();
    for (reason, ports) in by_reason {
        let more = ports.len().saturating_sub(MAX_LISTED);
        let notes = ports.into_iter().take(MAX_LISTED);
        listed.extend(notes.map(|(port, problem)| (reason, format!("{port}: {}", problem.text))));
        if let Some((_, note)) = listed.last_mut().filter(|_| more > 0) {
            note.push_str(&format!(" (and {more} more ports of this Service)"));
        }
    }
    listed
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use tunnel_common::addr::Protocol;

    use super::*;
    use crate::model::Family;

    const REASONS: [Reason; 4] = [
        Reason::NamespaceShareExceeded,
        Reason::SlotsFull,
        Reason::FrontendConflict,
        Reason::WriteFailed,
    ];

    fn service(number: u8) -> ObjectName {
        let namespace = if number < 2 { "shop" } else { "lab" };
        ObjectName::new(namespace, format!("web-{number}"))
    }

    /// Returns a Service's problems; `reasons` contains a position in [`REASONS`] for each port that has one.
    fn problems(number: u8, reasons: &[Option<usize>]) -> PortProblems {
        let ports = reasons.iter().enumerate();
        let problem = |(port, reason): (usize, &Option<usize>)| {
            let name = PortName {
                service: service(number),
                port: format!("p{port}").into(),
                protocol: Protocol::TCP,
                family: Family::V4,
            };
            let reason = REASONS[(*reason)?];
            Some((name, PortProblem::new(reason, reason.meaning())))
        };
        ports.filter_map(problem).collect()
    }

    /// Checks the tracker's sums against its problems.
    fn check(tracker: &ProblemTracker) {
        let (mut ports, mut beyond_share) = (BTreeMap::new(), BTreeMap::new());
        let mut without_room = BTreeMap::<_, BTreeSet<_>>::new();
        for (service, problems) in tracker.by_namespace.values().flatten() {
            assert!(!problems.ports.is_empty());
            for problem in problems.ports.values() {
                *ports.entry(problem.reason).or_default() += 1;
                if problem.reason == Reason::NamespaceShareExceeded {
                    let namespace = Arc::clone(&service.namespace);
                    *beyond_share.entry(namespace).or_default() += 1;
                }
                if is_full(problem) {
                    let services = without_room.entry(Arc::clone(&service.namespace));
                    services.or_default().insert(service.clone());
                }
            }
        }
        assert_eq!(tracker.ports, ports);
        assert_eq!(tracker.beyond_share, beyond_share);
        assert_eq!(tracker.without_room, without_room);
    }

    proptest! {
        #[test]
        fn sums_equal_the_problems_after_any_changes(
            changes in proptest::collection::vec(
                (0..4_u8, proptest::collection::vec(proptest::option::of(0..4_usize), 0..8), any::<bool>()),
                1..30,
            ),
        ) {
            let mut tracker = ProblemTracker::default();
            for (number, reasons, all_ports_tried) in changes {
                let wanted = problems(number, &reasons);
                tracker.replace(&service(number), wanted.clone(), all_ports_tried);
                check(&tracker);
                let known = tracker.of_service(&service(number)).cloned().unwrap_or_default();
                let is_kept = |(name, problem)| known.get(name) == Some(problem);
                prop_assert!(wanted.iter().all(is_kept));
                prop_assert!(!all_ports_tried || known == wanted);
            }
            for number in 0..4 {
                tracker.replace(&service(number), PortProblems::new(), true);
            }
            check(&tracker);
            prop_assert!(tracker.by_namespace.is_empty() && tracker.ports.is_empty());
        }
    }

    #[test]
    fn a_problem_counts_once_unless_it_is_a_failed_write() {
        let mut tracker = ProblemTracker::default();
        let mut counts = |reasons: &[Option<usize>], all_ports_tried| {
            tracker.replace(&service(0), problems(0, reasons), all_ports_tried);
            REASONS.map(|reason| tracker.reason_counts.get(&reason).copied().unwrap_or(0))
        };
        let both = [Some(0), Some(0), Some(3)];
        assert_eq!(counts(&both, true), [2, 0, 0, 1]);
        // The retry fails, too.
        assert_eq!(counts(&both, true), [2, 0, 0, 2]);
        // Only the first port was tried again.
        assert_eq!(counts(&[Some(0)], false), [2, 0, 0, 2]);
        // The first port has another problem, and the others have none.
        assert_eq!(counts(&[Some(1)], true), [2, 1, 0, 2]);
        // The first problem occurs again.
        assert_eq!(counts(&both, true), [4, 1, 0, 3]);
    }
}
