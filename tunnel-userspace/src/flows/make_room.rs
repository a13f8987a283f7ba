//! Makes room in a map of flows that is almost full. The programs do this by themselves, but they compare only recent flows:
//! in a large map, they may end one that is used, while others that are idle remain.

use std::collections::BTreeMap;

use tunnel_common::{
    flow::{Endpoint, Flow, Role},
    forward::reclaim::{self, Rank},
};

use super::{
    Activity, FlowCounts, FlowMap, SweepError, entries, entry_of,
    sweep::{Clock, remove_flow},
};

/// The percentage of a map's entries from which on room is made, and the one that remains.
const ALMOST_FULL: usize = 95;
const REMAINING: usize = 90;
/// The time in seconds for which a flow must have been idle.
const IDLE: u32 = 5;

/// Returns the number of entries that are too many for a map of this capacity, or `None` if the map has enough room.
pub(super) fn excess(entries: usize, capacity: u32) -> Option<usize> {
    let capacity = usize::try_from(capacity).unwrap_or(usize::MAX);
    let share = |percent| capacity.saturating_mul(percent) / 100;
    (entries > share(ALMOST_FULL)).then(|| entries - share(REMAINING))
}

/// The order in which flows give way: by their rank, and the longest idle ones of a rank first.
type Class = (Rank, u32);

/// Removes at least this many entries, or all those of flows that may give way. Returns the number of removed flows.
///
/// # Errors
///
/// Returns an error if the map can't be read or written.
pub(super) fn make_room<M: FlowMap>(
    map: &M,
    clock: Clock<'_>,
    excess: usize,
) -> Result<u64, SweepError> {
    // Only numbers are kept, because the flows may be very many.
    let mut sizes = BTreeMap::<Class, usize>::new();
    for flow in entries(map) {
        if let Some(idle) = IdleFlow::find(map, clock, &flow?)? {
            *sizes.entry(idle.class).or_default() += idle.size();
        }
    }
    let mut room = 0;
    let last = sizes.into_iter().find_map(|(class, size)| {
        room += size;
        (room >= excess).then_some(class)
    });
    let mut counts = FlowCounts::default();
    let mut freed = 0;
    for flow in entries(map) {
        let flow = flow?;
        let Some(idle) = IdleFlow::find(map, clock, &flow)? else {
            continue;
        };
        if last.is_none_or(|last| idle.class <= last)
            && remove_flow(map, clock, (&flow, idle.forwarded.as_ref()), &mut counts)?
        {
            freed += idle.size();
            if freed >= excess {
                break;
            }
        }
    }
    Ok(counts.removed)
}

/// A flow that may give way.
struct IdleFlow {
    class: Class,
    forwarded: Option<Flow>,
}

impl IdleFlow {
    /// Returns the flow of an entry, unless the flow must not give way, or another of its entries is counted.
    fn find<M: FlowMap>(
        map: &M,
        (timeouts, now): Clock<'_>,
        entry: &Flow,
    ) -> Result<Option<Self>, SweepError> {
        if entry.role != Role::DIALLED {
            return Ok(None);
        }
        let forwarded = entry_of(map, entry, Role::FORWARDED)?;
        let Activity { seen, last_used } = Activity::of(entry, forwarded.as_ref());
        let whole = Flow {
            seen,
            last_used,
            ..*entry
        };
        let rank = reclaim::rank(&whole, timeouts, now);
        let is_idle = rank.is_idle() && now.saturating_sub(last_used) >= IDLE;
        Ok(is_idle.then_some(Self {
            class: (rank, last_used),
            forwarded,
        }))
    }

    /// Returns the number of the flow's entries.
    fn size(&self) -> usize {
        match &self.forwarded {
            Some(forwarded) if !forwarded.masquerade.is(&Endpoint::NONE) => 3,
            Some(_) => 2,
            None => 1,
        }
    }
}

#[cfg(test)]
mod tests {
    use tunnel_common::{
        addr::Protocol,
        flow::{Seen, Timeouts},
        packet::TcpFlags,
    };

    use super::*;
    use crate::flows::fixture::{MemoryFlows, acknowledged, answered, dialled};

    const NOW: u32 = 1_000_000;

    fn reset() -> Seen {
        Seen::from_client(TcpFlags::from_byte(0x04))
    }

    /// Returns the ports of the clients whose flows are left.
    fn left(map: &MemoryFlows) -> Vec<u16> {
        let flows = entries(map).map(|flow| flow.expect("a flow"));
        let dialled = flows.filter(|flow| flow.role == Role::DIALLED);
        dialled.map(|flow| flow.client.port.to_host()).collect()
    }

    fn map() -> MemoryFlows {
        let map = MemoryFlows::default();
        for (port, protocol, idle, of_client, of_backend) in [
            (1, Protocol::TCP, 3600, acknowledged(), answered()),
            (2, Protocol::UDP, 0, Seen::NOTHING, Seen::NOTHING),
            (3, Protocol::UDP, 60, Seen::later_than(0, 1), answered()),
            (4, Protocol::UDP, 50, Seen::NOTHING, answered()),
            (5, Protocol::UDP, 70, Seen::NOTHING, answered()),
            (6, Protocol::UDP, 20, Seen::NOTHING, Seen::NOTHING),
            (7, Protocol::TCP, 9, reset(), answered()),
            (8, Protocol::TCP, 4, reset(), answered()),
            (9, Protocol::UDP, 0, Seen::NOTHING, answered()),
        ] {
            let client = format!("203.0.113.9:{port}");
            let flow = dialled(&client, protocol, NOW - idle, of_client);
            map.insert_all(flow, NOW - idle, of_backend);
        }
        map
    }

    #[test]
    fn flows_give_way_by_rank_and_the_longest_idle_first() {
        for (excess, removed, expected) in [
            (1, 1, &[1, 2, 3, 4, 5, 6, 8, 9][..]),
            (3, 1, &[1, 2, 3, 4, 5, 6, 8, 9]),
            (4, 2, &[1, 2, 3, 4, 5, 8, 9]),
            (7, 3, &[1, 2, 3, 4, 8, 9]),
            (12, 4, &[1, 2, 3, 8, 9]),
            // Open connections, datagrams that last, those that wait for an answer, and flows in use are kept.
            (100, 4, &[1, 2, 3, 8, 9]),
        ] {
            let map = map();
            let count = make_room(&map, (&Timeouts::DEFAULT, NOW), excess).expect("done");

            assert_eq!((count, &*left(&map)), (removed, expected), "{excess}");
            assert_eq!(map.len(), 3 * expected.len());
        }
    }

    #[test]
    fn room_is_made_only_in_a_map_that_is_almost_full() {
        assert_eq!(excess(950, 1000), None);
        assert_eq!(excess(951, 1000), Some(51));
        assert_eq!(excess(0, 0), None);
        assert_eq!(excess(93, 97), Some(6));
    }
}
