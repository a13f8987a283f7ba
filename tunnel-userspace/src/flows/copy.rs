//! Copies flows to a map of another size, which may have fewer entries. Open connections are copied first, and take the place of
//! other flows if the new map is full.

use std::collections::VecDeque;

use tunnel_common::flow::{Flow, FlowKey, Role};

use super::{Activity, FlowMap, SweepError, entries, entry_of, is_open};
use crate::reconcile::{ReadError, WriteError};

/// A map of flows that can be written.
pub trait WritableFlowMap: FlowMap {
    /// Inserts an entry, or replaces the one with its key. Returns false if the map is full.
    ///
    /// # Errors
    ///
    /// Returns an error if the entry can't be written.
    fn write(&self, entry: &Flow) -> Result<bool, WriteError>;
}

/// The flows that have been copied.
#[derive(Debug, Default)]
pub struct CopiedFlows {
    /// The keys of those that may be removed to make room, those that were copied last at the end.
    pub may_give_way: VecDeque<FlowKey>,
    /// True if there was no room for all flows.
    pub is_cut_short: bool,
}

/// A map of flows, and the one that takes its place.
#[derive(Clone, Copy, Debug)]
pub struct FlowCopy<'a, M> {
    /// The map that the programs use.
    pub old: &'a M,
    /// The map to which the flows are copied.
    pub new: &'a M,
    /// True if some programs may use the new map already. The copy of a flow that was used last is kept then.
    pub is_new_used: bool,
}

impl<M: WritableFlowMap> FlowCopy<'_, M> {
    /// Copies all flows. The new map may contain some of them already, as they were earlier.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written.
    pub fn copy_all(&self) -> Result<CopiedFlows, SweepError> {
        if !self.is_new_used {
            self.remove_ended()?;
        }
        let mut copied = CopiedFlows::default();
        let mut others = entries(self.new);
        for flow in entries(self.old) {
            let dialled = flow?;
            if !begins(&dialled) || !is_open(self.old, &dialled)? {
                continue;
            }
            while !self.copy_entries(&dialled)? {
                copied.is_cut_short = true;
                if !self.remove_next(&mut others)? {
                    break;
                }
            }
        }
        let (mut has_room, mut opened) = (true, Vec::new());
        for flow in entries(self.old) {
            let dialled = flow?;
            if !begins(&dialled) {
                continue;
            }
            let there = self.new.find(&dialled.key())?;
            if is_open(self.old, &dialled)? {
                // The programs may have opened the connection since the first round.
                if there.is_none_or(|it| it.seen != dialled.seen) {
                    opened.push(dialled.key());
                }
                continue;
            }
            // A flow without room is left out, but those behind it may be there already.
            if (there.is_some() || has_room) && self.copy_entries(&dialled)? {
                copied.may_give_way.push_back(dialled.key());
            } else {
                has_room = false;
                copied.is_cut_short = true;
            }
        }
        for key in opened {
            self.copy_flow(&key, &mut copied)?;
        }
        Ok(copied)
    }

    /// Copies a flow, given the key of the entry by which it begins, if it still exists. If the new map is full, the flow takes
    /// the place of others that are no open connections.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written.
    pub fn copy_flow(&self, key: &FlowKey, copied: &mut CopiedFlows) -> Result<(), SweepError> {
        let Some(dialled) = self.old.find(key)?.filter(begins) else {
            return Ok(());
        };
        while !self.copy_entries(&dialled)? {
            copied.is_cut_short = true;
            let Some(other) = copied.may_give_way.pop_front() else {
                return Ok(());
            };
            self.remove_unless_open(&other)?;
        }
        if !is_open(self.old, &dialled)? {
            copied.may_give_way.push_back(dialled.key());
        }
        Ok(())
    }

    /// Copies the entries of a flow, that by which it begins last: all of them, or none. Returns false if the new map is full.
    fn copy_entries(&self, dialled: &Flow) -> Result<bool, SweepError> {
        if self.is_new_used
            && let Some(there) = self.new.find(&dialled.key())?.filter(begins)
            && state(self.new, &there)? >= state(self.old, dialled)?
        {
            return Ok(true);
        }
        let entries = entries_of(self.old, dialled)?;
        for (number, entry) in entries.iter().rev().enumerate() {
            if !self.new.write(entry)? {
                for written in entries.iter().rev().take(number) {
                    self.new.remove(&written.key())?;
                }
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Removes the flows from the new map that are not in the old one any more, or have ended there.
    fn remove_ended(&self) -> Result<(), SweepError> {
        let mut ended = Vec::new();
        for flow in entries(self.new) {
            let key = flow?.key();
            let original = self.old.find(&key)?;
            if original.is_none_or(|flow| flow.flags & Flow::ENDED != 0) {
                ended.push(key);
            }
        }
        ended.iter().try_for_each(|key| Ok(self.new.remove(key)?))
    }

    /// Removes the next flow from the new map that is no open connection. Returns false if there is none. `others` yields the
    /// entries of the new map.
    fn remove_next(
        &self,
        others: &mut impl Iterator<Item = Result<Flow, ReadError>>,
    ) -> Result<bool, SweepError> {
        for flow in others {
            let flow = flow?;
            if flow.role == Role::DIALLED && self.remove_unless_open(&flow.key())? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// Removes a flow from the new map, unless it has become an open connection. Returns true if it was there.
    fn remove_unless_open(&self, key: &FlowKey) -> Result<bool, SweepError> {
        if let Some(dialled) = self.old.find(key)?
            && is_open(self.old, &dialled)?
        {
            return Ok(false);
        }
        let Some(dialled) = self.new.find(key)? else {
            return Ok(false);
        };
        if self.is_new_used && is_open(self.new, &dialled)? {
            return Ok(false);
        }
        for entry in entries_of(self.new, &dialled)? {
            self.new.remove(&entry.key())?;
        }
        Ok(true)
    }
}

/// Returns true if an entry is that by which a flow begins, and has not ended.
fn begins(entry: &Flow) -> bool {
    entry.role == Role::DIALLED && entry.flags & Flow::ENDED == 0
}

/// Returns the time of the last packet of a flow, and true if the flow is an open connection.
fn state<M: FlowMap>(map: &M, dialled: &Flow) -> Result<(u32, bool), ReadError> {
    let forwarded = entry_of(map, dialled, Role::FORWARDED)?;
    let last_used = Activity::of(dialled, forwarded.as_ref()).last_used;
    Ok((last_used, is_open(map, dialled)?))
}

/// Returns all entries of a flow, beginning with the given one.
fn entries_of<M: FlowMap>(map: &M, dialled: &Flow) -> Result<Vec<Flow>, ReadError> {
    let mut entries = vec![*dialled];
    for role in [Role::FORWARDED, Role::MASQUERADED] {
        let last = entries.last().unwrap_or(dialled);
        entries.extend(entry_of(map, last, role)?);
    }
    Ok(entries)
}

#[cfg(test)]
mod tests {
    use tunnel_common::{
        addr::Protocol,
        flow::{Seen, Timeouts},
    };

    use super::*;
    use crate::flows::{
        fixture::{MemoryFlows, acknowledged, answered, dialled},
        sweep,
    };

    /// Inserts a connection with a port of the client, which is open or has only begun.
    fn connect(map: &MemoryFlows, port: u16, is_open: bool) -> FlowKey {
        let (of_client, of_backend) = if is_open {
            (acknowledged(), answered())
        } else {
            (Seen::NOTHING, Seen::NOTHING)
        };
        let client = format!("203.0.113.9:{port}");
        let flow = dialled(&client, Protocol::TCP, 1, of_client);
        map.insert_all(flow, 1, of_backend);
        flow.key()
    }

    /// Returns a map with three connections that have only begun.
    fn three_begun() -> MemoryFlows {
        let map = MemoryFlows::default();
        for port in [20, 21, 22] {
            connect(&map, port, false);
        }
        map
    }

    fn numbers(map: &MemoryFlows) -> (usize, usize) {
        let counts = sweep(map, &Timeouts::DEFAULT, 1).expect("in memory");
        (counts.by_phase.values().sum(), counts.entries)
    }

    #[test]
    fn all_flows_that_may_give_way_are_known_although_new_ones_have_no_room() {
        let (old, new) = (three_begun(), MemoryFlows::with_capacity(9));
        let copy = FlowCopy {
            old: &old,
            new: &new,
            is_new_used: false,
        };
        let copied = copy.copy_all().expect("in memory");
        assert!(!copied.is_cut_short);

        // It comes before the others, and there is no room for it.
        connect(&old, 10, false);
        let copied = copy.copy_all().expect("in memory");
        assert!(copied.is_cut_short);
        assert_eq!(copied.may_give_way.len(), 3);
        assert_eq!(numbers(&new), (3, 9));
    }

    #[test]
    fn open_connections_take_the_place_of_others_whenever_they_have_been_opened() {
        let (old, new) = (three_begun(), MemoryFlows::with_capacity(9));
        let copy = FlowCopy {
            old: &old,
            new: &new,
            is_new_used: false,
        };
        copy.copy_all().expect("in memory");

        let open = [10, 11].map(|port| connect(&old, port, true));
        let mut copied = copy.copy_all().expect("in memory");
        // So do queries that begin while the others are copied.
        let query = connect(&old, 30, false);
        copy.copy_flow(&query, &mut copied).expect("in memory");
        assert!(new.find(&query).expect("in memory").is_some());
        let last = connect(&old, 12, true);
        copy.copy_flow(&last, &mut copied).expect("in memory");
        for key in open.into_iter().chain([last]) {
            assert!(new.find(&key).expect("in memory").is_some());
        }
        assert_eq!(numbers(&new), (3, 9));

        // None of them gives way to another one.
        let other = connect(&old, 13, true);
        copy.copy_flow(&other, &mut copied).expect("in memory");
        assert!(new.find(&other).expect("in memory").is_none());
        assert_eq!(numbers(&new), (3, 9));
    }

    #[test]
    fn flows_that_have_ended_meanwhile_make_room() {
        let new = MemoryFlows::with_capacity(3);
        for port in [20, 21] {
            let old = MemoryFlows::default();
            let key = connect(&old, port, false);
            let copied = FlowCopy {
                old: &old,
                new: &new,
                is_new_used: false,
            };
            let copied = copied.copy_all().expect("in memory");
            assert!(!copied.is_cut_short);
            assert_eq!(copied.may_give_way, [key]);
        }
    }

    #[test]
    fn flows_of_a_map_that_is_in_use_are_kept_and_open_ones_give_way_to_none() {
        let (old, new) = (MemoryFlows::default(), MemoryFlows::with_capacity(9));
        let keys = [20, 21].map(|port| connect(&old, port, true));
        // The first one has been opened by a program that uses the old map, and another one by one that uses the new map.
        connect(&new, 20, false);
        let begun = connect(&new, 22, true);
        let copy = FlowCopy {
            old: &old,
            new: &new,
            is_new_used: true,
        };
        let mut copied = copy.copy_all().expect("in memory");
        for key in keys.into_iter().chain([begun]) {
            assert!(new.find(&key).expect("in memory").is_some());
        }
        let opened = new.find(&keys[0]).expect("in memory");
        assert_eq!(opened.map(|flow| flow.seen), Some(acknowledged()));

        // A copy that was used later is kept.
        let later = dialled("203.0.113.9:21", Protocol::TCP, 2, acknowledged());
        new.insert_all(later, 2, answered());
        copy.copy_flow(&keys[1], &mut copied).expect("in memory");
        let kept = new.find(&keys[1]).expect("in memory");
        assert_eq!(kept.map(|flow| flow.last_used), Some(2));

        let other = connect(&old, 23, true);
        copy.copy_flow(&other, &mut copied).expect("in memory");
        assert!(new.find(&begun).expect("in memory").is_some());
        assert_eq!(numbers(&new).1, 9);
    }
}
