//! The service ports and namespaces that owned the removed backends whose indices are not free yet.

use std::{collections::BTreeSet, sync::Arc};

use foldhash::HashMap;

/// The service port that owned a removed backend.
#[derive(Clone, Debug)]
pub(super) struct FormerOwner {
    /// The id of the service port.
    pub(super) id: u32,
    /// The namespace of the Service, if known.
    pub(super) namespace: Option<Arc<str>>,
    /// True if the backend still has open connections after its grace period, or false if it is still waiting
    /// for the grace period to end.
    pub(super) is_draining: bool,
}

/// The former owner of each removed backend whose index is not free yet.
#[derive(Debug, Default)]
pub(super) struct FormerOwners {
    by_index: HashMap<u32, FormerOwner>,
    /// The indices of each service port's removed backends.
    by_id: HashMap<u32, BTreeSet<u32>>,
}

impl FormerOwners {
    pub(super) fn insert(&mut self, index: u32, owner: FormerOwner) {
        self.by_id.entry(owner.id).or_default().insert(index);
        self.by_index.insert(index, owner);
    }

    pub(super) fn remove(&mut self, index: u32) -> Option<FormerOwner> {
        let owner = self.by_index.remove(&index)?;
        if let Some(indices) = self.by_id.get_mut(&owner.id) {
            indices.remove(&index);
            if indices.is_empty() {
                self.by_id.remove(&owner.id);
            }
        }
        Some(owner)
    }

    pub(super) fn of_backend(&self, index: u32) -> Option<&FormerOwner> {
        self.by_index.get(&index)
    }

    /// Returns the indices of all removed backends.
    pub(super) fn indices(&self) -> impl Iterator<Item = u32> {
        self.by_index.keys().copied()
    }

    /// Returns the indices of a service port's removed backends.
    pub(super) fn of_port(&self, id: u32) -> BTreeSet<u32> {
        self.by_id.get(&id).cloned().unwrap_or_default()
    }

    /// Returns true if the index of a backend that a service port owned is not free yet.
    pub(super) fn has_port(&self, id: u32) -> bool {
        self.by_id.contains_key(&id)
    }
}
