//! Translates fragments: the first one of a packet like a whole packet, and the others as the first one.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use tunnel_common::{
    forward::{Flows as _, Step, fragments},
    fragment::FragmentKey,
    packet::{
        Packet, Unread,
        fragment::{self, FragmentHeader},
    },
    reason::Reason,
    rewrite,
};

use crate::{
    maps::{self, KernelMaps},
    packet::{self, DROP, NEXT},
};

/// The result for the first fragment of a packet, which is no verdict.
const FIRST: i32 = 256;

/// Handles a fragment that arrives on a link. Returns the packet if it is the first fragment, otherwise the verdict.
#[inline(always)]
pub(super) fn arrive(ctx: &TcContext) -> Result<Packet, i32> {
    packet_or_verdict(fragment_arrives(ctx.skb.skb).cast_signed())
}

/// Handles a fragment that leaves by a link. Returns the packet if it is the first fragment, otherwise the verdict.
#[inline(always)]
pub(super) fn leave(ctx: &TcContext) -> Result<Packet, i32> {
    packet_or_verdict(fragment_leaves(ctx.skb.skb).cast_signed())
}

#[inline(always)]
fn packet_or_verdict(result: i32) -> Result<Packet, i32> {
    if result != FIRST {
        return Err(result);
    }
    KernelMaps.with_run(|run| run.packet()).ok_or(NEXT)
}

/// Makes the other fragments follow the first one, which has got the end in the run.
#[inline(always)]
pub(super) fn follow() {
    other_fragments_follow();
}

/// Does what [`arrive`] does. A separate function, because the verifier checks it once, and for its stack frame.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn fragment_arrives(ctx: *mut __sk_buff) -> u32 {
    handle(&TcContext::new(ctx), false).cast_unsigned()
}

/// Does what [`leave`] does. A separate function for the same reasons.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn fragment_leaves(ctx: *mut __sk_buff) -> u32 {
    handle(&TcContext::new(ctx), true).cast_unsigned()
}

/// Does what [`follow`] does. A separate function for the same reasons. The number that it returns has no meaning.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn other_fragments_follow() -> u32 {
    fragments::follow(&KernelMaps);
    0
}

#[inline(always)]
fn handle(ctx: &TcContext, leaves: bool) -> i32 {
    let header = match read(ctx) {
        Ok(header) => header,
        Err(Unread::ShortFragment) if !leaves => {
            maps::count_reason(Reason::FragmentTooShort);
            return DROP;
        }
        Err(unread) => return super::leave_alone(unread),
    };
    let key = FragmentKey::new(&header, leaves);
    if let Some(packet) = &header.first {
        fragments::start(&KernelMaps, &key, packet);
        return FIRST;
    }
    if fragments::decide(&KernelMaps, &key) == Step::Translate {
        return translate(ctx, &key);
    }
    // Fragments that leave mostly belong to other packets, and so do those of pods.
    if !leaves && !maps::leads_to_pods(packet::link(ctx)) {
        maps::count_reason(Reason::FragmentUnmatched);
    }
    NEXT
}

#[inline(always)]
fn read(ctx: &TcContext) -> Result<FragmentHeader, Unread> {
    fragment::read(&packet::Bytes(ctx), packet::family(ctx)?)
}

/// Replaces an address of a fragment other than the first by that in the run.
#[inline(always)]
fn translate(ctx: &TcContext, key: &FragmentKey) -> i32 {
    let Some(address) = KernelMaps.with_run(|run| run.replacement.address) else {
        return NEXT;
    };
    let (old, new) = ([key.source, key.destination], key.with_address(address));
    match rewrite::replace_in_fragment(&mut packet::Edits(ctx), old, new) {
        Ok(()) => NEXT,
        Err(packet::NotWritable) => DROP,
    }
}
