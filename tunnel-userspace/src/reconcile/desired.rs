//! The plans of all Services: the desired content of the maps. A change of a Service, a Node or the
//! addresses of this node updates the plans that depend on it; [`crate::plan`] computes each. Pure.

mod local_listeners;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use foldhash::{HashMap, HashMapExt as _};
use litemap::LiteMap;
use tunnel_common::{reason::Reason, service::FrontendKey};

pub(super) use self::local_listeners::LocalListeners;
use super::problems::{PortProblem, PortProblems};
use crate::{
    model::{
        Algorithm, PerFamily, ExternalIps, Family, Node, ObjectName, ServiceState, TopologyKeys,
    },
    parallel,
    plan::{
        self, FrontendOwners, ExternalIpOwners, FrontendPlan, NoLocalEndpoints, HealthCheck, HealthChecks, NodeInfo,
        LocalNode, NodePortAddresses, NodePools, PortName, PortPlan, ClaimRank, ServicePlan,
    },
};

/// The number of changed Services from which several threads plan them.
const MANY: usize = 1024;

/// The settings for planning.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The name of this node's Node object.
    pub node_name: String,
    /// The algorithm for Services that select none.
    pub algorithm: Algorithm,
    /// The addresses of this node that serve node ports.
    pub node_ports: Vec<NodePortAddresses>,
    /// The external IPs that are served: any, or only those with an owner.
    pub external_ips: ExternalIps,
    /// Honour or ignore `openyurt.io/topologyKeys`.
    pub topology_keys: TopologyKeys,
}

/// All Services, and their plans.
pub(super) struct Desired {
    /// The served Services, to plan them again when a Node changes.
    pub(super) states: HashMap<ObjectName, ServiceState>,
    pub(super) plans: BTreeMap<ObjectName, ServicePlan>,
    pub(super) claims: FrontendOwners,
    pub(super) rules: Rules,
    pub(super) listeners: LocalListeners,
    local_node: LocalNode,
    /// The health checks of Services. They are published as one value, since they are few: only load
    /// balancers with policy Local have one.
    pub(super) health: Arc<HealthChecks>,
    /// True if a Node with the name of this node exists.
    pub(super) node_known: bool,
    /// True if load balancers may send traffic to this node.
    pub(super) node_eligible: bool,
    /// The number of service ports with a policy Local but no endpoint on this node, by family.
    pub(super) gaps: PerFamily<NoLocalEndpoints>,
    /// The number of plans that were computed.
    pub(super) planned: u64,
}

/// The inputs of a plan other than the Service.
pub(super) struct Rules {
    owners: ExternalIpOwners,
    pub(super) pools: NodePools,
    pub(super) here: Arc<NodeInfo>,
}

/// The effect of a change on the plans.
#[derive(Debug, Default)]
pub(super) struct Changed {
    /// The Services that must be written again.
    pub(super) services: BTreeSet<ObjectName>,
    /// True if every Service was planned again.
    pub(super) is_all: bool,
}

/// The results of planning one Service; empty for a removed Service.
#[derive(Default)]
struct Planned {
    plan: Option<ServicePlan>,
    check: Option<HealthCheck>,
    claims: Vec<(FrontendKey, ClaimRank, PortName)>,
}

impl Rules {
    fn planned(&self, state: Option<&ServiceState>) -> Planned {
        let Some(state) = state else {
            return Planned::default();
        };
        let admitted = self.owners.without_unowned_ips(state);
        let near = self.pools.restrict(&admitted);
        let plan = plan::plan_service(&near, &self.here);
        Planned {
            check: plan::plan_health_check(&near, &self.here),
            claims: plan::frontend_claims(&near, &plan).collect(),
            plan: Some(plan),
        }
    }
}

/// Returns the Service, if Culvert serves it. Other Services only matter as owners of addresses.
pub(super) fn served(state: Option<&ServiceState>) -> Option<&ServiceState> {
    state.filter(|state| state.service.is_served())
}

impl Desired {
    /// Starts without any Service.
    pub(super) fn new(settings: Settings) -> Self {
        let node: Arc<str> = settings.node_name.into();
        let local_node = LocalNode::new(settings.node_ports);
        let health = HealthChecks {
            addresses: local_node.health_addresses(),
            ..HealthChecks::default()
        };
        Self {
            states: HashMap::new(),
            plans: BTreeMap::new(),
            claims: FrontendOwners::default(),
            rules: Rules {
                owners: ExternalIpOwners::new(settings.external_ips),
                pools: NodePools::new(settings.topology_keys, Arc::clone(&node)),
                here: Arc::new(NodeInfo {
                    name: node,
                    default_algorithm: settings.algorithm,
                    ..NodeInfo::default()
                }),
            },
            listeners: LocalListeners::default(),
            local_node,
            health: Arc::new(health),
            node_known: false,
            node_eligible: true,
            gaps: PerFamily::default(),
            planned: 0,
        }
    }

    /// Plans the Services that changed, and those that depend on a changed Node or on the owner of an
    /// address.
    pub(super) fn apply(
        &mut self,
        nodes: Vec<(ObjectName, Option<Arc<Node>>)>,
        services: Vec<(ObjectName, Option<ServiceState>)>,
    ) -> Changed {
        let mut has_own = false;
        for (name, node) in nodes {
            self.rules.owners.set_node(&name, node.as_deref());
            self.rules.pools.set_node(&name, node.as_deref());
            if name.name == self.rules.here.name {
                has_own = true;
                self.node_known = node.is_some();
                self.node_eligible = node.as_ref().is_some_and(|node| node.eligible);
                self.local_node.set_node(node.as_deref());
            }
        }
        for (name, state) in &services {
            let service = state.as_ref().map(|state| &*state.service);
            self.rules.owners.set_service(name, service);
            self.rules.pools.set_service(name, service);
        }
        let mut moved = self.rules.owners.take_changed_services();
        moved.append(&mut self.rules.pools.take_changed_services());
        // First, so that the changed Services are planned only once.
        let mut changed = if has_own {
            self.look_around()
        } else {
            Changed::default()
        };
        let planned = parallel::map(&services, MANY, |_, (_, state)| {
            self.rules.planned(served(state.as_ref()))
        });
        if self.states.is_empty() {
            self.states.reserve(services.len());
        }
        self.claims.reserve(services.len());
        let names = services.iter().map(|(name, _)| name.clone());
        let mut names: BTreeSet<_> = names.collect();
        let mut plans = Vec::new();
        for ((name, state), planned) in services.into_iter().zip(planned) {
            moved.remove(&name);
            let plan = self.take(&name, planned, &mut changed);
            plans.extend(plan.map(|plan| (name.clone(), plan)));
            match state.filter(|state| state.service.is_served()) {
                Some(state) => self.states.insert(name, state),
                None => self.states.remove(&name),
            };
        }
        // A map that is built from sorted plans needs no search for each of them.
        let plans: BTreeMap<_, _> = plans.into_iter().collect();
        if self.plans.is_empty() {
            self.plans = plans;
        } else {
            self.plans.extend(plans);
        }
        changed.services.append(&mut names);
        for name in moved {
            if let Some(state) = self.states.get(&name).cloned() {
                self.plan(&name, &state, &mut changed);
            }
        }
        changed
    }

    /// Replaces the addresses of this node.
    pub(super) fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) -> Changed {
        if self.listeners.set_addresses(&addresses) {
            for (name, plan) in &self.plans {
                self.listeners.put(name, Some(plan));
            }
        }
        self.local_node.set_addresses(addresses);
        self.look_around()
    }

    /// Replaces the set of frontends with a local listener. Frontends on addresses of other nodes are
    /// ignored.
    pub(super) fn set_listeners(&mut self, found: &BTreeSet<FrontendKey>) -> Changed {
        let moved = self.listeners.set_found(found);
        let mut services = BTreeSet::new();
        for (front, has_listener) in moved {
            let owner = self.claims.owner(&front);
            let service = owner.map(ToString::to_string).unwrap_or_default();
            let event = if has_listener {
                "local listener found: sockets are not translated"
            } else {
                "local listener gone: sockets are translated"
            };
            tracing::info!(frontend = %front, service, "{event}");
            services.extend(owner.map(|owner| owner.service.clone()));
        }
        Changed {
            services,
            is_all: false,
        }
    }

    /// Returns the plan of a Service without the frontends that other Services own, and its problems.
    pub(super) fn wanted(&self, service: &ObjectName) -> (ServicePlan, PortProblems) {
        let (mut wanted, mut problems) = (ServicePlan::new(), PortProblems::new());
        for (name, plan) in self.plans.get(service).into_iter().flatten() {
            // Inserted first, so that a more important problem with the port replaces it.
            if let Some(problem) = self.left_out(name, plan) {
                problems.insert(name.clone(), problem);
            }
            let mut fronts = LiteMap::with_capacity(plan.frontends.len());
            for (key, front) in &plan.frontends {
                let owner = self.claims.owner(key);
                if owner == Some(name) {
                    let has_listener = self.listeners.found.contains(key);
                    let front = FrontendPlan {
                        has_listener,
                        ..*front
                    };
                    fronts.insert(*key, front);
                } else {
                    let winner = owner.map(ToString::to_string).unwrap_or_default();
                    let text = format!("{key} belongs to {winner}");
                    let reason = Reason::FrontendConflict;
                    problems.insert(name.clone(), PortProblem { reason, text });
                }
            }
            let mut plan = Arc::clone(plan);
            if fronts != plan.frontends {
                Arc::make_mut(&mut plan).frontends = fronts;
            }
            wanted.insert(name.clone(), plan);
        }
        wanted.retain(|_, plan| !plan.frontends.is_empty());
        (wanted, problems)
    }

    /// Plans all Services again if the plans' inputs from this node changed.
    fn look_around(&mut self) -> Changed {
        let addresses = self.local_node.health_addresses();
        if self.health.addresses != addresses {
            Arc::make_mut(&mut self.health).addresses = addresses;
        }
        let mut changed = Changed::default();
        if let Some(here) = self.local_node.changed_info(&self.rules.here) {
            self.rules.here = Arc::new(here);
            changed.is_all = true;
            let states = std::mem::take(&mut self.states);
            for (name, state) in &states {
                self.plan(name, state, &mut changed);
            }
            self.states = states;
        }
        changed
    }

    /// Plans a Service, and stores the plan.
    fn plan(&mut self, name: &ObjectName, state: &ServiceState, changed: &mut Changed) {
        let planned = self.rules.planned(Some(state));
        if let Some(plan) = self.take(name, planned, changed) {
            self.plans.insert(name.clone(), plan);
        }
        changed.services.insert(name.clone());
    }

    /// Stores the results of planning a Service, except for the plan, which is returned for the caller to
    /// store. Adds the Services that won or lost a frontend to `changed`.
    fn take(
        &mut self,
        name: &ObjectName,
        planned: Planned,
        changed: &mut Changed,
    ) -> Option<ServicePlan> {
        let plan = planned.plan;
        if self.health.services.get(name) != planned.check.as_ref() {
            let checks = &mut Arc::make_mut(&mut self.health).services;
            match planned.check {
                Some(check) => checks.insert(name.clone(), check),
                None => checks.remove(name),
            };
        }
        self.listeners.put(name, plan.as_ref());
        let moved = self.claims.set_claims(name, planned.claims.into_iter());
        changed.services.extend(moved);
        let gaps = |plan: Option<&ServicePlan>| plan.map(plan::count_no_local_endpoints).unwrap_or_default();
        let (old, new) = (gaps(self.plans.get(name)), gaps(plan.as_ref()));
        for family in [Family::V4, Family::V6] {
            let (gaps, old, new) = (self.gaps.get_mut(family), old.get(family), new.get(family));
            gaps.internal = gaps.internal + new.internal - old.internal;
            gaps.external = gaps.external + new.external - old.external;
        }
        self.planned += 1;
        if plan.is_none() {
            self.plans.remove(name);
        }
        plan
    }

    /// Returns the problem with a port's external IPs that are not served because they have no owner.
    fn left_out(&self, name: &PortName, plan: &PortPlan) -> Option<PortProblem> {
        if !self.rules.owners.is_enabled() {
            return None;
        }
        let state = self.states.get(&name.service)?;
        // The address may be served for another reason, for example as a cluster IP.
        let has = |ip: &IpAddr| plan.frontends.keys().any(|key| key.address.to_ip() == *ip);
        let left_out = self.rules.owners.unowned_ips(&state.service);
        let left_out = left_out.filter(|ip| Family::of(*ip) == name.family && !has(ip));
        let left_out: Vec<_> = left_out.map(|ip| ip.to_string()).collect();
        let reason = Reason::ExternalIpNotOwned;
        (!left_out.is_empty()).then(|| PortProblem {
            reason,
            text: format!("{}: {}", reason.meaning(), left_out.join(", ")),
        })
    }
}
