//! The problems that an operator must act on.

use std::collections::{BTreeMap, BTreeSet};

use tunnel_common::reason::Reason;

use crate::{
    model::{Kind, ObjectId, ObjectName, ObjectWarning},
    plan::SteeringProblem,
    reconcile::{desired_plans::DesiredPlans, map_sync::MapSync, port_problems::PortProblems},
};

/// The maximum number of problems to report for Services, and likewise for steering.
const MAX_PROBLEMS: usize = 1000;

/// The maximum number of ports to report for each Service and reason.
const MAX_PORTS: usize = 4;

/// Returns the problems with Services and steering. A full map or a failed write is also reported, once, as a
/// problem with this node.
pub(in crate::reconcile) fn warnings<M>(
    desired: &DesiredPlans,
    sync: &MapSync<M>,
    steering: &BTreeSet<SteeringProblem>,
) -> Vec<ObjectWarning> {
    let of_node: BTreeSet<Reason> = sync
        .all_problems()
        .map(|problem| problem.reason)
        .filter(|reason| {
            matches!(
                reason,
                Reason::FrontendsFull
                    | Reason::SlotsFull
                    | Reason::SlotsFragmented
                    | Reason::BackendsFull
                    | Reason::WriteFailed
            )
        })
        .collect();
    let problems = sync.problems.by_service.iter();
    let problems = problems.flat_map(|(service, ports)| {
        let listed = listed_problems(ports).into_iter();
        listed.map(move |problem| (service, problem))
    });
    let uid = |service: &ObjectName| desired.states.get(service)?.service.uid.clone();
    let of_services = problems
        .take(MAX_PROBLEMS)
        .map(|(service, (reason, note))| ObjectWarning {
            regarding: ObjectId::new(Kind::Service, service.clone()),
            uid: uid(service),
            reason,
            note,
        });
    let of_listeners = desired.listeners.ignored.iter().take(MAX_PROBLEMS);
    let of_listeners = of_listeners.filter_map(|(frontend, user)| {
        let service = &desired.frontend_owners.owner(frontend)?.service;
        Some(ObjectWarning {
            regarding: ObjectId::new(Kind::Service, service.clone()),
            uid: uid(service),
            reason: Reason::ListenerIgnored,
            note: format!(
                "the listener of user {user} on {frontend} is ignored: service.localListeners does not \
                 contain this user"
            ),
        })
    });
    let own = &desired.rules.node_info.name;
    let of_steering = steering.iter().take(MAX_PROBLEMS);
    let of_steering = of_steering.map(|problem| match (&problem.node, problem.reason) {
        // The warning leaves out the number of addresses, which changes all the time.
        (_, Reason::SteeringFull) => node_problem(own, problem.reason),
        (node, reason) => {
            let name = node.as_ref().map_or(&**own, |node| &node.name);
            let note = format!("{}: {}", problem.object, problem.text);
            ObjectWarning::for_node(name, reason, note)
        }
    });
    let of_node = of_node.into_iter().map(|reason| node_problem(own, reason));
    let of_services = of_services.chain(of_listeners);
    of_node.chain(of_services).chain(of_steering).collect()
}

/// Returns the reasons and descriptions of a Service's problems. At most [`MAX_PORTS`] ports are listed for
/// each reason, so that a Service with thousands of ports doesn't displace the problems of others.
fn listed_problems(ports: &PortProblems) -> Vec<(Reason, String)> {
    let mut by_reason: BTreeMap<Reason, Vec<_>> = BTreeMap::new();
    for (port, problem) in ports {
        by_reason
            .entry(problem.reason)
            .or_default()
            .push((port, problem));
    }
    let mut listed = Vec::new();
    for (reason, ports) in by_reason {
        let more = ports.len().saturating_sub(MAX_PORTS);
        let notes = ports.into_iter().take(MAX_PORTS);
        listed.extend(notes.map(|(port, problem)| (reason, format!("{port}: {}", problem.text))));
        if let Some((_, note)) = listed.last_mut().filter(|_| more > 0) {
            note.push_str(&format!(" (and {more} more ports of this Service)"));
        }
    }
    listed
}

/// Returns a warning about a node, with the reason's description as its text.
fn node_problem(node: &str, reason: Reason) -> ObjectWarning {
    ObjectWarning::for_node(node, reason, reason.meaning().to_owned())
}
