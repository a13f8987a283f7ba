//! A Service with its plan and map entries, as it is published.

use std::{borrow::Cow, collections::BTreeSet, sync::Arc};

use tunnel_common::service::{FrontendKey, SourceRange};

use super::published::Published;
use crate::{
    model::{ObjectName, ServiceState},
    parallel,
    plan::{NodeInfo, PortName, PortPlan, BackendTarget},
    reconcile::{
        desired::Desired,
        problems::{PortProblem, PortProblems},
        sync::{Actual, MapSync},
    },
};

/// The number of Services from which several threads prepare them.
const MANY: usize = 1024;

/// Publishes some Services in their present state.
pub(in crate::reconcile) fn show<M>(
    services: BTreeSet<ObjectName>,
    desired: &Desired,
    sync: &MapSync<M>,
    published: &Published,
) {
    let services: Vec<_> = services.into_iter().collect();
    let (actual, problems) = (&sync.ports.actual, &sync.faults.by_service);
    let shown = parallel::map(&services, MANY, |_, name| {
        Shown::of(name, desired, actual, problems.get(name))
    });
    published.put(services.into_iter().zip(shown));
}

/// A Service with its plan and map entries, at the end of a sync.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) state: ServiceState,
    /// The Service without the endpoints that its topology keys exclude on this node; `None` if none are
    /// excluded.
    pub(super) near: Option<ServiceState>,
    /// The inputs from this node that the plan depends on.
    pub(super) here: Arc<NodeInfo>,
    pub(super) ports: Box<[ShownPort]>,
}

/// A port of a Service in one family.
#[derive(Debug)]
pub(super) struct ShownPort {
    pub(super) name: PortName,
    pub(super) plan: Arc<PortPlan>,
    pub(super) problem: Option<PortProblem>,
    /// The id of the port, if it has entries in the maps.
    pub(super) id: Option<u32>,
    /// The frontends in the maps, each with true if it has a local listener.
    pub(super) fronts: Box<[(FrontendKey, bool)]>,
    /// The serving backends in the maps.
    pub(super) backends: Box<[ShownBackend]>,
    /// The ranges of clients in the maps that may use the port's restricted frontends.
    pub(super) sources: Box<[SourceRange]>,
}

/// A serving backend of a service port.
#[derive(Clone, Copy, Debug)]
pub(super) struct ShownBackend {
    pub(super) target: BackendTarget,
    pub(super) index: u32,
    /// True if it is in a set, so that it gets new connections.
    pub(super) is_placed: bool,
}

impl Shown {
    /// Returns the present state of a Service; `None` if it has no plan.
    pub(super) fn of(
        name: &ObjectName,
        desired: &Desired,
        actual: &Actual,
        problems: Option<&PortProblems>,
    ) -> Option<Self> {
        let (plan, state) = (desired.plans.get(name)?, desired.states.get(name)?);
        let ports = plan.iter().map(|(name, plan)| {
            let problem = problems.and_then(|problems| problems.get(name).cloned());
            ShownPort::of(name, plan, problem, desired, actual)
        });
        Some(Self {
            ports: ports.collect(),
            near: match desired.rules.pools.restrict(state) {
                Cow::Owned(near) => Some(near),
                Cow::Borrowed(_) => None,
            },
            here: Arc::clone(&desired.rules.here),
            state: state.clone(),
        })
    }

    /// Returns the name of the Service.
    pub(super) fn name(&self) -> &ObjectName {
        &self.state.service.name
    }
}

impl ShownPort {
    fn of(
        name: &PortName,
        plan: &Arc<PortPlan>,
        problem: Option<PortProblem>,
        desired: &Desired,
        actual: &Actual,
    ) -> Self {
        let used = actual
            .id(name)
            .and_then(|id| Some((id, actual.ports.get(&id)?)));
        let (id, port) = used.unzip();
        let placed = id.map(|id| placed(id, actual)).unwrap_or_default();
        let fronts = port.into_iter().flat_map(|port| port.fronts.keys());
        let backends = port.into_iter().flat_map(|port| &port.backends);
        let backend = |(target, index): (&BackendTarget, &u32)| ShownBackend {
            target: *target,
            index: *index,
            is_placed: placed.contains(index),
        };
        Self {
            name: name.clone(),
            plan: Arc::clone(plan),
            problem,
            id,
            fronts: fronts
                .map(|key| (*key, desired.listeners.found.contains(key)))
                .collect(),
            backends: backends.map(backend).collect(),
            sources: id.map_or(&[][..], |id| actual.sources_of(id)).into(),
        }
    }
}

/// Returns the indices of the backends in the sets of a port.
fn placed(id: u32, actual: &Actual) -> BTreeSet<u32> {
    let sets = actual.records(id).flat_map(|it| [it.cluster, it.local]);
    let backends = sets.flat_map(|set| actual.sets.items(set));
    backends.copied().collect()
}
