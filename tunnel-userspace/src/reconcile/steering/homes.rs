//! Which index a key gets, and which keys of an earlier process stay.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    sync::Arc,
    time::Duration,
};

use tunnel_common::{
    addr::Address,
    steering::{Prefix, Steered, SteeringKey},
};

use crate::{
    model::{Node, ObjectName},
    plan::SteeringRules,
};

/// How long the index of something that is no longer steered stands for nothing else.
pub const QUARANTINE: Duration = Duration::from_secs(600);

/// Indices that may be given out in a pass.
pub(super) struct Free<'a> {
    prefixes: &'a [Prefix],
    pub(super) indices: VecDeque<u32>,
    /// Those that rest or rested, by what they last stood for.
    resting: BTreeMap<SteeringKey, u32>,
    /// Those that were given out already.
    given: BTreeSet<u32>,
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
        let unused = last.map_or(0, |last| last.saturating_add(1))..end;
        let before = nanos(now).saturating_sub(nanos(QUARANTINE));
        let resting = records.iter().filter(|(_, record)| record.removed != 0);
        let mut rested: Vec<_> = resting
            .clone()
            .filter(|(_, record)| record.removed <= before)
            .map(|(index, record)| (record.removed, *index))
            .collect();
        rested.sort_unstable();
        let most = prefixes.iter().map(Prefix::room).max().unwrap_or(0);
        Free {
            prefixes,
            indices: unused
                .take_while(|index| *index < most)
                .chain(rested.into_iter().map(|(_, index)| index))
                .collect(),
            resting: resting
                .map(|(index, record)| (record.key, *index))
                .collect(),
            given: BTreeSet::new(),
        }
    }

    /// An index for a key, and the address that stands for it: its own of earlier, if that still
    /// rests, or one that is free.
    pub(super) fn find_home(&mut self, key: &SteeringKey) -> Option<(u32, Address)> {
        let own = self.resting.remove(key);
        let fits = |index: u32| Some((index, address_of(self.prefixes, key, index)?));
        if let Some(home) = own.and_then(fits) {
            self.given.insert(home.0);
            return Some(home);
        }
        // What lies beyond the range of one family may lie in that of the other.
        let mut indices = self.indices.iter().copied();
        let home =
            indices.find_map(|index| fits(index).filter(|_| !self.given.contains(&index)))?;
        self.given.insert(home.0);
        while self
            .indices
            .front()
            .is_some_and(|index| self.given.contains(index))
        {
            self.indices.pop_front();
        }
        Some(home)
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

/// Keys of an earlier process that nobody asks for stay while the sources don't hold everything:
/// their Node, or the list of their port, may be what could not be read. Those that are known
/// not to be wanted go.
pub(super) fn keep_orphans(
    orphans: &mut BTreeSet<SteeringKey>,
    rules: &SteeringRules,
    nodes: &BTreeMap<ObjectName, Arc<Node>>,
    has_ports: bool,
    is_target: impl Fn(&SteeringKey) -> bool,
) {
    if rules.is_own_edge(nodes) {
        orphans.clear();
        return;
    }
    // By address: whether a Node that has it is an edge node.
    let mut known: BTreeMap<Address, bool> = BTreeMap::new();
    for node in nodes.values() {
        for address in &node.internal_ips {
            let all_edge = known.entry(Address::from_ip(*address)).or_insert(true);
            *all_edge &= rules.is_edge(node);
        }
    }
    orphans.retain(|key| {
        let may_be_wanted = match known.get(&key.address) {
            Some(is_edge) => *is_edge && !has_ports,
            None => true,
        };
        !is_target(key) && may_be_wanted
    });
}

pub(in crate::reconcile) fn nanos(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
}
