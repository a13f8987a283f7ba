//! Determines where the sender of a packet is: by the link that the packet arrives on, and by the sender's address.

use super::Flows;
use crate::{
    addr::Address,
    affinity::Client,
    decide::{ClientContext, ClientScalars, Identity, Traffic},
    locality::{self, Locality},
    packet_link::PacketLink,
};

/// Returns the flags of the link that the packet arrives on. No flow begins on a link that the daemon doesn't know (any more).
#[inline(always)]
pub(super) fn flags_of_link<T: Flows + ?Sized>(maps: &T) -> u32 {
    let link = maps.with_run(|run| run.link);
    let link = link.and_then(|link| maps.packet_link(link));
    link.map_or(PacketLink::KNOWN_FLOWS_ONLY, |link| link.flags)
}

/// Returns whether the sender of a packet that arrives on a link with these flags is local. `by_address` returns what its address
/// says.
#[inline(always)]
#[must_use]
pub fn locality_on_link(link_flags: u32, by_address: impl FnOnce() -> Locality) -> Locality {
    if link_flags & PacketLink::LOCAL_SENDERS != 0 {
        return Locality::Local;
    }
    match by_address() {
        Locality::Unknown if link_flags & PacketLink::PRESUMED_LOCAL != 0 => Locality::Local,
        locality @ (Locality::Unknown | Locality::Foreign | Locality::Local) => locality,
    }
}

/// Returns the kind of traffic that packets are which arrive on a link with these flags from a sender of this locality.
#[inline(always)]
#[must_use]
pub fn traffic_on_link(link_flags: u32, locality: Locality) -> Traffic {
    if link_flags & PacketLink::OF_PODS_HERE != 0 && locality == Locality::Local {
        Traffic::PodPackets
    } else {
        Traffic::Packets
    }
}

/// Returns whether the sender of the packet is local.
#[inline(always)]
pub fn locality<T: Flows + ?Sized>(maps: &T) -> Locality {
    Locality::of(|index| maps.relation_to_range(index))
}

/// Returns the relation of the sender of the packet to an entry of `local_ranges`.
#[inline(always)]
pub fn relation_to_range<T: Flows + ?Sized>(maps: &T, index: u32) -> u32 {
    let Some(range) = maps.local_range(index) else {
        return 0;
    };
    let relation = maps.with_run(|run| locality::relation(&run.source.address, range));
    relation.unwrap_or(0)
}

/// The sender of a packet, whose address identifies the client.
pub(super) struct Sender(pub(super) Address);

impl ClientContext for Sender {
    #[inline(always)]
    fn client(&self, _is_v4: bool) -> Identity {
        Identity {
            client: ClientScalars::new(&Client::of_address(self.0)),
            is_by_source: true,
        }
    }

    #[inline(always)]
    fn is_bound_to_loopback(&self, _is_v4: bool) -> bool {
        false
    }

    #[inline(always)]
    fn is_known_host(&self) -> bool {
        false
    }
}
