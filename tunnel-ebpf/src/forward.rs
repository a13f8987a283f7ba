//! Translates packets that arrive on uplinks, and those that leave on them.

use aya_ebpf::programs::TcContext;
use tunnel_common::{
    addr::Address,
    forward::{self, End, Flows as _, Run, Step},
    packet::{self as header, Family, Packet, Unread},
    reason::Reason,
    rewrite,
};

use crate::{
    event_log,
    maps::{self, KernelMaps},
    packet::{self, DROP, NEXT},
};

/// Changes the destination of a packet that arrives on an uplink.
#[inline(always)]
pub(crate) fn arrive(ctx: &TcContext) -> i32 {
    if !packet::is_for_this_host(ctx) {
        return NEXT;
    }
    let Some(packet) = read(ctx) else {
        return NEXT;
    };
    act(ctx, forward::arrive(&KernelMaps, &packet), End::Destination)
}

/// Changes the source of a packet that leaves on an uplink.
#[inline(always)]
pub(crate) fn leave(ctx: &TcContext) -> i32 {
    if packet::has_tag(ctx) {
        return NEXT;
    }
    let Some(packet) = read(ctx) else {
        return NEXT;
    };
    let own = || own_address(ctx);
    let is_free = |run: &Run| {
        let (own, backend) = (&run.flow.masquerade, &run.flow.backend);
        !packet::has_socket(ctx, run.protocol, own, backend)
    };
    let step = forward::leave(&KernelMaps, &packet, own, is_free);
    act(ctx, step, End::Source)
}

/// Returns the address of this node that stands for clients on the link by which a packet leaves.
#[inline(always)]
fn own_address(ctx: &TcContext) -> Option<Address> {
    let addresses = maps::link_addresses(packet::link(ctx))?;
    let address = match packet::family(ctx)? {
        Family::V4 => addresses.v4,
        Family::V6 => addresses.v6,
    };
    (address != Address::UNSPECIFIED).then_some(address)
}

/// Reads a packet's headers. Returns `None` if the packet is left alone.
#[inline(always)]
fn read(ctx: &TcContext) -> Option<Packet> {
    let family = packet::family(ctx)?;
    let unread = match header::read(&packet::Bytes(ctx), family) {
        Ok(packet) => return Some(packet),
        Err(unread) => unread,
    };
    match unread {
        Unread::Malformed => maps::count_reason(Reason::PacketMalformed),
        Unread::Fragment => maps::count_reason(Reason::PacketFragment),
        Unread::NotForwarded | Unread::OtherProtocol => {}
    }
    None
}

/// Does what was decided about a packet: replaces one end, and the port of the other end.
#[inline(always)]
fn act(ctx: &TcContext, step: Step, end: End) -> i32 {
    event_log::packet(step);
    match step {
        Step::Next | Step::Pass => return NEXT,
        Step::Translate => {}
        Step::Begin => count(maps::count_sent),
        Step::Refuse => {
            count(maps::count_refused);
            return packet::answer::refuse(ctx);
        }
        Step::Defer => return packet::arrive_again(ctx),
        Step::Drop => {
            count(maps::count_refused);
            return DROP;
        }
    }
    let ends = KernelMaps.with_run(|run| (run.packet(), run.translated(end)));
    let Some((packet, translated)) = ends else {
        return NEXT;
    };
    match rewrite::replace(&mut packet::Edits(ctx), &packet, &translated) {
        Ok(()) => NEXT,
        Err(packet::NotWritable) => DROP,
    }
}

/// Counts the packet under the reason in the run, and for its service port.
#[inline(always)]
fn count(count_for_service: impl FnOnce(u32)) {
    if let Some((reason, service)) = KernelMaps.with_run(|run| (run.reason, run.flow.service)) {
        maps::count_reason_at(reason);
        count_for_service(service);
    }
}
