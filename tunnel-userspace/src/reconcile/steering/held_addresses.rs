//! The addresses that edge nodes hold: for each address, the Node that was the first to have it.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc, time::Duration};

use tokio::sync::watch;

use crate::{
    model::{Node, ObjectName},
    plan::{self, AddressHolders},
    publish,
};

/// The period for which an address is kept for a Node that no longer lists it, or that was deleted.
pub(super) const RESERVATION: Duration = Duration::from_secs(600);

/// The maximum number of addresses that are kept for a Node that no longer lists them: as many as it can claim at a
/// time. There is a limit because the node's kubelet can change its addresses at will. The last ones are released.
const MAX_UNLISTED: usize = 8;

/// The addresses that edge nodes hold, and the receivers that save them.
#[derive(Debug, Default)]
pub(super) struct HeldAddresses {
    holders: AddressHolders,
    /// The addresses that the Nodes that hold them don't list, each with the time at which this was noticed.
    unlisted: BTreeMap<IpAddr, Duration>,
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

    /// Releases the addresses that their Nodes have not listed for [`RESERVATION`], also because they were deleted.
    /// Until then, a Node gets an address back by listing it again: a kubelet that registers again creates a Node
    /// without addresses. While a Node may be missing from `nodes` (`are_current` is false), no time is up.
    pub(super) fn release(
        &mut self,
        nodes: &BTreeMap<ObjectName, Arc<Node>>,
        are_current: bool,
        now: Duration,
    ) {
        let Self {
            holders, unlisted, ..
        } = self;
        let mut kept: BTreeMap<Arc<str>, Vec<(Duration, IpAddr)>> = BTreeMap::new();
        for (address, holder) in &*holders {
            let node = nodes.get(&ObjectName::new("", Arc::clone(holder)));
            if node.is_some_and(|node| plan::claims_address(node, *address)) {
                unlisted.remove(address);
            } else if node.is_some() || are_current {
                let since = *unlisted.entry(*address).or_insert(now);
                let of_holder = kept.entry(Arc::clone(holder)).or_default();
                of_holder.push((since, *address));
            }
        }
        for mut addresses in kept.into_values() {
            addresses.sort_unstable();
            for (position, (since, address)) in addresses.into_iter().enumerate() {
                let is_over = are_current && now.saturating_sub(since) >= RESERVATION;
                if is_over || position >= MAX_UNLISTED {
                    holders.remove(&address);
                    unlisted.remove(&address);
                }
            }
        }
    }

    /// Records the Nodes that addresses are steered to, which hold these addresses from now on.
    pub(super) fn hold(&mut self, owners: &AddressHolders) {
        for (address, owner) in owners {
            self.holders.insert(*address, Arc::clone(owner));
        }
        publish::publish_if_changed(&self.published, Arc::new(self.holders.clone()));
    }
}
