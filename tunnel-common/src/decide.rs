//! Chooses the backend for a frontend, over any [`Maps`]: those in the kernel, or a copy in memory.
//!
//! 1. [`front`] looks up the record of an address and port. It skips frontends that are not for sockets,
//!    and loopback frontends outside the host's network namespace.
//! 2. [`backend`] checks the client against the source ranges, takes the set for the kind of [`Traffic`],
//!    and chooses from it by affinity or algorithm.
//! 3. [`held`] returns the backend of an existing UDP flow, if the flow may keep it.
//!
//! All functions are inlined. A program that is too large for the verifier overrides [`Maps::place`],
//! [`Maps::kept`] and [`Maps::is_among`] to call them as separate functions.

mod choice;
mod maps;

use core::convert::Infallible;

pub use self::{
    choice::{kept, place},
    maps::{Asker, Caller, Kept, Maps, Record, Traffic},
};
use crate::{
    addr::{Address, Port},
    affinity::Client,
    lookup::{Lookup, look_up},
    origin::Origin,
    reason::Reason,
    select,
    service::{Algorithm, Backend, Front, FrontKey, State},
};

/// Looks up the frontend of a key, if it serves this kind of traffic.
#[inline(always)]
pub fn front<'a, T: Maps + ?Sized>(
    maps: &'a T,
    asker: &impl Asker,
    key: &FrontKey,
    traffic: Traffic,
) -> Lookup<Record<'a>> {
    let Ok::<_, Infallible>(found) = look_up(
        key,
        |key| Ok(maps.front_index(key)),
        |index| Ok(maps.front(index)),
    );
    match found {
        Lookup::Found((index, front)) => {
            if traffic == Traffic::Sockets && front.flags & Front::NOT_SOCKETS != 0 {
                return Lookup::None;
            }
            // Each network namespace has its own loopback, and only the host's has frontends. A socket
            // that is bound to loopback has no route to a backend.
            let is_v4 = key.address.is_v4();
            if key.address.is_loopback()
                && (asker.is_bound_to_loopback(is_v4) || !asker.is_known_host())
            {
                return Lookup::None;
            }
            Lookup::Found(Record { index, front })
        }
        Lookup::None => Lookup::None,
        Lookup::Unstable => Lookup::Unstable,
    }
}

/// The chosen backend.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Choice {
    /// The index of the backend.
    pub index: u32,
    /// The address of the backend.
    pub address: Address,
    /// The port of the backend.
    pub port: Port,
    /// [`Reason::Translated`], or [`Reason::TranslatedAffinity`] if the client kept its backend.
    pub reason: Reason,
}

/// The cause for which no backend was chosen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NoChoice {
    /// The client is outside the source ranges of the frontend.
    Refused,
    /// The frontend has source ranges, and the address of the client is unknown.
    Unknown,
    /// The Service has no backends.
    Empty,
    /// The Service has backends, but none in the set for this traffic.
    Elsewhere,
    /// The index of the record, slot or backend is out of range.
    Broken,
}

impl NoChoice {
    /// Returns the reason to count.
    #[inline(always)]
    #[must_use]
    pub const fn reason(self) -> Reason {
        match self {
            Self::Refused => Reason::SourceRangeDenied,
            Self::Unknown => Reason::ClientAddressUnknown,
            Self::Empty => Reason::NoBackend,
            Self::Elsewhere => Reason::NoLocalBackend,
            Self::Broken => Reason::RecordInvalid,
        }
    }

    /// Returns true if kube-proxy drops the packets in this case. The caller then sees an unreachable
    /// destination, otherwise a refused connection.
    #[inline(always)]
    #[must_use]
    pub const fn is_drop(self) -> bool {
        match self {
            Self::Refused | Self::Unknown | Self::Elsewhere => true,
            Self::Empty | Self::Broken => false,
        }
    }
}

/// Chooses a backend for a new connection or flow to a frontend.
///
/// # Errors
///
/// The client may not use the frontend, or the frontend has no backend for this traffic.
#[inline(always)]
pub fn backend<T: Maps + ?Sized>(
    maps: &T,
    asker: &impl Asker,
    key: &FrontKey,
    record: Record<'_>,
    traffic: Traffic,
) -> Result<Choice, NoChoice> {
    let front = record.front;
    // Taken from the key: in the IPv4 hooks, the compiler then knows the family.
    let is_v4 = key.address.is_v4();
    let caller = if depends_on_client(front) {
        asker.caller(is_v4)
    } else {
        Caller::NONE
    };
    if front.sources.len != 0 {
        admit(maps, asker, front, is_v4, caller)?;
    }
    choose(maps, record, traffic, caller)
}

/// Returns true if the choice depends on the client.
#[inline(always)]
fn depends_on_client(front: &Front) -> bool {
    front.affinity != 0 || front.sources.len != 0 || front.algorithm.is_by_client()
}

/// Checks the client against the source ranges of the frontend. Other clients can't reach the frontend:
/// kube-proxy drops their packets (`pkg/proxy/nftables/proxier.go`, `firewall-ips`).
#[inline(always)]
fn admit<T: Maps + ?Sized>(
    maps: &T,
    asker: &impl Asker,
    front: &Front,
    is_v4: bool,
    caller: Caller,
) -> Result<(), NoChoice> {
    let is_decided = front.flags & Front::HOST_UNKNOWN == 0;
    let is_bound = asker.is_bound(is_v4);
    let may = if !is_bound && is_decided && asker.is_known_host() {
        // The planner has already checked the addresses of the host.
        front.flags & Front::ADMITS_HOST != 0
    } else if caller.kind == Client::ADDRESS {
        maps.is_among(front.sources, [caller.upper, caller.lower])
    } else {
        return Err(NoChoice::Unknown);
    };
    if may { Ok(()) } else { Err(NoChoice::Refused) }
}

#[inline(always)]
fn choose<T: Maps + ?Sized>(
    maps: &T,
    record: Record<'_>,
    traffic: Traffic,
    caller: Caller,
) -> Result<Choice, NoChoice> {
    let front = record.front;
    let set = traffic.set(front);
    if set.len == 0 {
        return Err(if front.flags & Front::HAS_ENDPOINTS == 0 {
            NoChoice::Empty
        } else {
            NoChoice::Elsewhere
        });
    }
    if front.affinity != 0 {
        let kept = maps.kept(record, traffic, caller);
        let Kept { index, is_old } = kept.ok_or(NoChoice::Broken)?;
        let reason = if is_old {
            Reason::TranslatedAffinity
        } else {
            Reason::Translated
        };
        return of_index(maps, index, reason);
    }
    // The common case avoids the cost of a function call.
    let place = if set.len == 1 || front.algorithm == Algorithm::RANDOM {
        select::place(set, maps.random())
    } else {
        maps.place(record, traffic, caller)
    };
    let place = place.ok_or(NoChoice::Broken)?;
    if traffic.is_near(front) {
        let near = maps.near(front, place).ok_or(NoChoice::Broken)?;
        return Ok(Choice {
            index: near.index,
            address: near.address,
            port: near.port,
            reason: Reason::Translated,
        });
    }
    let slot = maps.slot(set.base.wrapping_add(place));
    let slot = slot.ok_or(NoChoice::Broken)?;
    of_index(maps, slot.backend, Reason::Translated)
}

#[inline(always)]
fn of_index<T: Maps + ?Sized>(maps: &T, index: u32, reason: Reason) -> Result<Choice, NoChoice> {
    let backend = maps.backend(index).ok_or(NoChoice::Broken)?;
    Ok(Choice {
        index,
        address: backend.address,
        port: backend.port,
        reason,
    })
}

/// Returns the state of a backend, or the state of an unused index if the backend does not exist.
#[inline(always)]
pub fn state<T: Maps + ?Sized>(maps: &T, index: u32) -> State {
    match maps.backend(index) {
        Some(backend) => maps.state(backend),
        None => State::default(),
    }
}

/// Returns the backend of a UDP flow, if the flow may keep it: the backend belongs to the service port
/// of the frontend, and [`select::is_sticky`] returns true.
#[inline(always)]
pub fn held<'a, T: Maps + ?Sized>(
    maps: &'a T,
    front: &Front,
    flow: &Origin,
    now: u64,
) -> Option<&'a Backend> {
    let backend = maps.backend(flow.index)?;
    let holds = backend.service == front.service
        && select::is_sticky(flow, front.service, maps.state(backend), now);
    holds.then_some(backend)
}

#[cfg(test)]
pub(crate) mod tests;
