use std::{borrow::Cow, collections::BTreeSet, sync::Arc};

use tunnel_common::service::{FrontKey, Source};

use super::published::Published;
use crate::{
    model::{ObjectName, ServiceState},
    parallel,
    plan::{Here, PortName, PortPlan, Target},
    reconcile::{
        desired::Desired,
        problems::{Problem, Problems},
        sync::{Actual, MapSync},
    },
};

/// The number of Services from which on several threads publish them.
const MANY: usize = 1024;

/// Publishes the planned and programmed state of some Services.
pub(in crate::reconcile) fn show<M>(
    services: BTreeSet<ObjectName>,
    desired: &Desired,
    sync: &MapSync<M>,
    published: &Published,
) {
    let services: Vec<_> = services.into_iter().collect();
    let (actual, problems) = (&sync.ports.actual, &sync.faults.problems);
    let shown = parallel::each(&services, MANY, |_, name| {
        Shown::of(name, desired, actual, problems.get(name))
    });
    published.put(services.into_iter().zip(shown));
}

/// A Service as it is planned and programmed.
#[derive(Debug)]
pub(super) struct Shown {
    pub(super) state: ServiceState,
    /// The Service without the endpoints that clients of this node must not use, if there are any.
    pub(super) near: Option<ServiceState>,
    /// The facts about this node that the plan used.
    pub(super) here: Arc<Here>,
    pub(super) ports: Box<[ShownPort]>,
}

/// A port of a Service in one family.
#[derive(Debug)]
pub(super) struct ShownPort {
    pub(super) name: PortName,
    pub(super) plan: Arc<PortPlan>,
    pub(super) problem: Option<Problem>,
    /// The id of the port, if it is programmed.
    pub(super) id: Option<u32>,
    /// The frontends that are programmed, each with true if it has a local listener.
    pub(super) fronts: Box<[(FrontKey, bool)]>,
    /// The backends that serve.
    pub(super) backends: Box<[ShownBackend]>,
    /// The clients that may use the port's restricted frontends, as programmed.
    pub(super) sources: Box<[Source]>,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct ShownBackend {
    pub(super) target: Target,
    pub(super) index: u32,
    /// True if it is in a set, so that it gets new connections.
    pub(super) is_placed: bool,
}

impl Shown {
    /// Returns a Service in its present state; none if it has no plan.
    pub(super) fn of(
        name: &ObjectName,
        desired: &Desired,
        actual: &Actual,
        problems: Option<&Problems>,
    ) -> Option<Self> {
        let (plan, state) = (desired.plans.get(name)?, desired.states.get(name)?);
        let ports = plan.iter().map(|(name, plan)| {
            let problem = problems.and_then(|problems| problems.get(name).cloned());
            ShownPort::of(name, plan, problem, desired, actual)
        });
        Some(Self {
            ports: ports.collect(),
            near: match desired.rules.pools.near(state) {
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
        problem: Option<Problem>,
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
        let backend = |(target, index): (&Target, &u32)| ShownBackend {
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

/// Returns the backends that the sets of a port lead to.
fn placed(id: u32, actual: &Actual) -> BTreeSet<u32> {
    let sets = actual.records(id).flat_map(|it| [it.cluster, it.local]);
    let backends = sets.flat_map(|set| actual.sets.items(set));
    backends.copied().collect()
}
