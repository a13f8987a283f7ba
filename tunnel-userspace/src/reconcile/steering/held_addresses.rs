//! The addresses that edge nodes hold: for each address, the Node that was the first to have it.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tokio::sync::watch;

use crate::{
    model::{Node, ObjectName},
    plan::{self, AddressHolders},
    publish,
};

/// The period for which a deleted Node's addresses are kept for a new Node with the same name.
pub(super) const RESERVATION: Duration = Duration::from_secs(600);

/// The addresses that edge nodes hold, and the receivers that save them.
#[derive(Debug, Default)]
pub(super) struct HeldAddresses {
    holders: AddressHolders,
    /// The names of Nodes that hold addresses but no longer exist, each with the time at which this was noticed.
    absent: BTreeMap<Arc<str>, Duration>,
    published: watch::Sender<Arc<AddressHolders>>,
}

impl HeldAddresses {
    /// Restores the holders that an earlier process saved.
    pub(super) fn restore(&mut self, holders: AddressHolders) {
        self.published.send_replace(Arc::new(holders.clone()));
        self.holders = holders;
    }

    /// Returns a receiver for the holders, which the next process needs.
    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<AddressHolders>> {
        self.published.subscribe()
    }

    pub(super) const fn holders(&self) -> &AddressHolders {
        &self.holders
    }

    /// Releases the addresses that a Node no longer has, and those of Nodes that were deleted more than
    /// [`RESERVATION`] ago. While an object is missing from the sources (`is_complete` is false), this object may
    /// be a Node, so the addresses of missing Nodes are kept.
    pub(super) fn release(
        &mut self,
        nodes: &BTreeMap<ObjectName, Arc<Node>>,
        is_complete: bool,
        now: Duration,
    ) {
        let node = |name: &Arc<str>| nodes.get(&ObjectName::new("", Arc::clone(name)));
        let names: BTreeSet<_> = self.holders.values().map(Arc::clone).collect();
        self.absent
            .retain(|name, _| is_complete && node(name).is_none());
        if is_complete {
            for name in names.into_iter().filter(|name| node(name).is_none()) {
                self.absent.entry(name).or_insert(now);
            }
        }
        let absent = &self.absent;
        self.holders.retain(|address, holder| match node(holder) {
            Some(node) => plan::claims_address(node, *address),
            None => absent
                .get(holder)
                .is_none_or(|since| now.saturating_sub(*since) < RESERVATION),
        });
    }

    /// Records the Nodes that addresses are steered to, which hold these addresses from now on.
    pub(super) fn hold(&mut self, owners: &AddressHolders) {
        for (address, owner) in owners {
            self.holders.insert(*address, Arc::clone(owner));
        }
        publish::publish_if_changed(&self.published, Arc::new(self.holders.clone()));
    }
}
