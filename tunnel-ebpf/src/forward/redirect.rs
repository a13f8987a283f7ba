//! Sends packets whose destination was replaced to the link of their receiver, past the network stack.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use aya_ebpf::{
    Global,
    bindings::{__sk_buff, BPF_FIB_LKUP_RET_SUCCESS},
    programs::TcContext,
};
use tunnel_common::{
    forward::{Flows as _, redirect},
    packet::extensions::MAX_OFFSET,
    reason::Reason,
};

use crate::{
    maps::{self, KernelMaps},
    packet::{
        self, DROP, NEXT,
        route::{self, HopLimit, Query, Route},
    },
};

/// 1 if there are links whose packets are redirected. Set by the loader.
#[unsafe(no_mangle)]
static REDIRECT: Global<u8> = Global::new(0);

/// Sends a packet on, if its link redirects packets. Returns the verdict.
#[inline(always)]
pub(super) fn send(ctx: &TcContext) -> i32 {
    if REDIRECT.load() == 0 {
        return NEXT;
    }
    redirect_packet(ctx.skb.skb).cast_signed()
}

/// Does what [`send`] does. A separate function, because the verifier checks it once, and for its stack frame.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn redirect_packet(ctx: *mut __sk_buff) -> u32 {
    let ctx = &TcContext::new(ctx);
    if !redirect::may_be_redirected(&KernelMaps) {
        return NEXT.cast_unsigned();
    }
    let verdict = send_past_stack(ctx).unwrap_or_else(|| {
        maps::count_reason(Reason::RedirectUnavailable);
        NEXT
    });
    verdict.cast_unsigned()
}

/// Sends a packet on. Returns `None` if only the network stack can do it, or say why it can't.
#[inline(always)]
fn send_past_stack(ctx: &TcContext) -> Option<i32> {
    let limit = HopLimit::read(ctx, packet::family(ctx).ok()?)?;
    let query = KernelMaps.with_run(|run| Query {
        source: run.source.with_port(run.other_port),
        destination: run.replacement,
        protocol: run.protocol,
        length: route::length(ctx, run.protocol, run.transport_offset & MAX_OFFSET),
    })?;
    let (route, result) = Route::find(ctx, packet::link(ctx), &query);
    if result != i64::from(BPF_FIB_LKUP_RET_SUCCESS) {
        return None;
    }
    // Otherwise, the replies take the stack, which doesn't know the connection.
    if !redirect::redirects(&KernelMaps, route.link()) {
        return Some(NEXT);
    }
    if limit.decrease(ctx).is_err() {
        return Some(DROP);
    }
    Some(route.send())
}
