//! Which index a key gets.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use tunnel_common::{
    addr::Address,
    steering::{Prefix, Steered, SteeringKey},
};

/// How long the index of something that is no longer steered stands for nothing else.
pub const QUARANTINE: Duration = Duration::from_secs(600);

/// Indices that may be given out in a pass.
pub(super) struct Free<'a> {
    prefixes: &'a [Prefix],
    /// Each after the time at which it was removed; those that were never used come first.
    pub(super) indices: BTreeSet<(u64, u32)>,
    /// Those that rest or rested, by what they last stood for.
    resting: BTreeMap<SteeringKey, (u64, u32)>,
    /// Those that were removed later rest, for nobody but what they stood for.
    before: u64,
}

impl<'a> Free<'a> {
    /// The indices below an end that may be given out: those that were never used, then those that were
    /// not for long enough, the longest first.
    pub(super) fn new(
        records: &BTreeMap<u32, Steered>,
        end: u32,
        prefixes: &'a [Prefix],
        now: Duration,
    ) -> Self {
        let last = records.last_key_value().map(|(index, _)| *index);
        let most = prefixes.iter().map(Prefix::room).max().unwrap_or(0);
        let unused = last.map_or(0, |last| last + 1)..end.min(most);
        // Soon after the machine started, nothing has rested for long enough.
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

    /// An index for a key, and the address that stands for it: its own of earlier, if that still
    /// rests, or one that is free.
    pub(super) fn find_home(&mut self, key: &SteeringKey) -> Option<(u32, Address)> {
        let own = self.resting.remove(key);
        // What lies beyond the range of one family may lie in that of the other.
        let fits = |place: (u64, u32)| Some((place, address_of(self.prefixes, key, place.1)?));
        let mut free = self.indices.iter().copied();
        // One that has rested may have been given out meanwhile.
        let is_free = |place: &(u64, u32)| place.0 > self.before || self.indices.contains(place);
        let own = own.filter(is_free).and_then(fits);
        let (place, address) = own.or_else(|| free.find_map(fits))?;
        self.indices.remove(&place);
        Some((place.1, address))
    }
}

/// The address that stands for the index of a key.
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
