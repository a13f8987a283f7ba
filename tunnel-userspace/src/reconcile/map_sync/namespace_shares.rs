//! The map entries that each namespace uses, and the share of the maps that a namespace may use. The share
//! keeps the Services of one namespace from filling the maps, so that there is room for those of others.

use std::sync::Arc;

use foldhash::{HashMap, HashMapExt as _};
use tunnel_common::table::{Headroom, MapSize};

use super::allocators::to_usize;

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
            | MapSize::SharedTranslations => 0,
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
    /// The number of removed backends that still have open connections.
    draining: usize,
}

impl NamespaceUsage {
    const fn of(self, size: MapSize) -> usize {
        let draining = if matches!(size, MapSize::Backends) {
            self.draining
        } else {
            0
        };
        self.entries.of(size) + draining
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
    /// The number of used entries that belong to removed backends with open connections.
    pub(super) draining: usize,
}

/// The entries that each namespace uses, and the rule that limits them.
#[derive(Debug)]
pub(in crate::reconcile) struct NamespaceShares {
    /// The percentage of the entries not used by other namespaces that a namespace may use.
    percent: u8,
    used: HashMap<Arc<str>, NamespaceUsage>,
    /// The namespaces that owned the removed backends whose indices are not free yet.
    former_owners: HashMap<u32, Arc<str>>,
}

impl NamespaceShares {
    pub(super) fn new(percent: u8) -> Self {
        Self {
            percent,
            used: HashMap::new(),
            former_owners: HashMap::new(),
        }
    }

    /// Returns a namespace's use and limit of a map, or `None` if the share is not limited.
    pub(super) fn share_of(&self, namespace: &str, map: MapState) -> Option<ShareOfMap> {
        if self.percent >= 100 {
            return None;
        }
        let usage = self.used_by(namespace);
        let used = usage.of(map.size);
        let others = map.used.saturating_sub(used);
        let available = to_usize(map.capacity).saturating_sub(others);
        let guaranteed = EntryCounts::GUARANTEED.of(map.size);
        Some(ShareOfMap {
            used,
            limit: self.part_of(available).max(guaranteed),
            draining: used - usage.entries.of(map.size),
        })
    }

    /// Returns how many backends a namespace may replace now. Each replaced backend may keep its index as long
    /// as it has open connections, and these indices take up the spare entries of the array. A namespace may
    /// therefore exceed its limit only by its share of these entries.
    pub(super) fn replaceable_backends(&self, share: ShareOfMap, capacity: u32) -> usize {
        let spare = Headroom::Update.entries(capacity) - capacity;
        let most = self.part_of(to_usize(spare));
        let most = most.max(EntryCounts::GUARANTEED.backends);
        let exceeding = share.used.saturating_sub(share.limit);
        most.saturating_sub(exceeding.min(share.draining))
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

    /// Records the namespace that owned a backend that has just been removed.
    pub(super) fn add_former_owner(&mut self, index: u32, namespace: &Arc<str>) {
        self.former_owners.insert(index, Arc::clone(namespace));
    }

    /// Records that a removed backend still has open connections.
    pub(super) fn add_draining(&mut self, index: u32) {
        if let Some(namespace) = self.former_owners.get(&index).map(Arc::clone) {
            self.change(&namespace, |usage| usage.draining += 1);
        }
    }

    /// Records that the index of a removed backend is free. `was_draining` is true if [`Self::add_draining`]
    /// was called for it.
    pub(super) fn remove_former_owner(&mut self, index: u32, was_draining: bool) {
        if let Some(namespace) = self.former_owners.remove(&index)
            && was_draining
        {
            self.change(&namespace, |usage| {
                usage.draining = usage.draining.saturating_sub(1);
            });
        }
    }

    /// Takes over the owners of the removed backends for which `is_draining` returns true.
    pub(super) fn take_draining_from(
        &mut self,
        earlier: &mut Self,
        is_draining: impl Fn(u32) -> bool,
    ) {
        for (index, namespace) in std::mem::take(&mut earlier.former_owners) {
            self.add_former_owner(index, &namespace);
            if is_draining(index) {
                self.add_draining(index);
            }
        }
    }

    fn used_by(&self, namespace: &str) -> NamespaceUsage {
        self.used.get(namespace).copied().unwrap_or_default()
    }

    fn change(&mut self, namespace: &Arc<str>, change: impl FnOnce(&mut NamespaceUsage)) {
        if let Some(usage) = self.used.get_mut(namespace) {
            change(usage);
            if usage.entries.is_zero() && usage.draining == 0 {
                self.used.remove(namespace);
            }
            return;
        }
        let mut usage = NamespaceUsage::default();
        change(&mut usage);
        self.used.insert(Arc::clone(namespace), usage);
    }
}
