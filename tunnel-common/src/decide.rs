//! Chooses the backend for a frontend, using any implementation of [`Maps`]: the maps in the kernel, or a
//! copy in memory.
//!
//! 1. [`find_frontend`] looks up the record for an address and port. It skips frontends that don't serve
//!    sockets, and loopback frontends outside the host's network namespace.
//! 2. [`choose_backend`] checks the client against the source ranges, takes the backend set for the kind of
//!    [`Traffic`], and chooses from the set by session affinity or by the algorithm.
//! 3. [`flow_backend`] returns the backend of an existing UDP flow, if the flow may keep it.
//!
//! All functions are inlined. If that makes a program too large for the verifier, the program overrides
//! [`Maps::choose_offset`], [`Maps::choose_by_affinity`] and [`Maps::is_in_source_ranges`] so that they call
//! separate functions.

mod algorithms;
mod maps;

use core::convert::Infallible;

pub use self::{
    algorithms::{choose_by_affinity, choose_offset},
    maps::{AffinityChoice, ClientContext, ClientScalars, FrontendRecord, Identity, Maps, Traffic},
};
use crate::{
    addr::{Address, Port},
    affinity::Client,
    lookup::{Lookup, look_up},
    origin::Origin,
    reason::Reason,
    select,
    service::{Algorithm, Backend, BackendState, Frontend, FrontendKey},
};

/// Looks up the frontend with this key. A frontend that doesn't serve this kind of traffic is treated as
/// absent.
#[inline(always)]
pub fn find_frontend<'a, T: Maps + ?Sized>(
    maps: &'a T,
    context: &impl ClientContext,
    key: &FrontendKey,
    traffic: Traffic,
) -> Lookup<FrontendRecord<'a>> {
    let Ok::<_, Infallible>(found) = look_up(
        key,
        |key| Ok(maps.frontend_index(key)),
        |index| Ok(maps.frontend(index)),
    );
    match found {
        Lookup::Found((index, frontend)) => {
            let is_left_alone = match traffic {
                Traffic::Sockets => frontend.flags & Frontend::NOT_SOCKETS != 0,
                Traffic::Packets | Traffic::PodPackets => {
                    frontend.packet_flags & Frontend::NOT_PACKETS != 0
                }
            };
            if is_left_alone {
                return Lookup::None;
            }
            // Each network namespace has its own loopback interface, and only the host's has frontends. A
            // socket bound to a loopback address has no route to a backend.
            let is_v4 = key.address.is_v4();
            if key.address.is_loopback()
                && (context.is_bound_to_loopback(is_v4) || !context.is_known_host())
            {
                return Lookup::None;
            }
            Lookup::Found(FrontendRecord { index, frontend })
        }
        Lookup::None => Lookup::None,
        Lookup::Unstable => Lookup::Unstable,
    }
}

/// The backend chosen for a connection or UDP flow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Choice {
    /// The index of the backend in the array `backends`.
    pub index: u32,
    /// The address of the backend.
    pub address: Address,
    /// The port of the backend.
    pub port: Port,
    /// [`Reason::Translated`], or [`Reason::TranslatedAffinity`] if session affinity kept the client's
    /// backend.
    pub reason: Reason,
}

/// The reason why no backend could be chosen.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NoChoice {
    /// The client is outside the frontend's source ranges.
    ClientDenied,
    /// The frontend has source ranges, but the client's address is unknown.
    ClientUnknown,
    /// The Service has no backends.
    NoBackend,
    /// The Service has backends, but the set for this traffic is empty.
    NoLocalBackend,
    /// The index of a record, slot or backend is out of range.
    InvalidRecord,
}

impl NoChoice {
    /// Returns the reason under which the failure is counted.
    #[inline(always)]
    #[must_use]
    pub const fn reason(self) -> Reason {
        match self {
            Self::ClientDenied => Reason::SourceRangeDenied,
            Self::ClientUnknown => Reason::ClientAddressUnknown,
            Self::NoBackend => Reason::NoBackend,
            Self::NoLocalBackend => Reason::NoLocalBackend,
            Self::InvalidRecord => Reason::RecordInvalid,
        }
    }

    /// Returns true if kube-proxy would drop the packets in this case. The application then sees an
    /// unreachable destination instead of a refused connection.
    #[inline(always)]
    #[must_use]
    pub const fn is_drop(self) -> bool {
        match self {
            Self::ClientDenied | Self::ClientUnknown | Self::NoLocalBackend => true,
            Self::NoBackend | Self::InvalidRecord => false,
        }
    }
}

/// Chooses a backend for a new connection or UDP flow to a frontend.
///
/// # Errors
///
/// Returns an error if the client may not use the frontend, or if the frontend has no backend for this
/// traffic.
#[inline(always)]
pub fn choose_backend<T: Maps + ?Sized>(
    maps: &T,
    context: &impl ClientContext,
    key: &FrontendKey,
    record: FrontendRecord<'_>,
    traffic: Traffic,
) -> Result<Choice, NoChoice> {
    let frontend = record.frontend;
    // Taken from the key, because in the IPv4 hooks the compiler knows the key's address family.
    let is_v4 = key.address.is_v4();
    let identity = if depends_on_client(frontend) {
        context.client(is_v4)
    } else {
        Identity {
            client: ClientScalars::NONE,
            is_by_source: false,
        }
    };
    if frontend.source_ranges.len != 0 {
        check_client(maps, context, frontend, identity)?;
    }
    choose(maps, context, record, traffic, identity.client)
}

/// Returns true if the choice of a backend depends on the client.
#[inline(always)]
fn depends_on_client(frontend: &Frontend) -> bool {
    frontend.affinity_timeout != 0
        || frontend.source_ranges.len != 0
        || frontend.algorithm.is_by_client()
}

/// Checks that the client is in the frontend's source ranges. Other clients can't reach the frontend:
/// kube-proxy drops their packets too (`pkg/proxy/nftables/proxier.go`, `firewall-ips`).
#[inline(always)]
fn check_client<T: Maps + ?Sized>(
    maps: &T,
    context: &impl ClientContext,
    frontend: &Frontend,
    identity: Identity,
) -> Result<(), NoChoice> {
    let Identity {
        client,
        is_by_source,
    } = identity;
    let is_decided = frontend.flags & Frontend::HOST_UNKNOWN == 0;
    let is_permitted = if !is_by_source && is_decided && context.is_known_host() {
        // The planner has already checked the host's addresses.
        frontend.flags & Frontend::ADMITS_HOST != 0
    } else if client.kind == Client::ADDRESS {
        maps.is_in_source_ranges(frontend.source_ranges, [client.upper, client.lower])
    } else {
        return Err(NoChoice::ClientUnknown);
    };
    if is_permitted {
        Ok(())
    } else {
        Err(NoChoice::ClientDenied)
    }
}

#[inline(always)]
fn choose<T: Maps + ?Sized>(
    maps: &T,
    context: &impl ClientContext,
    record: FrontendRecord<'_>,
    traffic: Traffic,
    client: ClientScalars,
) -> Result<Choice, NoChoice> {
    let frontend = record.frontend;
    let set = traffic.set(frontend);
    if set.len == 0 {
        return Err(if frontend.flags & Frontend::HAS_ENDPOINTS == 0 {
            NoChoice::NoBackend
        } else {
            NoChoice::NoLocalBackend
        });
    }
    if frontend.affinity_timeout != 0 {
        let client = context.affinity_client(client);
        let choice = maps.choose_by_affinity(record, traffic, client);
        let AffinityChoice { index, is_stored } = choice.ok_or(NoChoice::InvalidRecord)?;
        let reason = if is_stored {
            Reason::TranslatedAffinity
        } else {
            Reason::Translated
        };
        return choice_at(maps, index, reason);
    }
    // The common case avoids a function call.
    let offset = if set.len == 1 || frontend.algorithm == Algorithm::RANDOM {
        select::offset_in(set, maps.random())
    } else {
        maps.choose_offset(record, traffic, client)
    };
    let offset = offset.ok_or(NoChoice::InvalidRecord)?;
    if traffic.has_inline_backends(frontend) {
        let backend = maps
            .inline_backend(frontend, offset)
            .ok_or(NoChoice::InvalidRecord)?;
        return Ok(Choice {
            index: backend.index,
            address: backend.address,
            port: backend.port,
            reason: Reason::Translated,
        });
    }
    let slot = maps.slot(set.base.wrapping_add(offset));
    let slot = slot.ok_or(NoChoice::InvalidRecord)?;
    choice_at(maps, slot.backend, Reason::Translated)
}

#[inline(always)]
fn choice_at<T: Maps + ?Sized>(maps: &T, index: u32, reason: Reason) -> Result<Choice, NoChoice> {
    let backend = maps.backend(index).ok_or(NoChoice::InvalidRecord)?;
    Ok(Choice {
        index,
        address: backend.address,
        port: backend.port,
        reason,
    })
}

/// Returns a backend's state, or the state of an unused index if there is no such backend.
#[inline(always)]
pub fn state<T: Maps + ?Sized>(maps: &T, index: u32) -> BackendState {
    match maps.backend(index) {
        Some(backend) => maps.state(backend),
        None => BackendState::default(),
    }
}

/// Returns a UDP flow's backend if the flow may keep it: the backend belongs to the frontend's service port,
/// and [`select::is_sticky`] returns true.
#[inline(always)]
pub fn flow_backend<'a, T: Maps + ?Sized>(
    maps: &'a T,
    frontend: &Frontend,
    flow: &Origin,
    now: u64,
) -> Option<&'a Backend> {
    let backend = maps.backend(flow.index)?;
    let is_kept = backend.service == frontend.service
        && select::is_sticky(flow, frontend.service, maps.state(backend), now);
    is_kept.then_some(backend)
}

#[cfg(test)]
pub(crate) mod tests;
