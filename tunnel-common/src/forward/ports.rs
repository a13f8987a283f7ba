//! The ports that stand for clients.

use core::ops::RangeInclusive;

use super::Flows;
use crate::addr::Port;

/// The maximum number of ports that are tried for a flow.
pub const MAX_TRIES: u32 = 16;

/// The distance between the places of ports that are tried one after another: 2^32 divided by the golden ratio, which spreads
/// the places evenly, so that each port of a small range is tried.
pub(super) const STEP: u32 = 0x9e37_79b9;

/// The ports that stand for clients with reserved ports, since servers may admit only these (NFS): those that the kernel's own
/// clients use, too (`sunrpc.min_resvport`).
const RESERVED_PORTS: RangeInclusive<u16> = 665..=1023;

/// Returns true if a port is reserved for privileged programs.
#[inline(always)]
const fn is_reserved(port: Port) -> bool {
    port.to_host() <= *RESERVED_PORTS.end()
}

/// Returns the port that stands for a client if possible: its own reserved port, or the one that it has between the two programs.
#[inline(always)]
pub(super) const fn preferred(client: Port, forwarded: Port) -> Port {
    if is_reserved(client) {
        client
    } else {
        forwarded
    }
}

/// Returns true if a client's port may also be the port that stands for it.
#[inline(always)]
pub(super) fn keeps_port<T: Flows>(maps: &T, port: Port) -> bool {
    is_reserved(port) || maps.may_keep_port(port)
}

/// Returns the port that may stand for a client with the given one, at a place from 0 to [`u32::MAX`] in the range of such ports.
#[inline(always)]
#[must_use]
pub fn port_for<T: Flows + ?Sized>(maps: &T, client: Port, place: u32) -> Port {
    if !is_reserved(client) {
        return maps.port_at(place);
    }
    let (first, last) = (*RESERVED_PORTS.start(), *RESERVED_PORTS.end());
    #[expect(
        clippy::cast_possible_truncation,
        clippy::as_conversions,
        reason = "less than the number of ports"
    )]
    let offset = ((u64::from(place) * u64::from(last - first + 1)) >> 32) as u16;
    Port::from_host(first + offset)
}
