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
        let moved = if let Some(state) = state {
            let plan = plan::service(state, &self.here);
            let moved = self.claims.replace(name, plan::claims(state, &plan));
            self.plans.insert(name.clone(), plan);
            moved
        } else {
            self.plans.remove(name);
            self.claims.replace(name, std::iter::empty())
        };
        self.dirty.extend(moved);
        self.dirty.insert(name.clone());
    }
}
