//! A Service with its plan and map entries, as published to other tasks.

use std::{borrow::Cow, collections::BTreeSet, sync::Arc};

use tunnel_common::service::{FrontendKey, Membership, SourceRange};

use super::published_services::PublishedServices;
use crate::{
    model::{ObjectName, ServiceState},
    parallel,
    plan::{BackendTarget, NodeInfo, PortName, PortPlan},
    reconcile::{
        desired_plans::{DesiredPlans, LocalListeners},
        map_sync::{ActualContent, MapSync},
        port_problems::{PortProblem, PortProblems},
    },
};

/// The minimum number of Services for which taking snapshots uses several threads.
const PARALLEL_FROM: usize = 1024;

/// Publishes the current state of the given Services.
pub(in crate::reconcile) fn publish_services<M>(
    services: BTreeSet<ObjectName>,
    desired: &DesiredPlans,
    sync: &MapSync<M>,
    published: &PublishedServices,
) {
    let services: Vec<_> = services.into_iter().collect();
    let (actual, problems) = (&sync.tracked.actual, &sync.problems);
    let snapshots = parallel::map(&services, PARALLEL_FROM, |_, name| {
        ServiceSnapshot::of(name, desired, actual, problems.of_service(name))
    });
    published.replace(services.into_iter().zip(snapshots));
}

/// A Service with its plan and map entries, as of the end of a sync.
#[derive(Debug)]
pub(super) struct ServiceSnapshot {
    pub(super) state: ServiceState,
    /// The Service without the endpoints that its topology keys exclude on this node, or `None` if topology
    /// keys don't restrict the Service.
    pub(super) restricted: Option<ServiceState>,
    /// The inputs from this node that the plan depends on.
    pub(super) node_info: Arc<NodeInfo>,
    pub(super) ports: Box<[PortSnapshot]>,
}

/// A Service's port in one address family.
#[derive(Debug)]
pub(super) struct PortSnapshot {
    pub(super) name: PortName,
    pub(super) plan: Arc<PortPlan>,
    pub(super) problem: Option<PortProblem>,
    /// The port's id, if the port has entries in the maps.
    pub(super) id: Option<u32>,
    /// The port's frontends in the maps, with their local listeners.
    pub(super) frontends: Box<[(FrontendKey, ListenerState)]>,
    /// The port's serving backends in the maps.
    pub(super) backends: Box<[BackendSnapshot]>,
    /// The client source ranges, as stored in the maps, that may use the port's restricted frontends.
    pub(super) source_ranges: Arc<[SourceRange]>,
}

/// The local listeners on a frontend.
#[derive(Clone, Copy, Debug)]
pub(super) struct ListenerState {
    /// True if the frontend yields to a listener.
    pub(super) is_yielding: bool,
    /// The id of a user whose listener is ignored.
    pub(super) ignored_user: Option<u32>,
}

impl ListenerState {
    fn of(frontend: &FrontendKey, listeners: &LocalListeners) -> Self {
        Self {
            is_yielding: listeners.with_listener.contains(frontend),
            ignored_user: listeners.ignored.get(frontend).copied(),
        }
    }
}

/// A serving backend of a service port.
#[derive(Clone, Copy, Debug)]
pub(super) struct BackendSnapshot {
    pub(super) target: BackendTarget,
    pub(super) index: u32,
    /// The sets that contain the backend, so that it gets new connections.
    pub(super) sets: Membership,
}

impl ServiceSnapshot {
    /// Takes a snapshot of a Service. Returns `None` if the Service has no plan.
    pub(super) fn of(
        name: &ObjectName,
        desired: &DesiredPlans,
        actual: &ActualContent,
        problems: Option<&PortProblems>,
    ) -> Option<Self> {
        let (plan, state) = (desired.plans.get(name)?, desired.states.get(name)?);
        let ports = plan.iter().map(|(name, plan)| {
            let problem = problems.and_then(|problems| problems.get(name).cloned());
            PortSnapshot::of(name, plan, problem, desired, actual)
        });
        Some(Self {
            ports: ports.collect(),
            restricted: match desired.rules.node_pools.restrict(state) {
                Cow::Owned(restricted) => Some(restricted),
                Cow::Borrowed(_) => None,
            },
            node_info: Arc::clone(&desired.rules.node_info),
            state: state.clone(),
        })
    }

    /// Returns the name of the Service.
    pub(super) fn name(&self) -> &ObjectName {
        &self.state.service.name
    }
}

impl PortSnapshot {
    fn of(
        name: &PortName,
        plan: &Arc<PortPlan>,
        problem: Option<PortProblem>,
        desired: &DesiredPlans,
        actual: &ActualContent,
    ) -> Self {
        let programmed = actual
            .id(name)
            .and_then(|id| Some((id, actual.ports.get(&id)?)));
        let (id, port) = programmed.unzip();
        let frontends = port.into_iter().flat_map(|port| port.frontends.keys());
        let backends = port.into_iter().flat_map(|port| &port.backends);
        let backend = |(target, index): (&BackendTarget, &u32)| BackendSnapshot {
            target: *target,
            index: *index,
            sets: actual.backend_status(*index).membership,
        };
        Self {
            name: name.clone(),
            plan: Arc::clone(plan),
            problem,
            id,
            frontends: frontends
                .map(|key| (*key, ListenerState::of(key, &desired.listeners)))
                .collect(),
            backends: backends.map(backend).collect(),
            source_ranges: id.map_or_else(Arc::default, |id| actual.source_ranges_of(id)),
        }
    }
}
