//! The flows of translated packets, as the daemon sees them. The kernel programs begin and judge flows by themselves; the
//! daemon counts and lists them, and removes those that are over.
//!
//! - `sweep`: counts flows, and removes those that are over
//! - `list`: lists flows
//! - `make_room`: removes idle flows from a map that is almost full
//! - `copy`: copies flows to a map of another size
//! - `sweeper`: sweeps from time to time, and reports when the map is full

mod copy;
mod list;
mod make_room;
mod sweep;
mod sweeper;

use std::{iter, net::SocketAddr, ops::Deref};

use tunnel_common::{
    addr::{Address, Port, Protocol},
    flow::{Endpoint, Flow, FlowKey, Phase, Role, Seen},
};

pub use self::{
    copy::{CopiedFlows, FlowCopy, WritableFlowMap},
    list::{FlowFilter, FlowView, list},
    sweep::{FlowCounts, SweepError, sweep},
    sweeper::{FlowSenders, FlowSweeper, FlowsView, SweeperSettings},
};
use crate::{
    clock::monotonic,
    reconcile::{ReadError, WriteError},
};

/// Reads and removes the entries of the map `flows`. `bpf` implements it for the kernel's map.
pub trait FlowMap: Send + Sync + 'static {
    /// Returns the maximum number of entries.
    fn capacity(&self) -> u32;

    /// Reads some entries, beginning at a position that an earlier call has returned. Also returns the next position, or
    /// `None` after the last entry. Entries that are inserted or removed meanwhile may be left out.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read.
    fn read_some(&self, position: Option<u32>) -> Result<(Vec<Flow>, Option<u32>), ReadError>;

    /// Reads the entry with a key, if there is one.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read.
    fn find(&self, key: &FlowKey) -> Result<Option<Flow>, ReadError>;

    /// Removes the entry with a key, if there is one.
    ///
    /// # Errors
    ///
    /// Returns an error if the entry can't be removed.
    fn remove(&self, key: &FlowKey) -> Result<(), WriteError>;
}

/// Returns what a client has dialled to reach a backend over TCP, if its packets are translated. `client` is the client as
/// the backend sees it.
///
/// # Errors
///
/// Returns an error if the map can't be read.
pub fn dialled_by(
    map: &impl FlowMap,
    client: SocketAddr,
    backend: SocketAddr,
) -> Result<Option<SocketAddr>, ReadError> {
    let [client, backend] = [client, backend]
        .map(|it| Endpoint::new(Address::from_ip(it.ip()), Port::from_host(it.port())));
    let entry = map.find(&FlowKey::forwarded(client, backend, Protocol::TCP))?;
    let entry = entry.filter(|entry| {
        entry.flags & Flow::ENDED == 0
            && entry.client.address == client.address
            && entry.backend.is(&backend)
    });
    Ok(entry.map(|Flow { frontend, .. }| {
        SocketAddr::new(frontend.address.to_ip(), frontend.port.to_host())
    }))
}

/// Returns all entries of a map. They are read while the iterator is used, some at a time. The iterator ends after an error.
pub fn entries<P>(map: P) -> impl Iterator<Item = Result<Flow, ReadError>>
where
    P: Deref<Target: FlowMap>,
{
    let mut position = Some(None);
    let batches = iter::from_fn(move || {
        let batch = map.read_some(position?);
        position = match &batch {
            Ok((_, next)) => next.map(Some),
            Err(_) => None,
        };
        Some(batch)
    });
    batches.flat_map(|batch| {
        let (flows, error) = match batch {
            Ok((flows, _)) => (flows, None),
            Err(error) => (Vec::new(), Some(Err(error))),
        };
        flows.into_iter().map(Ok).chain(error)
    })
}

/// Returns the time of the monotonic clock in seconds, as the programs store it in flows.
#[must_use]
pub fn now() -> u32 {
    u32::try_from(monotonic().as_secs()).unwrap_or(u32::MAX)
}

/// Returns the entry with a role of the flow that an entry belongs to, if it belongs to the same flow.
pub(crate) fn entry_of<M: FlowMap + ?Sized>(
    map: &M,
    of: &Flow,
    role: Role,
) -> Result<Option<Flow>, ReadError> {
    let found = map.find(&of.key_of(role))?;
    Ok(found.filter(|found| found.has_ends_of(of) && found.role == role))
}

/// Returns true if a flow is an open connection, which never gives way to another flow. `dialled` is the entry for packets
/// from the client.
///
/// # Errors
///
/// Returns an error if the map can't be read.
pub fn is_open<M: FlowMap + ?Sized>(map: &M, dialled: &Flow) -> Result<bool, ReadError> {
    if !dialled.protocol.has_connections() {
        return Ok(false);
    }
    let forwarded = entry_of(map, dialled, Role::FORWARDED)?;
    let seen = Activity::of(dialled, forwarded.as_ref()).seen;
    let phase = seen.phase(dialled.protocol);
    Ok(matches!(phase, Phase::Established | Phase::HalfClosed))
}

/// The events that the packets of both directions have shown, and the time of the last one.
#[derive(Clone, Copy, Debug)]
struct Activity {
    seen: Seen,
    last_used: u32,
}

impl Activity {
    /// Returns the activity of a flow, given the entry for packets from the client, and the forwarded one.
    fn of(dialled: &Flow, forwarded: Option<&Flow>) -> Self {
        let own = Self {
            seen: dialled.seen,
            last_used: dialled.last_used,
        };
        forwarded.map_or(own, |forwarded| Self {
            seen: own.seen.union(forwarded.seen),
            last_used: own.last_used.max(forwarded.last_used),
        })
    }
}

#[cfg(test)]
mod fixture;
