//! Counts flows, and removes those that are over. A program can begin a flow under the key of one that is over at any time,
//! so an entry is read again right before it is removed.

use std::collections::BTreeMap;

use tunnel_common::flow::{Endpoint, Flow, Phase, Role, Timeouts};

use super::{Activity, FlowMap, entries, entry_of};
use crate::reconcile::{ReadError, WriteError};

/// An error that can occur during a sweep.
#[derive(Debug, thiserror::Error)]
pub enum SweepError {
    /// The map can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// An entry can't be removed.
    #[error(transparent)]
    Write(#[from] WriteError),
}

/// The timeouts, and the time of the monotonic clock in seconds.
pub(super) type Clock<'a> = (&'a Timeouts, u32);

/// The numbers of flows and of their entries.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct FlowCounts {
    /// The number of flows in each phase.
    pub by_phase: BTreeMap<Phase, usize>,
    /// The number of entries that remain. A flow has two or three.
    pub entries: usize,
    /// The number of flows whose packets are translated on links that lead to pods.
    pub on_pod_links: usize,
    /// The number of flows whose client is this host.
    pub of_host: usize,
    /// The number of flows that were removed.
    pub removed: u64,
}

/// Counts the flows, and removes those that have been idle for longer than their phase allows. `now` is the time of the
/// monotonic clock in seconds.
///
/// # Errors
///
/// Returns an error if the map can't be read or written.
pub fn sweep<M: FlowMap>(map: &M, timeouts: &Timeouts, now: u32) -> Result<FlowCounts, SweepError> {
    let mut counts = FlowCounts::default();
    for flow in entries(map) {
        let flow = flow?;
        counts.entries += 1;
        if flow.role == Role::DIALLED {
            sweep_flow(map, (timeouts, now), &flow, &mut counts)?;
        } else if flow.is_unused(timeouts, now) && is_left_over(map, &flow)? {
            remove(map, (timeouts, now), &flow, &mut counts)?;
        }
    }
    Ok(counts)
}

/// Returns true if an unused entry, which is not the dialled one, belongs to a flow that is gone: no flow has the same client and
/// frontend, or one that uses another backend or port now. Entries of a flow that has them are removed with the dialled one.
fn is_left_over<M: FlowMap>(map: &M, entry: &Flow) -> Result<bool, ReadError> {
    let Some(dialled) = entry_of(map, entry, Role::DIALLED)? else {
        return Ok(true);
    };
    let is_replaced =
        !dialled.backend.is(&entry.backend) || dialled.forwarded_port != entry.forwarded_port;
    if is_replaced || entry.role != Role::MASQUERADED {
        return Ok(is_replaced);
    }
    // The next connection to the same backend may have another port of the node.
    let forwarded = entry_of(map, entry, Role::FORWARDED)?;
    Ok(forwarded.is_none_or(|it| !it.masquerade.is(&entry.masquerade)))
}

/// Counts a flow, or removes its entries if it is over.
fn sweep_flow<M: FlowMap>(
    map: &M,
    clock: Clock<'_>,
    dialled: &Flow,
    counts: &mut FlowCounts,
) -> Result<(), SweepError> {
    let (timeouts, now) = clock;
    let forwarded = entry_of(map, dialled, Role::FORWARDED)?;
    let Activity { seen, last_used } = Activity::of(dialled, forwarded.as_ref());
    let phase = seen.phase(dialled.protocol);
    if dialled.flags & Flow::ENDED == 0 && !timeouts.is_over(phase, last_used, now) {
        *counts.by_phase.entry(phase).or_default() += 1;
        let flags = dialled.flags | forwarded.map_or(0, |forwarded| forwarded.flags);
        counts.on_pod_links += usize::from(flags & Flow::ON_POD_LINKS != 0);
        counts.of_host += usize::from(flags & Flow::OF_HOST != 0);
        return Ok(());
    }
    remove_flow(map, clock, (dialled, forwarded.as_ref()), counts).map(drop)
}

/// Removes the entries of a flow, unless a packet has used it since it was read. Returns true if they were removed.
pub(super) fn remove_flow<M: FlowMap>(
    map: &M,
    clock: Clock<'_>,
    (dialled, forwarded): (&Flow, Option<&Flow>),
    counts: &mut FlowCounts,
) -> Result<bool, SweepError> {
    // The entry by which the client's packets are found goes first, so that none is sent to the other entries. While it
    // remains, they are needed.
    if !remove(map, clock, dialled, counts)? {
        return Ok(false);
    }
    counts.removed += 1;
    let Some(forwarded) = forwarded else {
        return Ok(true);
    };
    remove(map, clock, forwarded, counts)?;
    if !forwarded.masquerade.is(&Endpoint::NONE)
        && let Some(masqueraded) = entry_of(map, forwarded, Role::MASQUERADED)?
    {
        remove(map, clock, &masqueraded, counts)?;
    }
    Ok(true)
}

/// Removes an entry, unless another flow has taken its key, or a packet has used it since it was read. Returns true if it was
/// removed.
fn remove<M: FlowMap>(
    map: &M,
    (timeouts, now): Clock<'_>,
    entry: &Flow,
    counts: &mut FlowCounts,
) -> Result<bool, SweepError> {
    let key = entry.key();
    let current = map.find(&key)?;
    let is_same = current.is_some_and(|current| {
        // A flow with the same ends may have taken the key of one that has ended.
        current.has_ends_of(entry)
            && current.flags & Flow::ENDED == entry.flags & Flow::ENDED
            && (current.last_used == entry.last_used || current.is_unused(timeouts, now))
    });
    if is_same {
        map.remove(&key)?;
        counts.entries = counts.entries.saturating_sub(1);
    }
    Ok(is_same)
}

#[cfg(test)]
mod tests;
