//! Packets between this host and a frontend whose sockets met no socket program: those of processes outside the cgroup, of the
//! kernel itself, and of Services with the annotation `culvert.dev/socket-translation: disabled`.
//!
//! | packet | at | is translated |
//! |---|---|---|
//! | host → frontend | tc egress of the link to the frontend | as if it arrived: the destination becomes the backend |
//! | host → backend | tc egress of the link to the backend | as it leaves: the source becomes the link's address |
//! | backend → the link's address | tc ingress | as it arrives, and as if it left: the destination becomes the host, and the source the frontend |

use super::{End, Flows, Step, errors, insert_entries, or_pass, ports, refuse, sender};
use crate::{
    flow::{Flow, Role},
    packet::Packet,
    packet_link::PacketLink,
    reason::Reason,
};

/// The maximum number of ports that are tried for a flow, of a range in which few are taken.
const MAX_TRIES: u32 = 8;

/// An end of a flow, to which a route is looked up.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum To {
    /// The sender of the packet.
    Source,
    /// The backend of the run's flow.
    Backend,
}

/// Stands for the link to an end that is this host itself.
pub const LOCAL: u32 = u32::MAX;

/// Stores a packet of this host for [`leave`].
#[inline(always)]
pub fn start<T: Flows>(maps: &T, packet: &Packet) {
    super::start(maps, packet, (PacketLink::HOST, false));
}

/// Decides about a packet of this host that belongs to no flow by its ends. If it is translated, it gets the destination in the
/// run. `link_to` returns the index of the link by which this host reaches an end, [`LOCAL`] if the end is this host itself, or 0
/// if there is no such link. The result is never [`Step::Next`] or [`Step::Defer`].
#[inline(always)]
pub fn leave<T: Flows>(maps: &T, link_to: impl Fn(To) -> u32) -> Step {
    let mut step = maps.find_arriving();
    if step == Step::Next {
        step = maps.choose();
    }
    // Packets of links on top of this one (macvlan) look like those of this host.
    let is_new = !matches!(step, Step::Pass | Step::Translate);
    if is_new && link_to(To::Source) != LOCAL {
        return Step::Pass;
    }
    match step {
        Step::Next | Step::Translate => {}
        // At tc egress, it can't be made to arrive again.
        Step::Defer => return drop_for(maps, Reason::FlowsMoving),
        Step::Pass | Step::Begin | Step::Refuse | Step::Drop => return step,
    }
    if maps.with_run(|run| run.is_fragment != 0) == Some(true) {
        return drop_for(maps, Reason::HostFragment);
    }
    if step == Step::Translate {
        return step;
    }
    let link = link_to(To::Backend);
    maps.with_run(|run| run.link = link);
    // Without the programs on the link, the replies would come from the backend.
    if link == 0 || link == LOCAL || sender::flags_of_link(maps) & PacketLink::KNOWN_FLOWS_ONLY != 0
    {
        return refuse(maps, Reason::HostNoRoute);
    }
    // Another socket of this host may be connected to the backend itself, with the same port.
    maps.with_run(|run| {
        if !ports::keeps_port(maps, run.source.port) {
            run.flow.forwarded_port = maps.port_at(maps.random());
        }
    });
    insert_entries(maps, MAX_TRIES)
}

/// Stores the reason, and returns the verdict.
#[inline(always)]
fn drop_for<T: Flows + ?Sized>(maps: &T, reason: Reason) -> Step {
    maps.with_run(|run| run.set_reason(reason));
    Step::Drop
}

/// Returns true if the run's flow is one of this host, and the packet, or the packet about which an ICMP error is, was found by
/// the address that stands for it: the packet has been translated as it arrives, but passes no link by which it leaves.
#[inline(always)]
pub fn is_reply<T: Flows + ?Sized>(maps: &T) -> bool {
    let is_reply = maps
        .with_run(|run| run.flow.role == Role::MASQUERADED && run.flow.flags & Flow::OF_HOST != 0);
    is_reply == Some(true)
}

/// Decides about a reply that has got its destination, as if it left by a link.
#[inline(always)]
pub fn receive<T: Flows + ?Sized>(maps: &T) -> Step {
    maps.with_run(|run| run.advance(End::Destination));
    maps.find_leaving()
}

/// Decides about an ICMP error that has got its destination, as if it left by a link.
#[inline(always)]
pub fn receive_error<T: Flows + ?Sized>(maps: &T) -> Step {
    let stored = maps.with_run(|run| {
        run.error.destination = run.replacement.address;
        run.advance(End::Source);
    });
    or_pass(stored.map(|()| errors::leave(maps)))
}
