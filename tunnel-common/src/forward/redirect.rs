//! Decides which packets are sent past the network stack (`service.packets.delivery`).

use super::Flows;
use crate::packet_link::PacketLink;

/// Returns true if the packet, which has got its destination, may be sent on past the network stack. Its other fragments could
/// overtake it.
#[inline(always)]
pub fn may_be_redirected<T: Flows>(maps: &T) -> bool {
    let link = maps.with_run(|run| if run.is_fragment == 0 { run.link } else { 0 });
    link.is_some_and(|link| redirects(maps, link))
}

/// Returns true if packets are sent past the network stack from a link, and to it from others.
#[inline(always)]
pub fn redirects<T: Flows>(maps: &T, link: u32) -> bool {
    let link = maps.packet_link(link);
    link.is_some_and(|link| link.flags & PacketLink::REDIRECTS != 0)
}
