//! The problems that an operator must act on.

use std::collections::BTreeSet;

use tunnel_common::reason::Reason;

use crate::{
    model::{Kind, ObjectId, ObjectName, ObjectWarning},
    plan::SteeringProblem,
    reconcile::{desired_plans::DesiredPlans, map_sync::MapSync},
};

/// The maximum number of problems to report for Services, and likewise for steering.
const MAX_PROBLEMS: usize = 1000;

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
                    | Reason::BackendsFull
                    | Reason::WriteFailed
            )
        })
        .collect();
    let problems = sync.problems.by_service.values().flatten();
    let uid = |service: &ObjectName| desired.states.get(service)?.service.uid.clone();
    let of_services = problems
        .take(MAX_PROBLEMS)
        .map(|(port, problem)| ObjectWarning {
            regarding: ObjectId::new(Kind::Service, port.service.clone()),
            uid: uid(&port.service),
            reason: problem.reason,
            note: format!("{port}: {}", problem.text),
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
    of_node.chain(of_services).chain(of_steering).collect()
}

/// Returns a warning about a node, with the reason's description as its text.
fn node_problem(node: &str, reason: Reason) -> ObjectWarning {
    ObjectWarning::for_node(node, reason, reason.meaning().to_owned())
}
