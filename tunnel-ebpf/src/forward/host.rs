//! Translates packets between this host and a frontend whose sockets met no socket program. Each part is a separate function,
//! because the verifier checks such a function only once, and for its stack frame. They share the state of the run.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_NO_NEIGH,
        BPF_FIB_LKUP_RET_NOT_FWDED, BPF_FIB_LKUP_RET_SUCCESS,
    },
    programs::TcContext,
};
use tunnel_common::{
    forward::{End, Flows as _, Step, host},
    packet_link::PacketLink,
    reason::Reason,
};

use super::{count, replace};
use crate::{
    event_log,
    maps::{self, KernelMaps},
    packet::{
        self, DROP, NEXT,
        answer::To,
        route::{self, Query, Route},
    },
};

/// The index of the loopback link, by which the kernel looks up routes for packets of this host.
const LOOPBACK: u32 = 1;

/// Handles a packet of this host that belongs to no flow by its ends, and that is in the run.
#[inline(always)]
pub(super) fn leave(ctx: &TcContext) -> i32 {
    host_packet_leaves(ctx.skb.skb).cast_signed()
}

/// Changes the source of a reply to this host, whose destination has been changed.
#[inline(always)]
pub(super) fn receive(ctx: &TcContext) -> i32 {
    host_packet_arrives(ctx.skb.skb).cast_signed()
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn host_packet_leaves(ctx: *mut __sk_buff) -> u32 {
    decide_and_send(&TcContext::new(ctx)).cast_unsigned()
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn host_packet_arrives(ctx: *mut __sk_buff) -> u32 {
    let ctx = &TcContext::new(ctx);
    let verdict = match host::receive(&KernelMaps) {
        Step::Translate => replace(ctx, End::Source),
        // The flow has just ended.
        Step::Next | Step::Pass | Step::Begin | Step::Refuse | Step::Defer | Step::Drop => DROP,
    };
    verdict.cast_unsigned()
}

#[inline(always)]
fn decide_and_send(ctx: &TcContext) -> i32 {
    let step = host::leave(&KernelMaps, |to| {
        link_to_end(ctx.skb.skb, u32::from(to == host::To::Backend))
    });
    event_log::packet(step);
    match step {
        Step::Next | Step::Pass | Step::Defer => return NEXT,
        Step::Translate => {}
        Step::Begin => count(maps::count_sent),
        Step::Refuse => {
            count(maps::count_refused);
            return packet::answer::refuse(ctx, To::Host);
        }
        Step::Drop => {
            count(maps::count_refused);
            return DROP;
        }
    }
    if replace(ctx, End::Destination) == DROP {
        return DROP;
    }
    send_host_packet(ctx.skb.skb).cast_signed()
}

/// Sends a packet of this host to its new destination. Returns the verdict.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn send_host_packet(ctx: *mut __sk_buff) -> u32 {
    let ctx = &TcContext::new(ctx);
    let verdict = send(ctx).unwrap_or_else(|| {
        maps::count_reason(Reason::HostNoRoute);
        DROP
    });
    verdict.cast_unsigned()
}

#[inline(always)]
fn send(ctx: &TcContext) -> Option<i32> {
    let query = KernelMaps.with_run(|run| Query {
        source: run.source.with_port(run.other_port),
        destination: run.replacement,
        protocol: run.protocol,
        length: 0,
    })?;
    let (route, result) = Route::find(ctx, LOOPBACK, &query);
    if !is_found(result) {
        return None;
    }
    if route::prepare(ctx).is_err() {
        return Some(DROP);
    }
    let link = KernelMaps.packet_link(route.link());
    let flags = link.map_or(0, |link| link.flags);
    if flags & PacketLink::WITHOUT_ETHERNET != 0 {
        return Some(route::send_by(route.link()));
    }
    // With a next hop, the kernel gives the packet no other route, which some kernels would not release.
    Some(route.send())
}

/// Returns true if the result of a route lookup is a route. The redirect asks for the neighbour. A packet that is too big is sent,
/// because nothing reports it to the sender.
#[inline(always)]
fn is_found(result: i64) -> bool {
    result == i64::from(BPF_FIB_LKUP_RET_SUCCESS)
        || result == i64::from(BPF_FIB_LKUP_RET_NO_NEIGH)
        || result == i64::from(BPF_FIB_LKUP_RET_FRAG_NEEDED)
}

/// Returns the index of the link by which this host's packets leave for the sender of the packet (0) or the backend of the run's
/// flow (1), as [`host::leave`] needs it.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn link_to_end(ctx: *mut __sk_buff, to_backend: u32) -> u32 {
    let query = KernelMaps.with_run(|run| Query {
        source: run.source,
        destination: if to_backend == 0 {
            run.source
        } else {
            run.flow.backend
        },
        protocol: run.protocol,
        length: 0,
    });
    let Some(query) = query else {
        return 0;
    };
    let (route, result) = Route::find(&TcContext::new(ctx), LOOPBACK, &query);
    // The kernel forwards no packets to its own addresses.
    if result == i64::from(BPF_FIB_LKUP_RET_NOT_FWDED) {
        return host::LOCAL;
    }
    if is_found(result) { route.link() } else { 0 }
}
