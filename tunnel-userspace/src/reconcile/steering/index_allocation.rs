//! Allocates record indices to steering keys.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use tunnel_common::{
    addr::Address,
    steering::{Prefix, SteeringKey, SteeringRecord},
};

use super::quarantined_nodes::QuarantinedNodes;

/// The period after an index's removal during which the index may be reused only for its last key.
pub const QUARANTINE: Duration = Duration::from_secs(600);

/// The indices that a sync may allocate.
pub(super) struct FreeIndices<'a> {
    prefixes: &'a [Prefix],
    /// The indices that are free for any key, as pairs of removal time and index. The removal time is 0 for
    /// an index that was never used.
    pub(super) indices: BTreeSet<(u64, u32)>,
    /// The removed indices, as pairs of removal time and index, keyed by their last key.
    removed_by_key: BTreeMap<SteeringKey, (u64, u32)>,
    /// The start of the current quarantine period, in nanoseconds since boot. An index removed after this
    /// time may be reused only for its last key.
    quarantine_start: u64,
    /// The number of indices in quarantine, by the Node that had them.
    quarantined: BTreeMap<Arc<str>, usize>,
}

/// The reason why a key gets no index.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum NoIndex {
    /// No suitable index is free.
    Full,
    /// The key's Node has more indices in quarantine than are free.
    NodeWaits,
}

impl<'a> FreeIndices<'a> {
    /// Finds the indices below `end` that may be allocated: first those that were never used, then those
    /// whose quarantine has ended, in the order of their removal.
    pub(super) fn new(
        records: &BTreeMap<u32, SteeringRecord>,
        nodes: &mut QuarantinedNodes,
        end: u32,
        prefixes: &'a [Prefix],
        now: Duration,
    ) -> Self {
        let last = records.last_key_value().map(|(index, _)| *index);
        let prefix_room = prefixes.iter().map(Prefix::capacity).max().unwrap_or(0);
        let unused = last.map_or(0, |last| last + 1)..end.min(prefix_room);
        // 0 if the node booted less than a quarantine period ago, so that every removed index is in
        // quarantine.
        let quarantine_start = nanos(now).saturating_sub(nanos(QUARANTINE));
        let removed = records.iter().filter(|(_, record)| record.removed_at != 0);
        let removed_by_key =
            removed.map(|(index, record)| (record.key, (record.removed_at, *index)));
        let removed_by_key: BTreeMap<_, _> = removed_by_key.collect();
        let removed = records
            .iter()
            .map(|(index, record)| (record.removed_at, *index));
        let after_quarantine =
            removed.filter(|(removed, _)| (1..=quarantine_start).contains(removed));
        FreeIndices {
            prefixes,
            indices: unused
                .map(|index| (0, index))
                .chain(after_quarantine)
                .collect(),
            removed_by_key,
            quarantine_start,
            quarantined: nodes.counts(records, quarantine_start),
        }
    }

    /// Allocates an index for a key of a Node, preferably the last one that the key had. Returns the index and its
    /// steering address. The addresses of a Node that changes them all the time must not use up all indices, so such a
    /// Node gets no further index while it has more in quarantine than are free.
    pub(super) fn allocate(
        &mut self,
        key: &SteeringKey,
        node: &str,
    ) -> Result<(u32, Address), NoIndex> {
        let last_index = self.removed_by_key.remove(key);
        // An index that is too large for one address family's prefix may fit into the other family's.
        let fits = |candidate: (u64, u32)| {
            Some((
                candidate,
                steering_address(self.prefixes, key, candidate.1)?,
            ))
        };
        let mut free = self.indices.iter().copied();
        // After its quarantine, the index may have been allocated to another key.
        let is_free = |candidate: &(u64, u32)| {
            candidate.0 > self.quarantine_start || self.indices.contains(candidate)
        };
        let last_index = last_index.filter(is_free).and_then(fits);
        let quarantined = self.quarantined.get(node).copied().unwrap_or(0);
        if last_index.is_none() && quarantined > self.indices.len() {
            return Err(NoIndex::NodeWaits);
        }
        let found = last_index.or_else(|| free.find_map(fits));
        let (candidate, address) = found.ok_or(NoIndex::Full)?;
        self.indices.remove(&candidate);
        Ok((candidate.1, address))
    }
}

/// Returns the steering address for an index, in the address family of the index's key, or `None` if the
/// index is out of range for that family's prefix.
pub(super) fn steering_address(
    prefixes: &[Prefix],
    key: &SteeringKey,
    index: u32,
) -> Option<Address> {
    let is_v4 = key.address.is_v4();
    let mut prefixes = prefixes.iter();
    prefixes
        .find(|prefix| prefix.is_v4() == is_v4)?
        .address(index)
}

/// Converts a duration to nanoseconds, the unit used in the maps.
pub(in crate::reconcile) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
