//! What is to be programmed, planned anew where something changed.

use std::{
    collections::{BTreeMap, BTreeSet},
    net::IpAddr,
};

use tunnel_common::{reason::Reason, service::FrontKey};

use super::{Changes, Reconciler};
use crate::{
    model::{Family, ObjectName, ServiceState, Update},
    parallel,
    plan::{self, HealthCheck, Here, Owners, Pools, PortName, PortPlan, Rank, ServicePlan},
};

/// Fewer Services than these are planned one after the other.
const MANY: usize = 1024;

/// What plans go by, besides the Service.
#[derive(Clone, Copy)]
struct Planner<'a> {
    owners: &'a Owners,
    pools: &'a Pools,
    here: &'a Here,
}

/// What is planned for a Service; all of it nothing for one that is not there.
struct Planned {
    plan: Option<ServicePlan>,
    check: Option<HealthCheck>,
    claims: Vec<(FrontKey, Rank, PortName)>,
}

impl Planner<'_> {
    fn planned(self, state: Option<&ServiceState>) -> Planned {
        let admitted = state.map(|state| self.owners.admitted(state));
        let near = admitted.as_deref().map(|state| self.pools.near(state));
        let state = near.as_deref();
        let plan = state.map(|state| plan::service(state, self.here));
        let claims = state.zip(plan.as_ref());
        let claims = claims.map(|(state, plan)| plan::claims(state, plan));
        Planned {
            check: state.and_then(|state| plan::health_check(state, self.here)),
            claims: claims.into_iter().flatten().collect(),
            plan,
        }
    }
}

impl<M> Reconciler<M> {
    /// Plans what changed. Nothing is written.
    pub fn update(&mut self, update: Update) {
        self.synced |= update.synced;
        self.whole = update.whole;
        self.stale = update.stale;
        for (name, node) in update.nodes {
            self.owners.set_node(&name, node.as_deref());
            self.pools.set_node(&name, node.as_deref());
            if name.name == self.here.node {
                self.node_known = node.is_some();
                self.node_eligible = node.as_ref().is_some_and(|node| node.eligible);
                self.place.set_node(node.as_deref());
            }
        }
        for (name, state) in &update.services {
            let service = state.as_ref().map(|state| &*state.service);
            self.owners.set_service(name, service);
            self.pools.set_service(name, service);
        }
        let mut moved = self.owners.take_moved();
        moved.append(&mut self.pools.take_moved());
        // Before what else changed, so that it is planned once.
        self.look_around();
        // Of the others only their addresses count.
        let served = |(name, state): (_, Option<ServiceState>)| {
            let state = state.filter(|state| state.service.is_served());
            (name, state)
        };
        let services: Vec<_> = update.services.into_iter().map(served).collect();
        let planner = self.planner();
        let planned = parallel::each(&services, MANY, |_, (_, state)| {
            planner.planned(state.as_ref())
        });
        if self.states.is_empty() {
            self.states.reserve(services.len());
        }
        self.claims.make_room(services.len());
        let (mut plans, mut names) = (Vec::new(), Vec::new());
        for ((name, state), planned) in services.into_iter().zip(planned) {
            moved.remove(&name);
            self.held.remove(&name);
            let before = self.states.get(&name);
            self.measures.note(&name, before, state.as_ref());
            let plan = self.take(&name, planned);
            plans.extend(plan.map(|plan| (name.clone(), plan)));
            names.push(name.clone());
            match state {
                Some(state) => self.states.insert(name, state),
                None => self.states.remove(&name),
            };
        }
        // Into empty ones they go at once, without a look for the place of each.
        let plans: BTreeMap<_, _> = plans.into_iter().collect();
        let names: BTreeSet<_> = names.into_iter().collect();
        if self.plans.is_empty() {
            self.plans = plans;
        } else {
            self.plans.extend(plans);
        }
        if self.dirty.is_empty() {
            self.dirty = names;
        } else {
            self.dirty.extend(names);
        }
        for name in moved {
            if let Some(state) = self.states.get(&name).cloned() {
                self.plan(&name, Some(&state));
            }
        }
        if self.whole && self.seeded {
            let held = std::mem::take(&mut self.held);
            self.dirty.extend(held.into_keys());
        }
    }

    /// Takes the addresses that this node has now. Nothing is written.
    pub fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        if self.listeners.set_addresses(&addresses) {
            for (name, plan) in &self.plans {
                self.listeners.put(name, Some(plan));
            }
        }
        self.place.set_addresses(addresses);
        self.look_around();
    }

    /// Plans everything anew if this node is not what it was.
    fn look_around(&mut self) {
        self.health.set_addresses(self.place.health_addresses());
        if self.place.show(&mut self.here) {
            self.measures.all_anew();
            let states = std::mem::take(&mut self.states);
            for (name, state) in &states {
                self.plan(name, Some(state));
            }
            self.states = states;
        }
    }

    /// Plans a Service as the sources have it now.
    fn plan(&mut self, name: &ObjectName, state: Option<&ServiceState>) {
        let planned = self.planner().planned(state);
        if let Some(plan) = self.take(name, planned) {
            self.plans.insert(name.clone(), plan);
        }
        self.dirty.insert(name.clone());
    }

    const fn planner(&self) -> Planner<'_> {
        Planner {
            owners: &self.owners,
            pools: &self.pools,
            here: &self.here,
        }
    }

    /// Takes what was planned for a Service in place of what was, but for the plan itself, which is to
    /// go to the others, as the name to what is dirty.
    fn take(&mut self, name: &ObjectName, planned: Planned) -> Option<ServicePlan> {
        let Planned {
            plan,
            check,
            claims,
        } = planned;
        self.health.put(name, check);
        self.listeners.put(name, plan.as_ref());
        let moved = self.claims.replace(name, claims.into_iter());
        self.dirty.extend(moved);
        let gaps = |plan: Option<&ServicePlan>| plan.map(plan::gaps).unwrap_or_default();
        let (old, new) = (gaps(self.plans.get(name)), gaps(plan.as_ref()));
        self.measures.planned(old, new);
        if plan.is_none() {
            self.plans.remove(name);
        }
        plan
    }

    /// Says which external IPs of a port are not served, as nobody has them.
    pub(super) fn tell_left_out(&self, name: &PortName, plan: &PortPlan, changes: &mut Changes) {
        if !self.owners.is_asked() {
            return;
        }
        let Some(state) = self.states.get(&name.service) else {
            return;
        };
        // Another rule may serve it: it is a cluster IP too.
        let has = |ip: &IpAddr| plan.fronts.keys().any(|key| key.address.to_ip() == *ip);
        let left_out = self.owners.left_out(&state.service);
        let left_out = left_out.filter(|ip| Family::of(*ip) == name.family && !has(ip));
        let left_out: Vec<_> = left_out.map(|ip| ip.to_string()).collect();
        if !left_out.is_empty() {
            let reason = Reason::ExternalIpNotOwned;
            let text = format!("{}: {}", reason.meaning(), left_out.join(", "));
            changes.problem(name, reason, text);
        }
    }
}
