//! What is to be programmed, planned anew where something changed.

use std::{collections::BTreeSet, net::IpAddr};

use super::Reconciler;
use crate::{
    model::{ObjectName, ServiceState, Update},
    plan,
};

impl<M> Reconciler<M> {
    /// Plans what changed. Nothing is written.
    pub fn update(&mut self, update: Update) {
        self.synced |= update.synced;
        self.whole = update.whole;
        self.stale = update.stale;
        for (name, node) in update.nodes {
            if name.name == self.here.node {
                self.node_eligible = node.as_ref().is_some_and(|node| node.eligible);
                self.place.set_node(node.as_deref());
            }
        }
        // Before what else changed, so that it is planned once.
        self.look_around();
        for (name, state) in update.services {
            self.held.remove(&name);
            let before = self.states.get(&name);
            self.measures.note(&name, before, state.as_ref());
            self.plan(&name, state.as_ref());
            match state {
                Some(state) => self.states.insert(name, state),
                None => self.states.remove(&name),
            };
        }
        if self.whole && self.seeded {
            self.dirty.append(&mut self.held);
        }
    }

    /// Takes the addresses that this node has now. Nothing is written.
    pub fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
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
        let check = state.and_then(|state| plan::health_check(state, &self.here));
        self.health.put(name, check);
        let plan = state.map(|state| plan::service(state, &self.here));
        let new = plan.as_ref().map(plan::gaps).unwrap_or_default();
        let claims = state.zip(plan.as_ref());
        let claims = claims.map(|(state, plan)| plan::claims(state, plan));
        let moved = self.claims.replace(name, claims.into_iter().flatten());
        let old = match plan {
            Some(plan) => self.plans.insert(name.clone(), plan),
            None => self.plans.remove(name),
        };
        let old = old.as_ref().map(plan::gaps).unwrap_or_default();
        self.measures.replace(old, new);
        self.dirty.extend(moved);
        self.dirty.insert(name.clone());
    }
}
