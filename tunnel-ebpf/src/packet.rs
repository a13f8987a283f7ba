//! Reads packets in tc programs, with bounds checks.
#![expect(unsafe_code, reason = "packets are read by BPF helpers")]

use aya_ebpf::{
    EbpfContext as _, bindings::bpf_hdr_start_off::BPF_HDR_START_NET,
    helpers::generated::bpf_skb_load_bytes_relative, programs::TcContext,
};

/// Returns a packet's network-layer protocol (`ETH_P_…`) in host byte order.
#[inline(always)]
pub(crate) fn protocol(ctx: &TcContext) -> u16 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "the protocol is in the first two bytes, in network byte order"
    )]
    u16::from_be(ctx.skb.protocol() as u16)
}

/// Returns the last two bytes of a word from a packet, in host byte order.
#[inline(always)]
pub(crate) const fn low_half(word: u32) -> u16 {
    #[expect(
        clippy::cast_possible_truncation,
        reason = "only the low half is wanted"
    )]
    let half = u32::from_be(word) as u16;
    half
}

/// Reads words at an offset from the network header, in network byte order. Returns `None` if the packet is
/// too short.
#[inline(always)]
pub(crate) fn load_words<const WORDS: usize>(ctx: &TcContext, offset: u32) -> Option<[u32; WORDS]> {
    let mut words = [0_u32; WORDS];
    #[expect(clippy::cast_possible_truncation, reason = "a few words")]
    let length = size_of::<[u32; WORDS]>() as u32;
    // SAFETY: the helper checks the packet's bounds, and writes either exactly `length` bytes or none.
    let failed = unsafe {
        bpf_skb_load_bytes_relative(
            ctx.as_ptr(),
            offset,
            words.as_mut_ptr().cast(),
            length,
            BPF_HDR_START_NET,
        )
    };
    if failed == 0 { Some(words) } else { None }
}
