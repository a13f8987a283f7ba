//! The ports that stand for clients.
#![expect(unsafe_code, reason = "global functions")]

use tunnel_common::{addr::Port, forward::ports};

use super::KernelMaps;
use crate::context;

/// Returns the port that may stand for a client at a place in their range.
#[inline(always)]
pub(super) fn port_at(place: u32) -> Port {
    let [first, count] = context::masquerade_ports();
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the loader sets a range of ports"
    )]
    // A product instead of a remainder, because the number of ports may be 0 for the verifier.
    let port = (first + ((u64::from(place) * u64::from(count)) >> 32) as u32) as u16;
    Port::from_host(port)
}

/// Returns the port that may stand for a client at a place in the range of such ports.
#[inline(always)]
pub(super) fn port_for(client: Port, place: u32) -> Port {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the function returns a port"
    )]
    let port = port_for_client(client.to_network().into(), place) as u16;
    Port::from_network(port)
}

/// Calls [`ports::port_for`]. Ports are in network byte order.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn port_for_client(client: u32, place: u32) -> u32 {
    #[expect(clippy::cast_possible_truncation, reason = "the caller passes a port")]
    let client = Port::from_network(client as u16);
    ports::port_for(&KernelMaps, client, place)
        .to_network()
        .into()
}
