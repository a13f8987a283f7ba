//! Translates ICMP errors about the packets of flows. Each part is a separate function, because the verifier checks such a
//! function only once, and for its stack frame. They share the state of the run.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use tunnel_common::{
    forward::{End, Flows as _, Step, errors, host},
    packet::{Unread, extensions::MAX_OFFSET, icmp},
    reason::Reason,
    rewrite,
};

use crate::{
    event_log,
    maps::{self, KernelMaps},
    packet::{self, DROP, NEXT},
};

/// Changes the destination of an ICMP error that arrives on a link.
#[inline(always)]
pub(super) fn arrive(ctx: &TcContext) -> i32 {
    match read(ctx) {
        Ok(()) => act(
            ctx,
            Step::from_number(icmp_error_arrives()),
            End::Destination,
        ),
        Err(unread) => super::leave_alone(unread),
    }
}

/// Changes the source of an ICMP error that leaves by a link.
#[inline(always)]
pub(super) fn leave(ctx: &TcContext) -> i32 {
    match read(ctx) {
        Ok(()) => act(ctx, Step::from_number(icmp_error_leaves()), End::Source),
        Err(unread) => super::leave_alone(unread),
    }
}

/// The results of the functions that read.
const READ: u32 = 0;
const MALFORMED: u32 = 1;
const OTHER: u32 = 2;

/// Reads an ICMP error, and stores it in the run.
#[inline(always)]
fn read(ctx: &TcContext) -> Result<(), Unread> {
    let mut result = read_icmp_error(ctx.skb.skb);
    if result == READ {
        result = read_quoted_packet(ctx.skb.skb);
    }
    match result {
        READ => Ok(()),
        MALFORMED => Err(Unread::Malformed),
        _ => Err(Unread::OtherProtocol),
    }
}

#[inline(always)]
const fn number_of(result: Result<(), Unread>) -> u32 {
    match result {
        Ok(()) => READ,
        Err(Unread::Malformed) => MALFORMED,
        Err(_) => OTHER,
    }
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn read_icmp_error(ctx: *mut __sk_buff) -> u32 {
    let ctx = &TcContext::new(ctx);
    let header =
        packet::family(ctx).and_then(|family| icmp::read_header(&packet::Bytes(ctx), family));
    number_of(header.map(|header| errors::set_header(&KernelMaps, &header)))
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn read_quoted_packet(ctx: *mut __sk_buff) -> u32 {
    let ctx = &TcContext::new(ctx);
    let Some(offset) = KernelMaps.with_run(|run| run.error.quoted_offset()) else {
        return OTHER;
    };
    let quoted = packet::family(ctx)
        .and_then(|family| icmp::read_quoted(&packet::Bytes(ctx), family, offset & MAX_OFFSET));
    number_of(quoted.map(|quoted| errors::start(&KernelMaps, &quoted)))
}

/// Calls [`errors::arrive`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn icmp_error_arrives() -> u32 {
    errors::arrive(&KernelMaps).number()
}

/// Calls [`errors::leave`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn icmp_error_leaves() -> u32 {
    errors::leave(&KernelMaps).number()
}

/// Calls [`host::receive_error`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn icmp_error_reaches_host() -> u32 {
    host::receive_error(&KernelMaps).number()
}

/// Does what was decided about an error: replaces one end of it, and the ends of the quoted packet.
#[inline(always)]
fn act(ctx: &TcContext, step: Step, end: End) -> i32 {
    event_log::packet(step);
    if let Some(reason) = KernelMaps.with_run(|run| run.reason) {
        // Pods and their peers exchange other errors, too.
        let is_unmatched = reason == Reason::IcmpErrorUnmatched.index();
        if !is_unmatched || !maps::leads_to_pods(packet::link(ctx)) {
            maps::count_reason_at(reason);
        }
    }
    match step {
        Step::Translate => {
            let is_destination = u32::from(end == End::Destination);
            let verdict = replace_in_icmp_error(ctx.skb.skb, is_destination).cast_signed();
            if verdict != NEXT || end == End::Source || !host::is_reply(&KernelMaps) {
                return verdict;
            }
            match Step::from_number(icmp_error_reaches_host()) {
                Step::Translate => replace_in_icmp_error(ctx.skb.skb, 0).cast_signed(),
                Step::Drop => DROP,
                Step::Next | Step::Pass | Step::Begin | Step::Refuse | Step::Defer => NEXT,
            }
        }
        Step::Drop => DROP,
        Step::Next | Step::Pass | Step::Begin | Step::Refuse | Step::Defer => NEXT,
    }
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn replace_in_icmp_error(ctx: *mut __sk_buff, is_destination: u32) -> u32 {
    let ctx = &TcContext::new(ctx);
    let replaced = KernelMaps.with_run(|run| {
        let (header, new) = (&run.error, run.replacement.address);
        // The quoted packet has gone the other way.
        let (addresses, end) = if is_destination == 0 {
            ([new, header.destination], End::Destination)
        } else {
            ([header.source, new], End::Source)
        };
        let packets = (&run.packet(), &run.translated(end));
        rewrite::replace_error(&mut packet::Edits(ctx), header, addresses, packets)
    });
    let verdict = match replaced {
        Some(Ok(())) | None => NEXT,
        Some(Err(packet::NotWritable)) => DROP,
    };
    verdict.cast_unsigned()
}
