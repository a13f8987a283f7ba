//! The map entries that each namespace uses, and the share of the maps that a namespace may use. The share
//! keeps the Services of one namespace from filling the maps, so that there is room for those of others.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt as _};
use tunnel_common::table::{Headroom, MapSize};

use super::{
    allocators::to_usize,
    former_owners::{FormerOwner, FormerOwners},
};

/// The number of entries in each of the maps that namespaces share.
#[derive(Clone, Copy, Debug, Default, Eq, PartialEq)]
pub(in crate::reconcile) struct EntryCounts {
    pub(in crate::reconcile) frontends: usize,
    pub(in crate::reconcile) slots: usize,
    pub(in crate::reconcile) backends: usize,
}

impl EntryCounts {
    /// The entries that every namespace may use, whatever its share is: enough for a port of a Service with
    /// 16 endpoints in each address family.
    pub(super) const GUARANTEED: Self = Self {
        frontends: 2,
        slots: 32,
        backends: 32,
    };

    /// Returns the number of entries in one of the maps, or 0 for a map that namespaces do not share.
    pub(super) const fn of(self, size: MapSize) -> usize {
        match size {
            MapSize::Frontends => self.frontends,
            MapSize::Slots => self.slots,
            MapSize::Backends => self.backends,
            MapSize::SourceRanges
            | MapSize::Steering
            | MapSize::Affinity
            | MapSize::SharedTranslations
            | MapSize::Flows
            | MapSize::Fragments => 0,
        }
    }

    /// Adds the numbers in `other`.
    pub(super) const fn add(&mut self, other: Self) {
        self.frontends += other.frontends;
        self.slots += other.slots;
        self.backends += other.backends;
    }

    /// Subtracts the numbers in `other`, down to 0.
    pub(super) const fn subtract(&mut self, other: Self) {
        self.frontends = self.frontends.saturating_sub(other.frontends);
        self.slots = self.slots.saturating_sub(other.slots);
        self.backends = self.backends.saturating_sub(other.backends);
    }

    const fn is_zero(self) -> bool {
        self.frontends == 0 && self.slots == 0 && self.backends == 0
    }
}

/// The entries that one namespace uses.
#[derive(Clone, Copy, Debug, Default)]
struct NamespaceUsage {
    entries: EntryCounts,
    /// The number of removed backends that are waiting for their grace period to end.
    retired: usize,
    /// The number of removed backends that still have open connections.
    draining: usize,
}

impl NamespaceUsage {
    const fn of(self, size: MapSize) -> usize {
        let removed = if matches!(size, MapSize::Backends) {
            self.retired + self.draining
        } else {
            0
        };
        self.entries.of(size) + removed
    }
}

/// The state of a map that the limit of a namespace depends on.
#[derive(Clone, Copy, Debug)]
pub(super) struct MapState {
    pub(super) size: MapSize,
    /// The configured size.
    pub(super) capacity: u32,
    /// The number of entries in use by all namespaces, including those of removed backends that still have
    /// open connections.
    pub(super) used: usize,
}

/// The number of entries that a namespace uses in a map, and the number that it may use.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct ShareOfMap {
    pub(super) used: usize,
    pub(super) limit: usize,
    /// The number of entries that others use.
    pub(super) others: usize,
    /// The number of used entries that belong to removed backends with open connections.
    pub(super) draining: usize,
    /// The number of used entries that belong to backends that have been replaced, but may have open
    /// connections: the maps don't show this until a grace period has ended.
    pub(super) pending: usize,
}

impl ShareOfMap {
    /// Returns the share as it will be if no replaced backend has open connections.
    pub(super) const fn without_pending(self) -> Self {
        Self {
            used: self.used.saturating_sub(self.pending),
            pending: 0,
            ..self
        }
    }
}

/// The entries that each namespace uses, and the rule that limits them.
#[derive(Debug)]
pub(in crate::reconcile) struct NamespaceShares {
    /// The percentage of the entries not used by other namespaces that a namespace may use.
    percent: u8,
    used: HashMap<Arc<str>, NamespaceUsage>,
    former_owners: FormerOwners,
    /// The number of each namespace's backends that will be removed at the end of the current sync.
    leaving: HashMap<Arc<str>, usize>,
}

impl NamespaceShares {
    pub(super) fn new(percent: u8) -> Self {
        Self {
            percent,
            used: HashMap::new(),
            former_owners: FormerOwners::default(),
            leaving: HashMap::new(),
        }
    }

    /// Returns a namespace's use and limit of a map, or `None` if the share is not limited.
    pub(super) fn share_of(&self, namespace: &str, map: MapState) -> Option<ShareOfMap> {
        if self.percent >= 100 {
            return None;
        }
        let usage = self.used_by(namespace);
        let used = usage.of(map.size);
        let is_backends = matches!(map.size, MapSize::Backends);
        let known = if is_backends {
            used - usage.retired
        } else {
            used
        };
        let others = map.used.saturating_sub(known);
        let available = to_usize(map.capacity).saturating_sub(others);
        let guaranteed = EntryCounts::GUARANTEED.of(map.size);
        Some(ShareOfMap {
            used,
            limit: self.part_of(available).max(guaranteed),
            others,
            draining: if is_backends { usage.draining } else { 0 },
            pending: if is_backends {
                usage.retired + self.leaving.get(namespace).copied().unwrap_or(0)
            } else {
                0
            },
        })
    }

    /// Returns how many backends a namespace may replace now. Each replaced backend may keep its index as long
    /// as it has open connections, and these indices take up the spare entries of the array. A namespace may
    /// therefore exceed its limit only by its share of the spare entries that others don't use.
    pub(super) fn replaceable_backends(&self, share: ShareOfMap, capacity: u32) -> usize {
        let entries = to_usize(Headroom::Update.entries(capacity));
        let spare = entries.saturating_sub(share.others.max(to_usize(capacity)));
        let most = self.part_of(spare);
        let most = most.max(EntryCounts::GUARANTEED.backends);
        let exceeding = share.used.saturating_sub(share.limit);
        most.saturating_sub(exceeding.min(share.draining + share.pending))
    }

    /// Returns the namespace that has most of the removed backends with open connections, and their number.
    pub(super) fn most_draining(&self) -> Option<(&str, usize)> {
        let used = self.used.iter();
        let draining = used.map(|(namespace, usage)| (&**namespace, usage.draining));
        draining
            .filter(|(_, draining)| *draining > 0)
            .max_by_key(|(namespace, draining)| (*draining, std::cmp::Reverse(*namespace)))
    }

    /// Returns the configured part of a number of entries.
    pub(super) fn part_of(&self, entries: usize) -> usize {
        entries.saturating_mul(usize::from(self.percent)) / 100
    }

    /// Returns the configured percentage.
    pub(super) const fn percent(&self) -> u8 {
        self.percent
    }

    /// Replaces the counts of one of a namespace's ports.
    pub(super) fn replace(&mut self, namespace: &Arc<str>, old: EntryCounts, new: EntryCounts) {
        if old == new {
            return;
        }
        self.change(namespace, |usage| {
            usage.entries.add(new);
            usage.entries.subtract(old);
        });
    }

    /// Records how many of a namespace's backends will be removed at the end of the current sync.
    pub(super) fn add_leaving(&mut self, namespace: &Arc<str>, backends: usize) {
        if backends > 0 {
            *self.leaving.entry(Arc::clone(namespace)).or_default() += backends;
        }
    }

    /// Returns true if some of a namespace's backends will be removed at the end of the current sync.
    pub(super) fn has_leaving(&self, namespace: &str) -> bool {
        self.leaving.get(namespace).is_some_and(|it| *it > 0)
    }

    /// Forgets which backends will be removed, at the start of a sync.
    pub(super) fn clear_leaving(&mut self) {
        self.leaving.clear();
    }

    /// Records the service port and namespace that owned a backend that has just been removed.
    pub(super) fn add_retired(&mut self, index: u32, id: u32, namespace: Option<&Arc<str>>) {
        let owner = FormerOwner {
            id,
            namespace: namespace.cloned(),
            is_draining: false,
        };
        self.former_owners.insert(index, owner);
        if let Some(namespace) = namespace {
            self.change(namespace, |usage| usage.retired += 1);
        }
    }

    /// Records that a removed backend still has open connections.
    pub(super) fn add_draining(&mut self, index: u32) {
        if let Some(owner) = self.remove_owner(index) {
            if let Some(namespace) = &owner.namespace {
                self.change(namespace, |usage| usage.draining += 1);
            }
            let is_draining = true;
            let owner = FormerOwner {
                is_draining,
                ..owner
            };
            self.former_owners.insert(index, owner);
        }
    }

    /// Records that the index of a removed backend is free.
    pub(super) fn remove_former_owner(&mut self, index: u32) {
        self.remove_owner(index);
    }

    /// Adds a removed backend with open connections that has been found in the maps. The namespace of its
    /// service port is not known until [`Self::assign_removed`] is called.
    pub(super) fn add_found(&mut self, index: u32, id: u32) {
        let owner = FormerOwner {
            id,
            namespace: None,
            is_draining: true,
        };
        self.former_owners.insert(index, owner);
    }

    /// Assigns the removed backends of a service port whose namespace was unknown to a namespace.
    pub(super) fn assign_removed(&mut self, id: u32, namespace: &Arc<str>) {
        for index in self.former_owners.of_port(id) {
            let owner = self.former_owners.of_backend(index);
            let is_unknown = owner.is_some_and(|owner| owner.namespace.is_none());
            if is_unknown && let Some(owner) = self.remove_owner(index) {
                self.insert_owner(index, owner, namespace);
            }
        }
    }

    /// Takes over the namespaces of the removed backends that both this and an earlier read of the maps
    /// contain.
    pub(super) fn take_owners_from(&mut self, earlier: &Self) {
        for index in earlier.former_owners.indices() {
            let known = earlier.former_owners.of_backend(index);
            if let Some(namespace) = known.and_then(|owner| owner.namespace.as_ref())
                && let Some(owner) = self.remove_owner(index)
            {
                self.insert_owner(index, owner, namespace);
            }
        }
    }

    /// Returns true if the index of a backend that a service port owned is not free yet.
    pub(super) fn has_removed(&self, id: u32) -> bool {
        self.former_owners.has_port(id)
    }

    fn insert_owner(&mut self, index: u32, owner: FormerOwner, namespace: &Arc<str>) {
        self.change(namespace, |usage| {
            if owner.is_draining {
                usage.draining += 1;
            } else {
                usage.retired += 1;
            }
        });
        let namespace = Some(Arc::clone(namespace));
        let owner = FormerOwner { namespace, ..owner };
        self.former_owners.insert(index, owner);
    }

    fn remove_owner(&mut self, index: u32) -> Option<FormerOwner> {
        let owner = self.former_owners.remove(index)?;
        if let Some(namespace) = &owner.namespace {
            self.change(namespace, |usage| {
                let count = if owner.is_draining {
                    &mut usage.draining
                } else {
                    &mut usage.retired
                };
                *count = count.saturating_sub(1);
            });
        }
        Some(owner)
    }

    fn used_by(&self, namespace: &str) -> NamespaceUsage {
        self.used.get(namespace).copied().unwrap_or_default()
    }

    fn change(&mut self, namespace: &Arc<str>, change: impl FnOnce(&mut NamespaceUsage)) {
        if let Some(usage) = self.used.get_mut(namespace) {
            change(usage);
            if usage.entries.is_zero() && usage.draining + usage.retired == 0 {
                self.used.remove(namespace);
            }
            return;
        }
        let mut usage = NamespaceUsage::default();
        change(&mut usage);
        self.used.insert(Arc::clone(namespace), usage);
    }
}
