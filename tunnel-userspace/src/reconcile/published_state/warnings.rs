//! The problems that an operator must act on.

use std::{collections::BTreeSet, sync::Arc};

use tunnel_common::reason::Reason;

use crate::{
    model::{Kind, ObjectId, ObjectName, ObjectWarning},
    plan::SteeringProblem,
    reconcile::{desired_plans::DesiredPlans, map_sync::MapSync},
    round_robin,
};

/// The maximum number of problems to report for Services, and likewise for steering.
const MAX_PROBLEMS: usize = 1000;

/// Returns the problems with Services and steering. If there are too many, those of each namespace are reported
/// in turn. A full map or a failed write is also reported, once, as a problem with this node.
pub(in crate::reconcile) fn warnings<M>(
    desired: &DesiredPlans,
    sync: &MapSync<M>,
    steering: &BTreeSet<SteeringProblem>,
) -> Vec<ObjectWarning> {
    let of_node = sync.ports_with_problems().into_keys().filter(|reason| {
        matches!(
            reason,
            Reason::FrontendsFull
                | Reason::SlotsFull
                | Reason::SlotsFragmented
                | Reason::BackendsFull
                | Reason::WriteFailed
        )
    });
    let uid = |service: &ObjectName| desired.states.get(service)?.service.uid.clone();
    let of_services = round_robin::take(sync.problems.warnings(), MAX_PROBLEMS);
    let of_services = of_services
        .into_iter()
        .map(|(service, (reason, note))| ObjectWarning {
            regarding: ObjectId::new(Kind::Service, service.clone()),
            uid: uid(service),
            reason: *reason,
            note: note.clone(),
        });
    let of_listeners = desired.listeners.ignored.iter();
    let of_listeners = of_listeners.filter_map(|(frontend, user)| {
        let service = &desired.frontend_owners.owner(frontend)?.service;
        Some((service, frontend, user))
    });
    let namespace = |(service, ..): &(&ObjectName, _, _)| Arc::clone(&service.namespace);
    let of_listeners = round_robin::take_by(of_listeners, namespace, MAX_PROBLEMS).into_iter();
    let of_listeners = of_listeners.map(|(service, frontend, user)| ObjectWarning {
        regarding: ObjectId::new(Kind::Service, service.clone()),
        uid: uid(service),
        reason: Reason::ListenerIgnored,
        note: format!(
            "the listener of user {user} on {frontend} is ignored: service.localListeners does not \
                 contain this user"
        ),
    });
    let own = &desired.rules.node_info.name;
    // There may be an unconfirmed address for each edge node, and such an address is steered, so there is no Event.
    let of_steering = steering.iter().filter(|problem| problem.is_error());
    let of_steering = of_steering.take(MAX_PROBLEMS);
    let of_steering = of_steering.map(|problem| match (&problem.node, problem.reason) {
        // The warning leaves out the number of addresses, which changes all the time.
        (_, Reason::SteeringFull) => node_problem(own, problem.reason),
        (node, reason) => {
            let name = node.as_ref().map_or(&**own, |node| &node.name);
            let note = format!("{}: {}", problem.object, problem.text);
            ObjectWarning::for_node(name, reason, note)
        }
    });
    let of_node = of_node.map(|reason| node_problem(own, reason));
    let of_services = of_services.chain(of_listeners);
    of_node.chain(of_services).chain(of_steering).collect()
}

/// Returns a warning about a node, with the reason's description as its text.
fn node_problem(node: &str, reason: Reason) -> ObjectWarning {
    ObjectWarning::for_node(node, reason, reason.meaning().to_owned())
}
