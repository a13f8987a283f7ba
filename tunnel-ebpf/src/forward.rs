//! Translates packets that arrive on links, and those that leave by them.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

mod fragments;
mod host;
mod icmp;
mod redirect;

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use tunnel_common::{
    forward::{self, End, Flows as _, Run, Step},
    packet::{self as header, Packet, Unread},
    reason::Reason,
    rewrite,
};

use crate::{
    event_log,
    maps::{self, KernelMaps},
    packet::{self, DROP, NEXT, answer::To},
};

/// Changes the destination of a packet that arrives on a link.
#[inline(always)]
pub(crate) fn arrive(ctx: &TcContext) -> i32 {
    if !packet::is_for_this_host(ctx) {
        return NEXT;
    }
    let packet = match read(ctx) {
        Ok(packet) => packet,
        Err(Unread::Icmp) => return icmp::arrive(ctx),
        Err(Unread::Fragment) => match fragments::arrive(ctx) {
            Ok(packet) => packet,
            Err(verdict) => return verdict,
        },
        Err(unread) => return leave_alone(unread),
    };
    let step = forward::arrive(&KernelMaps, &packet, packet::link(ctx));
    act(ctx, step, End::Destination)
}

/// Changes the source of a packet that leaves by a link.
#[inline(always)]
pub(crate) fn leave(ctx: &TcContext) -> i32 {
    match packet_leaves(ctx.skb.skb).cast_signed() {
        OF_HOST => host::leave(ctx),
        verdict => verdict,
    }
}

/// The result for a packet of this host that belongs to no flow by its ends, which is no verdict.
const OF_HOST: i32 = 257;

/// Returns the verdict on a packet that leaves by a link, or [`OF_HOST`]. A separate function, because its stack frame and that
/// of the other one would be too large together.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn packet_leaves(ctx: *mut __sk_buff) -> u32 {
    translate_source(&TcContext::new(ctx)).cast_unsigned()
}

#[inline(always)]
fn translate_source(ctx: &TcContext) -> i32 {
    if packet::has_tag(ctx) {
        return NEXT;
    }
    let packet = match read(ctx) {
        Ok(packet) => packet,
        Err(Unread::Icmp) => return icmp::leave(ctx),
        Err(Unread::Fragment) => match fragments::leave(ctx) {
            Ok(packet) => packet,
            Err(verdict) => return verdict,
        },
        Err(unread) => return leave_alone(unread),
    };
    let links = (packet::link(ctx), packet::returns(ctx));
    let is_free = || is_masquerade_port_free(ctx.skb.skb) != 0;
    match forward::leave(&KernelMaps, &packet, links, is_free) {
        Some(step) => act(ctx, step, End::Source),
        None if packet::is_of_host(ctx) => {
            forward::host::start(&KernelMaps, &packet);
            OF_HOST
        }
        None => NEXT,
    }
}

/// Returns 1 if no socket of this node would receive packets from the backend of the run's flow to its masquerade address. A
/// separate function, because the verifier checks it once, instead of for each port that may be tried.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn is_masquerade_port_free(ctx: *mut __sk_buff) -> u32 {
    let is_free = |run: &mut Run| {
        let (own, backend) = (&run.flow.masquerade, &run.flow.backend);
        !packet::has_socket(&TcContext::new(ctx), run.protocol, own, backend)
    };
    KernelMaps.with_run(is_free).unwrap_or(false).into()
}

/// Reads a packet's headers.
#[inline(always)]
fn read(ctx: &TcContext) -> Result<Packet, Unread> {
    header::read(&packet::Bytes(ctx), packet::family(ctx)?)
}

/// Counts a packet that is left alone. Returns the verdict on it.
#[inline(always)]
fn leave_alone(unread: Unread) -> i32 {
    if unread == Unread::Malformed {
        maps::count_reason(Reason::PacketMalformed);
    }
    NEXT
}

/// Does what was decided about a packet: replaces one end, and the port of the other end. The other fragments of the packet
/// follow if it is one.
#[inline(always)]
fn act(ctx: &TcContext, step: Step, end: End) -> i32 {
    event_log::packet(step);
    match step {
        Step::Next | Step::Pass => return NEXT,
        Step::Translate => {}
        Step::Begin => count(maps::count_sent),
        Step::Refuse => {
            count(maps::count_refused);
            return packet::answer::refuse(ctx, To::Link);
        }
        Step::Defer => return packet::arrive_again(ctx),
        Step::Drop => {
            count(maps::count_refused);
            return DROP;
        }
    }
    if replace(ctx, end) == DROP {
        return DROP;
    }
    let is_reply = end == End::Destination && forward::host::is_reply(&KernelMaps);
    // Read again, because another value would not fit into the stack frame.
    if KernelMaps.with_run(|run| run.is_fragment != 0) == Some(true) {
        if is_reply {
            maps::count_reason(Reason::HostFragment);
            return DROP;
        }
        fragments::follow();
    }
    if is_reply {
        return host::receive(ctx);
    }
    if end == End::Destination {
        return redirect::send(ctx);
    }
    NEXT
}

/// Replaces one end of a packet, and the port of the other end, as the run says.
#[inline(always)]
fn replace(ctx: &TcContext, end: End) -> i32 {
    replace_end_of_packet(ctx.skb.skb, u32::from(end == End::Destination)).cast_signed()
}

/// Does what [`replace`] does. A separate function, because the verifier checks it once.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn replace_end_of_packet(ctx: *mut __sk_buff, is_destination: u32) -> u32 {
    let end = if is_destination == 0 {
        End::Source
    } else {
        End::Destination
    };
    let ends = KernelMaps.with_run(|run| (run.packet(), run.translated(end)));
    let Some((packet, translated)) = ends else {
        return DROP.cast_unsigned();
    };
    let ctx = &TcContext::new(ctx);
    let verdict = match rewrite::replace(&mut packet::Edits(ctx), &packet, &translated) {
        Ok(()) => NEXT,
        Err(packet::NotWritable) => DROP,
    };
    verdict.cast_unsigned()
}

/// Counts the packet under the reason in the run, and for its service port.
#[inline(always)]
fn count(count_for_service: impl FnOnce(u32)) {
    if let Some((reason, service)) = KernelMaps.with_run(|run| (run.reason, run.flow.service)) {
        maps::count_reason_at(reason);
        count_for_service(service);
    }
}
