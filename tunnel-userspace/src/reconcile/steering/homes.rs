//! The allocation of an index to a key.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tunnel_common::{
    addr::Address,
    steering::{Prefix, Steered, SteeringKey},
};

/// The time for which a removed index is reused only for its last key.
pub const QUARANTINE: Duration = Duration::from_secs(600);

/// The indices that may be allocated in a sync.
pub(super) struct Free<'a> {
    prefixes: &'a [Prefix],
    /// Each with the time of its removal; unused indices come first.
    pub(super) indices: BTreeSet<(u64, u32)>,
    /// Removed indices by their last key.
    resting: BTreeMap<SteeringKey, (u64, u32)>,
    /// Indices that were removed later are in quarantine, and only for their last key.
    before: u64,
}

impl<'a> Free<'a> {
    /// Returns the indices below `end` that may be allocated: unused ones, then those whose quarantine
    /// has ended, in the order of removal.
    pub(super) fn new(
        records: &BTreeMap<u32, Steered>,
        end: u32,
        prefixes: &'a [Prefix],
        now: Duration,
    ) -> Self {
        let last = records.last_key_value().map(|(index, _)| *index);
        let most = prefixes.iter().map(Prefix::room).max().unwrap_or(0);
        let unused = last.map_or(0, |last| last + 1)..end.min(most);
        // Zero soon after the machine started, so that no quarantine has ended.
        let before = nanos(now).saturating_sub(nanos(QUARANTINE));
        let removed = records.iter().filter(|(_, record)| record.removed != 0);
        let resting = removed.map(|(index, record)| (record.key, (record.removed, *index)));
        let resting: BTreeMap<_, _> = resting.collect();
        let removed = records
            .iter()
            .map(|(index, record)| (record.removed, *index));
        let rested = removed.filter(|(removed, _)| (1..=before).contains(removed));
        Free {
            prefixes,
            indices: unused.map(|index| (0, index)).chain(rested).collect(),
            resting,
            before,
        }
    }

    /// Returns an index for a key, and its steering address: the key's last index, if that is still
    /// free, or another one.
    pub(super) fn find_home(&mut self, key: &SteeringKey) -> Option<(u32, Address)> {
        let own = self.resting.remove(key);
        // An index beyond the prefix of one family may be within that of the other.
        let fits = |place: (u64, u32)| Some((place, address_of(self.prefixes, key, place.1)?));
        let mut free = self.indices.iter().copied();
        // After its quarantine the index may have been allocated already.
        let is_free = |place: &(u64, u32)| place.0 > self.before || self.indices.contains(place);
        let own = own.filter(is_free).and_then(fits);
        let (place, address) = own.or_else(|| free.find_map(fits))?;
        self.indices.remove(&place);
        Some((place.1, address))
    }
}

/// Returns the steering address of a key's index.
pub(super) fn address_of(prefixes: &[Prefix], key: &SteeringKey, index: u32) -> Option<Address> {
    let is_v4 = key.address.is_v4();
    let mut prefixes = prefixes.iter();
    prefixes
        .find(|prefix| prefix.is_v4() == is_v4)?
        .address(index)
}

pub(in crate::reconcile) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
