//! Turns a packet that is refused into the answer to it, and sends it back.

use aya_ebpf::{
    bindings::{
        __sk_buff, BPF_F_INGRESS, BPF_F_RECOMPUTE_CSUM, TC_ACT_REDIRECT,
        bpf_adj_room_mode::BPF_ADJ_ROOM_MAC,
    },
    helpers::generated::{
        bpf_l4_csum_replace, bpf_redirect, bpf_skb_adjust_room, bpf_skb_change_tail,
        bpf_skb_load_bytes,
    },
    programs::TcContext,
};
use tunnel_common::{
    addr::Protocol,
    forward::Flows as _,
    packet::{Family, Packet},
    reason::Reason,
    refusal::{self, Answer, Checksum},
};

use super::{DROP, Edits, NotWritable, check, link, load_words, network_header, sctp, store_at};
use crate::maps::{self, KernelMaps};

/// The way of an answer.
#[derive(Clone, Copy, Eq, PartialEq)]
pub(crate) enum To {
    /// It leaves by the link of the packet, which has arrived there.
    Link,
    /// It arrives on the link of the packet, which was about to leave by it.
    Host,
}

/// The number of 16-bit words in the addresses of an Ethernet header.
const ADDRESSES: usize = 6;

/// Returns the verdict on a packet that is refused. The packet becomes the answer, unless the limit of answers is reached,
/// or the packet can't be answered.
#[inline(always)]
pub(crate) fn refuse(ctx: &TcContext, to: To) -> i32 {
    let to_host = u32::from(to == To::Host);
    refuse_packet(ctx.skb.skb, to_host).cast_signed()
}

/// Does what [`refuse`] does. A separate function, because its headers would not fit into the caller's stack frame.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn refuse_packet(ctx: *mut __sk_buff, to_host: u32) -> u32 {
    let flags = if to_host == 0 { 0 } else { BPF_F_INGRESS };
    refuse_or_drop(&TcContext::new(ctx), flags.into()).cast_unsigned()
}

/// `flags` are those of the redirect to the packet's link.
#[inline(always)]
fn refuse_or_drop(ctx: &TcContext, flags: u64) -> i32 {
    let packet = KernelMaps.with_run(|run| run.packet());
    let answered = match packet {
        Some(packet) if refusal::is_answerable(&packet) && maps::may_answer() => {
            answer(ctx, &packet, flags)
        }
        _ => Err(NotWritable),
    };
    match answered {
        Ok(verdict) => verdict,
        Err(NotWritable) => {
            maps::count_reason(Reason::RefusalUnsent);
            DROP
        }
    }
}

#[inline(always)]
fn answer(ctx: &TcContext, packet: &Packet, flags: u64) -> Result<i32, NotWritable> {
    if packet.protocol.is_tcp() {
        reset(ctx, packet)?;
    } else {
        error(ctx, packet)?;
    }
    swap_link_addresses(ctx)?;
    // SAFETY: the helper takes any link.
    let verdict = unsafe { bpf_redirect(link(ctx), flags) };
    if verdict == i64::from(TC_ACT_REDIRECT) {
        Ok(TC_ACT_REDIRECT)
    } else {
        Err(NotWritable)
    }
}

/// Replaces the packet by a TCP reset.
#[inline(always)]
fn reset(ctx: &TcContext, packet: &Packet) -> Result<(), NotWritable> {
    /// The offsets of the sequence number and the checksum in a TCP header.
    const SEQUENCE: u32 = 4;
    const CHECKSUM: u32 = 16;
    let transport = packet.transport_offset;
    let [sequence] = load_words::<1>(ctx, transport + SEQUENCE).ok_or(NotWritable)?;
    let checksum = state_of_checksum(ctx, transport + CHECKSUM)?;
    set_length(ctx, transport + refusal::RESET_SIZE)?;
    store_header(ctx, packet, Answer::Reset)?;
    store(ctx, transport, &refusal::reset(packet, sequence, checksum))
}

/// Replaces the packet by an ICMP error, which quotes the beginning of the packet.
#[inline(always)]
fn error(ctx: &TcContext, packet: &Packet) -> Result<(), NotWritable> {
    /// The offset of the checksum in a UDP header.
    const CHECKSUM: u32 = 6;
    let transport = packet.transport_offset;
    if packet.protocol == Protocol::SCTP {
        let [checksum] = load_words::<1>(ctx, transport + sctp::CHECKSUM).ok_or(NotWritable)?;
        // The kernel would compute that of the packet in the answer.
        if checksum == 0 {
            return Err(NotWritable);
        }
    }
    let quoted = load_words::<2>(ctx, transport).ok_or(NotWritable)?;
    let checksum = state_of_checksum(ctx, transport + CHECKSUM)?;
    let icmp = match packet.family {
        Family::V4 => {
            let header = load_words::<5>(ctx, 0).ok_or(NotWritable)?;
            refusal::error(packet, &header, quoted, checksum)
        }
        Family::V6 => {
            let header = load_words::<10>(ctx, 0).ok_or(NotWritable)?;
            refusal::error(packet, &header, quoted, checksum)
        }
    };
    set_length(ctx, transport + refusal::QUOTED_SIZE)?;
    let size = refusal::error_size(packet.family);
    // SAFETY: the helper takes any size.
    check(unsafe { bpf_skb_adjust_room(ctx.skb.skb, size.cast_signed(), BPF_ADJ_ROOM_MAC, 0) })?;
    store_header(ctx, packet, Answer::Error)?;
    store(ctx, refusal::header_size(packet.family), &icmp)
}

/// Cuts the packet behind an offset from its network header.
#[inline(always)]
fn set_length(ctx: &TcContext, length: u32) -> Result<(), NotWritable> {
    // SAFETY: the helper checks the length.
    check(unsafe { bpf_skb_change_tail(ctx.skb.skb, network_header() + length, 0) })
}

/// Returns the state of the transport checksum at an offset from the network header. The kernel doesn't show it, but its
/// helper changes a checksum for a changed port only if the checksum is complete (`inet_proto_csum_replace_by_diff` in
/// net/core/utils.c).
#[inline(always)]
fn state_of_checksum(ctx: &TcContext, offset: u32) -> Result<Checksum, NotWritable> {
    /// Any difference other than 0.
    const DIFFERENCE: u64 = 1;
    let before = load_half(ctx, offset)?;
    let at = network_header() + offset;
    // SAFETY: the helper checks the packet's bounds.
    check(unsafe { bpf_l4_csum_replace(ctx.skb.skb, at, 0, DIFFERENCE, 0) })?;
    if load_half(ctx, offset)? == before {
        return Ok(Checksum::Partial);
    }
    Edits(ctx).store(offset, &before, 0)?;
    Ok(Checksum::Complete)
}

/// Reads 16 bits at an offset from the network header.
#[inline(always)]
fn load_half(ctx: &TcContext, offset: u32) -> Result<u16, NotWritable> {
    let mut half = 0_u16;
    load(ctx, network_header() + offset, &mut half)?;
    Ok(half)
}

#[inline(always)]
fn store_header(ctx: &TcContext, packet: &Packet, answer: Answer) -> Result<(), NotWritable> {
    match packet.family {
        Family::V4 => store(ctx, 0, &refusal::header_v4(packet, answer)),
        Family::V6 => store(ctx, 0, &refusal::header_v6(packet, answer)),
    }
}

/// Writes words at an offset from the network header.
#[inline(always)]
fn store<const WORDS: usize>(
    ctx: &TcContext,
    offset: u32,
    words: &[u32; WORDS],
) -> Result<(), NotWritable> {
    // A sum of the packet that the network card has computed changes, too (`CHECKSUM_COMPLETE`).
    Edits(ctx).store(offset, words, u64::from(BPF_F_RECOMPUTE_CSUM))
}

/// Swaps the source and the destination of the Ethernet header, if there is one.
#[inline(always)]
fn swap_link_addresses(ctx: &TcContext) -> Result<(), NotWritable> {
    if network_header() == 0 {
        return Ok(());
    }
    let mut addresses = [0_u16; ADDRESSES];
    load(ctx, 0, &mut addresses)?;
    let [a, b, c, d, e, f] = addresses;
    store_at(ctx, 0, &[d, e, f, a, b, c], 0)
}

/// Reads a value at an offset from the beginning of the packet.
#[inline(always)]
fn load<T: Copy>(ctx: &TcContext, offset: u32, value: &mut T) -> Result<(), NotWritable> {
    #[expect(clippy::cast_possible_truncation, reason = "a few bytes")]
    let length = size_of::<T>() as u32;
    let skb = ctx.skb.skb.cast_const().cast();
    // SAFETY: the helper checks the packet's bounds, and writes `length` bytes. Every bit pattern is valid.
    check(unsafe { bpf_skb_load_bytes(skb, offset, core::ptr::from_mut(value).cast(), length) })
}
