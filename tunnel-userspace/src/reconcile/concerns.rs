//! What of it an operator must act on.

use std::collections::BTreeSet;

use tunnel_common::reason::Reason;

use super::{Reconciler, Steering};
use crate::model::{Concern, Kind, ObjectId};

/// How many are told at a time.
const MOST: usize = 1000;

impl<M> Reconciler<M> {
    /// What is not programmed as planned: on the Service, and where it is the node that lacks
    /// something on the Node too.
    pub(super) fn concerns(&self) -> Vec<Concern> {
        let mut of_node = BTreeSet::new();
        let mut concerns = Vec::new();
        for (service, problems) in &self.problems {
            for (port, problem) in problems {
                let is_of_node = matches!(
                    problem.reason,
                    Reason::FrontsFull
                        | Reason::SlotsFull
                        | Reason::BackendsFull
                        | Reason::WriteFailed
                );
                if is_of_node {
                    of_node.insert(problem.reason);
                }
                if concerns.len() < MOST {
                    concerns.push(Concern {
                        about: ObjectId {
                            kind: Kind::Service,
                            name: service.clone(),
                        },
                        uid: self
                            .states
                            .get(service)
                            .and_then(|state| state.service.uid.clone()),
                        reason: problem.reason,
                        note: format!("{port}: {problem}"),
                    });
                }
            }
        }
        let of_node = of_node.into_iter();
        let of_node = of_node.map(|reason| of(&self.here.node, reason));
        of_node.chain(concerns).collect()
    }
}

impl<M> Steering<M> {
    /// What is not steered as planned.
    pub(super) fn concerns(&self, own: &str) -> Vec<Concern> {
        let known = self.known.iter().take(MOST);
        let concern = |problem: &crate::plan::SteeringProblem| match (&problem.node, problem.reason)
        {
            // How much is left out changes all the time.
            (_, Reason::SteeringFull) => of(own, problem.reason),
            (node, reason) => {
                let name = node.as_ref().map_or(own, |node| &node.name);
                Concern::of_node(
                    name,
                    reason,
                    format!("{}: {}", problem.object, problem.text),
                )
            }
        };
        known.map(concern).collect()
    }
}

/// Something that this node lacks.
fn of(node: &str, reason: Reason) -> Concern {
    Concern::of_node(node, reason, reason.meaning().to_owned())
}
