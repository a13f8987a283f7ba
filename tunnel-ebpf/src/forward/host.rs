//! Translates packets between this host and a frontend whose sockets met no socket program. Each part is a separate function,
//! because the verifier checks such a function only once, and for its stack frame. They share the state of the run.
#![expect(
    unsafe_code,
    reason = "global functions need `no_mangle`, and helpers are called"
)]

use core::mem::zeroed;

use aya_ebpf::{
    EbpfContext as _,
    bindings::{
        __sk_buff, BPF_FIB_LKUP_RET_FRAG_NEEDED, BPF_FIB_LKUP_RET_NO_NEIGH,
        BPF_FIB_LKUP_RET_SUCCESS, bpf_fib_lookup as Route,
    },
    helpers::generated::{bpf_fib_lookup, bpf_redirect_neigh},
    programs::TcContext,
};
use tunnel_common::{
    addr::Address,
    forward::{End, Flows as _, Step, host},
};

use super::{count, replace};
use crate::{
    event_log,
    maps::{self, KernelMaps},
    packet::{self, DROP, NEXT, answer::To},
};

/// The address families in a route lookup.
const AF_INET: u8 = 2;
const AF_INET6: u8 = 10;

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
    let step = host::leave(&KernelMaps, || link_to_backend(ctx.skb.skb));
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
    let link = KernelMaps.with_run(|run| run.link).unwrap_or_default();
    // SAFETY: the helper takes any link. Without parameters, it looks up the next hop by itself.
    let verdict = unsafe { bpf_redirect_neigh(link, core::ptr::null_mut(), 0, 0) };
    i32::try_from(verdict).unwrap_or(DROP)
}

/// Returns the index of the link by which this host's packets leave for the backend of the run's flow, or 0 if there is none.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn link_to_backend(ctx: *mut __sk_buff) -> u32 {
    let Some((source, backend)) =
        KernelMaps.with_run(|run| (run.source.address, run.flow.backend.address))
    else {
        return 0;
    };
    // SAFETY: every bit pattern is valid.
    let mut route: Route = unsafe { zeroed() };
    set_addresses(&mut route, &source, &backend);
    route.ifindex = LOOPBACK;
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_possible_wrap,
        reason = "64 bytes"
    )]
    let size = size_of::<Route>() as i32;
    // SAFETY: the route has this size.
    let result = unsafe { bpf_fib_lookup(TcContext::new(ctx).as_ptr(), &raw mut route, size, 0) };
    let is_found = [
        BPF_FIB_LKUP_RET_SUCCESS,
        // The redirect asks for the neighbour, and the link says if the packet is too big.
        BPF_FIB_LKUP_RET_NO_NEIGH,
        BPF_FIB_LKUP_RET_FRAG_NEEDED,
    ]
    .iter()
    .any(|found| i64::from(*found) == result);
    if is_found { route.ifindex } else { 0 }
}

#[inline(always)]
fn set_addresses(route: &mut Route, source: &Address, destination: &Address) {
    if source.is_v4() {
        route.family = AF_INET;
        route.__bindgen_anon_3.ipv4_src = source.v4_word();
        route.__bindgen_anon_4.ipv4_dst = destination.v4_word();
    } else {
        route.family = AF_INET6;
        route.__bindgen_anon_3.ipv6_src = source.words();
        route.__bindgen_anon_4.ipv6_dst = destination.words();
    }
}
