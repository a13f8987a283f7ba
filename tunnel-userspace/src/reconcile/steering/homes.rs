//! Which index a key gets, and which keys of an earlier process stay.

use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    time::Duration,
};

use tunnel_common::{
    addr::Address,
    steering::{Prefix, SteeringKey},
};

use super::{QUARANTINE, Steering, nanos};

/// Indices that may be given out in a pass.
pub(super) struct Free {
    pub(super) indices: VecDeque<u32>,
    /// Those that rest or rested, by what they last stood for.
    resting: BTreeMap<SteeringKey, u32>,
    /// Those that were given out already.
    given: BTreeSet<u32>,
}

impl<M> Steering<M> {
    /// Keys of an earlier process that nobody asks for stay while the sources don't hold everything:
    /// their Node, or the list of their port, may be what could not be read. Those that are known
    /// not to be wanted go.
    pub(super) fn forget_orphans(&mut self) {
        let Some(rules) = self.settings.rules.as_ref().filter(|_| !self.whole) else {
            self.orphans.clear();
            return;
        };
        if rules.is_own_edge(&self.nodes) {
            self.orphans.clear();
            return;
        }
        // By address: whether a Node that has it is an edge node.
        let mut known: BTreeMap<Address, bool> = BTreeMap::new();
        for node in self.nodes.values() {
            for address in &node.internal_ips {
                let all_edge = known.entry(Address::from_ip(*address)).or_insert(true);
                *all_edge &= rules.is_edge(node);
            }
        }
        let (targets, has_ports) = (&self.plan.targets, self.config_map.is_some());
        self.orphans.retain(|key| {
            let may_be_wanted = match known.get(&key.address) {
                Some(is_edge) => *is_edge && !has_ports,
                None => true,
            };
            !targets.contains_key(key) && may_be_wanted
        });
    }

    /// An index for a key, and the address that stands for it: its own of earlier, if that still
    /// rests, or one that is free.
    pub(super) fn find_home(&self, key: &SteeringKey, free: &mut Free) -> Option<(u32, Address)> {
        let own = free.resting.remove(key);
        let fits = |index: u32| Some((index, self.address_of(key, index)?));
        if let Some(home) = own.and_then(fits) {
            free.given.insert(home.0);
            return Some(home);
        }
        // What lies beyond the range of one family may lie in that of the other.
        let mut indices = free.indices.iter().copied();
        let home =
            indices.find_map(|index| fits(index).filter(|_| !free.given.contains(&index)))?;
        free.given.insert(home.0);
        while free
            .indices
            .front()
            .is_some_and(|index| free.given.contains(index))
        {
            free.indices.pop_front();
        }
        Some(home)
    }

    /// The indices that may be given out: those that were never used, then those that were not for
    /// long enough, the longest first.
    pub(super) fn free_indices(&self, now: Duration) -> Free {
        let last = self.records.last_key_value().map(|(index, _)| *index);
        let unused = last.map_or(0, |last| last.saturating_add(1))..self.canary_index();
        let before = nanos(now).saturating_sub(nanos(QUARANTINE));
        let resting = self
            .records
            .iter()
            .filter(|(_, record)| record.removed != 0);
        let mut rested: Vec<_> = resting
            .clone()
            .filter(|(_, record)| record.removed <= before)
            .map(|(index, record)| (record.removed, *index))
            .collect();
        rested.sort_unstable();
        let rooms = self.settings.prefixes.iter().map(Prefix::room);
        let most = rooms.max().unwrap_or(0);
        Free {
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
}
