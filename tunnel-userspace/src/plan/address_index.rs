//! An index of objects and their addresses.

use std::{
    collections::{BTreeSet, HashMap, hash_map::Entry},
    net::IpAddr,
};

use crate::model::ObjectId;

/// An index of objects and their addresses, in both directions. None of the sets is ever empty.
#[derive(Debug, Default)]
pub(super) struct AddressIndex {
    pub(super) by_object: HashMap<ObjectId, BTreeSet<IpAddr>>,
    pub(super) by_address: HashMap<IpAddr, BTreeSet<ObjectId>>,
}

impl AddressIndex {
    /// Replaces the addresses of an object. Returns the addresses that have gained their first object or lost
    /// their last one.
    pub(super) fn set(&mut self, key: &ObjectId, new: BTreeSet<IpAddr>) -> Vec<IpAddr> {
        let old = self.by_object.remove(key).unwrap_or_default();
        let mut changed = Vec::new();
        for address in old.difference(&new) {
            if let Entry::Occupied(mut all) = self.by_address.entry(*address) {
                all.get_mut().remove(key);
                if all.get().is_empty() {
                    all.remove();
                    changed.push(*address);
                }
            }
        }
        for address in new.difference(&old) {
            let all = self.by_address.entry(*address).or_default();
            if all.is_empty() {
                changed.push(*address);
            }
            all.insert(key.clone());
        }
        if !new.is_empty() {
            self.by_object.insert(key.clone(), new);
        }
        changed
    }

    /// Returns the objects that have an address, or `None` if there are none.
    pub(super) fn objects(&self, address: &IpAddr) -> Option<&BTreeSet<ObjectId>> {
        self.by_address.get(address)
    }
}
