//! The plans for all Services, that is, the desired contents of the maps. A change to a Service, a Node or
//! this node's addresses updates the plans that depend on it; [`crate::plan`] computes each plan. Does no
//! I/O.

mod local_listeners;

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
    sync::Arc,
};

use foldhash::{HashMap, HashMapExt as _};
use litemap::LiteMap;
use tracing::info;
use tunnel_common::{reason::Reason, service::FrontendKey};

use self::local_listeners::ListenerChange;
pub(super) use self::local_listeners::LocalListeners;
use super::{
    listener_log::IgnoredListener,
    listener_poll::ListeningUsers,
    port_problems::{PortProblem, PortProblems},
};
use crate::{
    model::{
        Algorithm, ExternalIps, Family, Node, NodeAddresses, ObjectName, PerFamily, ServiceState,
        TopologyKeys,
    },
    parallel,
    plan::{
        self, ClaimRank, ExternalIpOwners, FrontendKind, FrontendOwners, FrontendPlan, HealthCheck,
        HealthChecks, LocalNode, NoLocalEndpoints, NodeInfo, NodePools, NodePortAddresses,
        PortName, PortPlan, ServicePlan,
    },
};

/// The minimum number of changed Services for which planning uses several threads.
const PARALLEL_FROM: usize = 1024;

/// The settings that plans depend on.
#[derive(Clone, Debug)]
pub struct PlanSettings {
    /// The name of this node's Node object.
    pub node_name: String,
    /// The load-balancing algorithm for Services that don't select one.
    pub algorithm: Algorithm,
    /// The addresses of this node on which node ports are served.
    pub node_port_addresses: Vec<NodePortAddresses>,
    /// The external IPs to serve: any, or only those that have an owner.
    pub external_ips: ExternalIps,
    /// Determines whether external IPs and load balancer addresses are served at this node's own addresses.
    pub node_addresses: NodeAddresses,
    /// True if packets are translated (`service.packets.enabled`).
    pub translates_packets: bool,
    /// Determines whether `openyurt.io/topologyKeys` is honoured or ignored.
    pub topology_keys: TopologyKeys,
    /// The percentage of the map entries not used by other namespaces that the Services of one namespace may
    /// use.
    pub namespace_share: u8,
    /// The ids of the users whose local listeners take the place of a Service.
    pub local_listeners: BTreeSet<u32>,
}

/// All Services and their plans.
pub(super) struct DesiredPlans {
    /// The state of each Service that Culvert serves, kept so that it can be replanned when a Node changes.
    pub(super) states: HashMap<ObjectName, ServiceState>,
    pub(super) plans: BTreeMap<ObjectName, ServicePlan>,
    pub(super) frontend_owners: FrontendOwners,
    pub(super) rules: PlanRules,
    pub(super) listeners: LocalListeners,
    local_node: LocalNode,
    /// The Services' health checks. They are published as a single value because there are few of them: only
    /// load-balancer Services with external traffic policy `Local` have one.
    pub(super) health: Arc<HealthChecks>,
    /// True if this node's Node object exists.
    pub(super) node_known: bool,
    /// True if load balancers may send traffic to this node.
    pub(super) node_eligible: bool,
    /// The number of service ports that have traffic policy `Local` but no endpoint on this node, by address
    /// family.
    pub(super) no_local_endpoints: PerFamily<NoLocalEndpoints>,
    /// The number of plans computed so far.
    pub(super) plans_computed: u64,
}

/// The inputs to a plan other than the Service itself.
pub(super) struct PlanRules {
    external_ip_owners: ExternalIpOwners,
    pub(super) node_pools: NodePools,
    pub(super) node_info: Arc<NodeInfo>,
}

/// The effect of a change on the plans.
#[derive(Debug, Default)]
pub(super) struct PlanChanges {
    /// The Services that must be written to the maps again.
    pub(super) services: BTreeSet<ObjectName>,
    /// True if every Service was replanned.
    pub(super) all_replanned: bool,
}

/// The results of planning one Service. They are empty if the Service was removed.
#[derive(Default)]
struct PlannedService {
    plan: Option<ServicePlan>,
    health_check: Option<HealthCheck>,
    claims: Vec<(FrontendKey, ClaimRank, PortName)>,
}

impl PlanRules {
    fn plan(&self, state: Option<&ServiceState>) -> PlannedService {
        let Some(state) = state else {
            return PlannedService::default();
        };
        let admitted = self.external_ip_owners.without_unowned_ips(state);
        let restricted = self.node_pools.restrict(&admitted);
        let plan = plan::plan_service(&restricted, &self.node_info);
        PlannedService {
            health_check: plan::plan_health_check(&restricted, &self.node_info),
            claims: plan::frontend_claims(&restricted, &plan).collect(),
            plan: Some(plan),
        }
    }
}

/// Returns the Service if Culvert serves it. Other Services matter only as owners of addresses.
pub(super) fn served(state: Option<&ServiceState>) -> Option<&ServiceState> {
    state.filter(|state| state.service.is_served())
}

impl DesiredPlans {
    /// Creates an instance that has no Services yet.
    pub(super) fn new(settings: PlanSettings) -> Self {
        let node: Arc<str> = settings.node_name.into();
        let local_node = LocalNode::new(settings.node_port_addresses);
        let health = HealthChecks {
            addresses: local_node.health_addresses(),
            ..HealthChecks::default()
        };
        Self {
            states: HashMap::new(),
            plans: BTreeMap::new(),
            frontend_owners: FrontendOwners::default(),
            rules: PlanRules {
                external_ip_owners: ExternalIpOwners::new(settings.external_ips),
                node_pools: NodePools::new(settings.topology_keys, Arc::clone(&node)),
                node_info: Arc::new(NodeInfo {
                    name: node,
                    node_addresses: settings.node_addresses,
                    default_algorithm: settings.algorithm,
                    translates_packets: settings.translates_packets,
                    ..NodeInfo::default()
                }),
            },
            listeners: LocalListeners::new(settings.local_listeners),
            local_node,
            health: Arc::new(health),
            node_known: false,
            node_eligible: true,
            no_local_endpoints: PerFamily::default(),
            plans_computed: 0,
        }
    }

    /// Plans the changed Services, as well as those affected by a changed Node or by a new owner of an
    /// address.
    pub(super) fn apply(
        &mut self,
        nodes: Vec<(ObjectName, Option<Arc<Node>>)>,
        services: Vec<(ObjectName, Option<ServiceState>)>,
    ) -> PlanChanges {
        let mut own_node_changed = false;
        for (name, node) in nodes {
            self.rules
                .external_ip_owners
                .set_node(&name, node.as_deref());
            self.rules.node_pools.set_node(&name, node.as_deref());
            if name.name == self.rules.node_info.name {
                own_node_changed = true;
                self.node_known = node.is_some();
                self.node_eligible = node.as_ref().is_some_and(|node| node.eligible);
                self.local_node.set_node(node.as_deref());
            }
        }
        for (name, state) in &services {
            let service = state.as_ref().map(|state| &*state.service);
            self.rules.external_ip_owners.set_service(name, service);
            self.rules.node_pools.set_service(name, service);
        }
        let mut affected = self.rules.external_ip_owners.take_changed_services();
        affected.append(&mut self.rules.node_pools.take_changed_services());
        // A change to this node is applied first, so that the changed Services below are planned with the
        // node's new state.
        let mut changed = if own_node_changed {
            self.replan_if_node_changed()
        } else {
            PlanChanges::default()
        };
        let planned = parallel::map(&services, PARALLEL_FROM, |_, (_, state)| {
            self.rules.plan(served(state.as_ref()))
        });
        if self.states.is_empty() {
            self.states.reserve(services.len());
        }
        self.frontend_owners.reserve(services.len());
        let names = services.iter().map(|(name, _)| name.clone());
        let mut names: BTreeSet<_> = names.collect();
        let mut plans = Vec::new();
        for ((name, state), planned) in services.into_iter().zip(planned) {
            affected.remove(&name);
            let plan = self.store(&name, planned, &mut changed);
            plans.extend(plan.map(|plan| (name.clone(), plan)));
            match state.filter(|state| state.service.is_served()) {
                Some(state) => self.states.insert(name, state),
                None => self.states.remove(&name),
            };
        }
        // Building a map from sorted plans avoids a lookup for each of them.
        let plans: BTreeMap<_, _> = plans.into_iter().collect();
        if self.plans.is_empty() {
            self.plans = plans;
        } else {
            self.plans.extend(plans);
        }
        changed.services.append(&mut names);
        for name in affected {
            if let Some(state) = self.states.get(&name).cloned() {
                self.replan(&name, &state, &mut changed);
            }
        }
        changed
    }

    /// Replaces the set of this node's addresses.
    pub(super) fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) -> PlanChanges {
        if self.listeners.set_addresses(&addresses) {
            for (name, plan) in &self.plans {
                self.listeners.update(name, Some(plan));
            }
        }
        self.local_node.set_addresses(addresses);
        self.replan_if_node_changed()
    }

    /// Replaces the set of frontends that have a local listener. Ignores frontends whose address is not one
    /// of this node's. Also returns the changes of listeners that are ignored because of their users.
    pub(super) fn set_listeners(
        &mut self,
        found: ListeningUsers,
    ) -> (PlanChanges, Vec<IgnoredListener>) {
        let changed = self.listeners.set_listeners(found);
        let mut services = BTreeSet::new();
        let mut ignored = Vec::new();
        for (frontend, change) in changed {
            let owner = self.frontend_owners.owner(&frontend);
            let service = owner.map(ToString::to_string).unwrap_or_default();
            match change {
                ListenerChange::Found => {
                    info!(%frontend, service, "local listener found: sockets are not translated");
                }
                ListenerChange::Gone => {
                    info!(%frontend, service, "local listener gone: sockets are translated");
                }
                ListenerChange::Ignored(user) => ignored.push(IgnoredListener {
                    frontend,
                    service,
                    user: Some(user),
                }),
                ListenerChange::IgnoredGone => ignored.push(IgnoredListener {
                    frontend,
                    service,
                    user: None,
                }),
            }
            services.extend(owner.map(|owner| owner.service.clone()));
        }
        let changes = PlanChanges {
            services,
            all_replanned: false,
        };
        (changes, ignored)
    }

    /// Returns a Service's plan, minus any frontends that other Services own, along with the Service's
    /// problems.
    pub(super) fn plan_to_write(&self, service: &ObjectName) -> (ServicePlan, PortProblems) {
        let (mut wanted, mut problems) = (ServicePlan::new(), PortProblems::new());
        for (name, plan) in self.plans.get(service).into_iter().flatten() {
            // Insert these first, so that a more important problem with the same port replaces them.
            let unserved = [
                self.unowned_ip_problem(name, plan),
                self.node_address_problem(name, plan),
            ];
            problems.extend(unserved.into_iter().flatten().map(|it| (name.clone(), it)));
            let mut frontends = LiteMap::with_capacity(plan.frontends.len());
            for (key, frontend) in &plan.frontends {
                let owner = self.frontend_owners.owner(key);
                if owner == Some(name) {
                    let has_listener = frontend.kind == FrontendKind::ClusterIp
                        && self.listeners.with_listener.contains(key);
                    let frontend = FrontendPlan {
                        has_listener,
                        ..*frontend
                    };
                    frontends.insert(*key, frontend);
                } else {
                    let winner = owner.map(ToString::to_string).unwrap_or_default();
                    let text = format!("{key} belongs to {winner}");
                    let reason = Reason::FrontendConflict;
                    problems.insert(name.clone(), PortProblem::new(reason, text));
                }
            }
            let mut plan = Arc::clone(plan);
            if frontends != plan.frontends {
                Arc::make_mut(&mut plan).frontends = frontends;
            }
            wanted.insert(name.clone(), plan);
        }
        wanted.retain(|_, plan| !plan.frontends.is_empty());
        (wanted, problems)
    }

    /// Replans all Services if any of the inputs that come from this node have changed.
    fn replan_if_node_changed(&mut self) -> PlanChanges {
        let addresses = self.local_node.health_addresses();
        if self.health.addresses != addresses {
            Arc::make_mut(&mut self.health).addresses = addresses;
        }
        let mut changed = PlanChanges::default();
        if let Some(node_info) = self.local_node.changed_info(&self.rules.node_info) {
            self.rules.node_info = Arc::new(node_info);
            changed.all_replanned = true;
            let states = std::mem::take(&mut self.states);
            for (name, state) in &states {
                self.replan(name, state, &mut changed);
            }
            self.states = states;
        }
        changed
    }

    /// Replans a Service and stores the plan.
    fn replan(&mut self, name: &ObjectName, state: &ServiceState, changed: &mut PlanChanges) {
        let planned = self.rules.plan(Some(state));
        if let Some(plan) = self.store(name, planned, changed) {
            self.plans.insert(name.clone(), plan);
        }
        changed.services.insert(name.clone());
    }

    /// Stores the results of planning a Service, except for the plan itself, which is returned for the caller
    /// to store. Adds to `changed` all Services that gained or lost a frontend.
    fn store(
        &mut self,
        name: &ObjectName,
        planned: PlannedService,
        changed: &mut PlanChanges,
    ) -> Option<ServicePlan> {
        let plan = planned.plan;
        if self.health.services.get(name) != planned.health_check.as_ref() {
            let checks = &mut Arc::make_mut(&mut self.health).services;
            match planned.health_check {
                Some(check) => checks.insert(name.clone(), check),
                None => checks.remove(name),
            };
        }
        self.listeners.update(name, plan.as_ref());
        let affected = self
            .frontend_owners
            .set_claims(name, planned.claims.into_iter());
        changed.services.extend(affected);
        let count = |plan: Option<&ServicePlan>| {
            plan.map(plan::count_no_local_endpoints).unwrap_or_default()
        };
        let (old, new) = (count(self.plans.get(name)), count(plan.as_ref()));
        for family in [Family::V4, Family::V6] {
            let (total, old, new) = (
                self.no_local_endpoints.get_mut(family),
                old.get(family),
                new.get(family),
            );
            total.internal = total.internal + new.internal - old.internal;
            total.external = total.external + new.external - old.external;
        }
        self.plans_computed += 1;
        if plan.is_none() {
            self.plans.remove(name);
        }
        plan
    }

    /// Returns a problem if any of a port's external IPs are not served because they have no owner.
    fn unowned_ip_problem(&self, name: &PortName, plan: &PortPlan) -> Option<PortProblem> {
        if !self.rules.external_ip_owners.is_enabled() {
            return None;
        }
        let state = self.states.get(&name.service)?;
        // The address may be served for another reason, for example as a cluster IP.
        let has = |ip: &IpAddr| plan.frontends.keys().any(|key| key.address.to_ip() == *ip);
        let unowned = self.rules.external_ip_owners.unowned_ips(&state.service);
        let unowned = unowned.filter(|ip| Family::of(*ip) == name.family && !has(ip));
        let unowned: Vec<_> = unowned.map(|ip| ip.to_string()).collect();
        let reason = Reason::ExternalIpNotOwned;
        (!unowned.is_empty()).then(|| {
            let text = format!("{}: {}", reason.meaning(), unowned.join(", "));
            PortProblem::new(reason, text)
        })
    }

    /// Returns a problem if any of a port's external IPs and load balancer addresses are not served because
    /// they are addresses of this node.
    fn node_address_problem(&self, name: &PortName, plan: &PortPlan) -> Option<PortProblem> {
        let service = &self.states.get(&name.service)?.service;
        // The address may be served as a cluster IP. Node ports at the address are other frontends.
        let has = |ip: &IpAddr| {
            let mut frontends = plan.frontends.iter();
            frontends.any(|(key, frontend)| {
                key.address.to_ip() == *ip && frontend.kind != FrontendKind::NodePort
            })
        };
        let ips = [
            (FrontendKind::ExternalIp, &service.external_ips),
            (FrontendKind::LoadBalancerIp, &service.load_balancer_ips),
        ];
        let ips = ips
            .into_iter()
            .flat_map(|(kind, ips)| ips.iter().map(move |ip| (kind, ip)));
        let node_info = &self.rules.node_info;
        let refused = ips.filter(|(kind, ip)| {
            Family::of(**ip) == name.family && node_info.refuses(*kind, ip) && !has(ip)
        });
        let refused: BTreeSet<_> = refused.map(|(_, ip)| ip.to_string()).collect();
        let reason = Reason::NodeAddressRefused;
        (!refused.is_empty()).then(|| {
            let refused: Vec<_> = refused.into_iter().collect();
            PortProblem {
                reason,
                text: format!("{}: {}", reason.meaning(), refused.join(", ")).into(),
            }
        })
    }
}
