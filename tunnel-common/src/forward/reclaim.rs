//! Makes room in a full map of flows. The programs do this by themselves, so that the map doesn't stay full while the
//! daemon is not running. Linux 5.10 can't iterate over a hash in a program, so the programs remember the keys of recent
//! flows.
//!
//! Open connections (TCP or SCTP) never give way. Other flows do, in the order of [`Rank`]. Datagrams that wait for an answer are kept
//! longer than those that have got one and to which nothing was added since: in a map that is full of the latter, each new query
//! would end one that is still on its way. Those that last are kept the longest, so that a flood ends none of them.

use super::{
    Flows, Role,
    steps::{copy_entry, find, learn_from},
};
use crate::flow::{Endpoint, Flow, FlowKey, Phase, Timeouts};

/// The number of recent flows whose keys are kept for each CPU.
pub const RECENT_FLOWS_OF_CPU: u32 = 1024;

/// The number of flows that are compared to find one that gives way. Half of them are the most recent ones, and half of them
/// are chosen at random; of both, half are of this CPU, and half of any CPU.
const CANDIDATES: u32 = 64;

/// The candidate if all flows must be kept.
const NONE: u64 = 0xffff_ffff << 32;

/// The time in seconds in which a handshake is expected to finish, and an answer to arrive.
const EXPECTED: u32 = 1;

/// The worth of a flow in a full map. The flow with the lowest rank gives way first: flows that are over, closed connections,
/// connections that stay half-open, datagrams without an answer, answered queries, what waits for an answer, and answered
/// datagrams in several seconds.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Rank(u32);

impl Rank {
    /// The rank of a flow that must not give way.
    const KEPT: Self = Self(u32::MAX);
    /// The rank of answered queries.
    const ANSWERED: Self = Self(5);

    /// Returns true if a flow with this rank may be removed although no other flow needs its room yet.
    #[must_use]
    pub fn is_idle(self) -> bool {
        self <= Self::ANSWERED
    }
}

/// Removes the flow that is the least worth keeping among some recent flows. Returns false if all of them must be kept.
#[inline(always)]
pub fn make_room<T: Flows + ?Sized>(maps: &T) -> bool {
    let mut best = NONE;
    for number in 0..CANDIDATES {
        best = maps.better_candidate(number, best);
    }
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "the lower half is the index"
    )]
    let index = best as u32;
    best < NONE && remove(maps, index)
}

/// Compares the candidate with this number with the best one so far, and returns the one that gives way first. A candidate is
/// a word: the rank in the upper half, and the index of a recent flow in the lower one. The caller's loop has no branch,
/// because older verifiers would follow both of its ways in each iteration.
#[inline(always)]
pub fn better_candidate<T: Flows + ?Sized>(maps: &T, number: u32, best: u64) -> u64 {
    // Among flows of one rank, the first one that is found gives way, so the search begins with older ones.
    let age = if number < CANDIDATES / 2 {
        maps.random() % RECENT_FLOWS_OF_CPU
    } else {
        (CANDIDATES - 1 - number) / 2
    };
    let index = maps.recent_index(number & 1 == 1, age);
    let rank = u64::from(rank_of_recent(maps, index).0) << 32;
    if rank < best & NONE {
        rank | u64::from(index)
    } else {
        best
    }
}

/// Returns the rank of the recent flow at an index.
#[inline(always)]
fn rank_of_recent<T: Flows + ?Sized>(maps: &T, index: u32) -> Rank {
    let rank = maps.with_run(|run| {
        let Some(key) = maps.recent_flow(index) else {
            return Rank::KEPT;
        };
        let (flow, sibling) = (&mut run.candidate, &mut run.other);
        if !copy_entry(maps, key, flow) {
            return Rank::KEPT;
        }
        // The replies of the backend meet this entry.
        learn_from(maps, flow, Role::FORWARDED, (sibling, &mut run.key));
        // The flow that needs room is a recent one, too.
        if flow.has_ends_of(&run.flow) {
            return Rank::KEPT;
        }
        rank(flow, &maps.timeouts(), run.now)
    });
    rank.unwrap_or(Rank::KEPT)
}

/// Returns the rank of a flow, given an entry with what all of its entries have seen.
#[inline(always)]
#[must_use]
pub const fn rank(flow: &Flow, timeouts: &Timeouts, now: u32) -> Rank {
    if flow.is_unused(timeouts, now) {
        return Rank(0);
    }
    // Another CPU may have used the flow in a second that has just begun.
    let is_recent = now.saturating_sub(flow.last_used) <= EXPECTED;
    match (flow.seen.phase(flow.protocol), is_recent) {
        (Phase::Closed, _) => Rank(1),
        (Phase::Closing, _) => Rank(2),
        (Phase::HalfOpen, false) => Rank(3),
        (Phase::Unanswered, false) => Rank(4),
        (Phase::Answered, _) if !flow.seen.is_lasting() => Rank::ANSWERED,
        (Phase::Unanswered | Phase::HalfOpen, true) => Rank(6),
        (Phase::Answered, _) => Rank(7),
        (Phase::HalfClosed | Phase::Established, _) => Rank::KEPT,
    }
}

/// Removes all entries of the recent flow at an index.
#[inline(always)]
fn remove<T: Flows + ?Sized>(maps: &T, index: u32) -> bool {
    let is_removed = maps.with_run(|run| {
        let key = maps.recent_flow(index)?;
        let (dialled, other) = (&mut run.candidate, &mut run.other);
        if !copy_entry(maps, key, dialled) {
            return None;
        }
        remove_others(maps, dialled, (other, &mut run.key));
        Some(maps.remove_flow(key))
    });
    is_removed.flatten().unwrap_or(false)
}

/// Removes the entries of a flow other than the dialled one.
#[inline(always)]
fn remove_others<T: Flows + ?Sized>(
    maps: &T,
    dialled: &Flow,
    (other, key): (&mut Flow, &mut FlowKey),
) {
    dialled.set_key(Role::FORWARDED, key);
    if find(maps, key, other).is_none() || !other.has_ends_of(dialled) {
        return;
    }
    maps.remove_flow(key);
    if !other.masquerade.is(&Endpoint::NONE) {
        other.set_key(Role::MASQUERADED, key);
        // The port may belong to another flow by now.
        if copy_entry(maps, key, other) && other.has_ends_of(dialled) {
            maps.remove_flow(key);
        }
    }
}
