//! Updates the checksum of SCTP packets. Each part is a separate function, because the verifier checks such a function only
//! once, and for its stack frame.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use aya_ebpf::{bindings::__sk_buff, programs::TcContext};
use tunnel_common::{
    crc32c,
    packet::{PacketBytes as _, extensions::MAX_OFFSET, transport_length},
};

use super::{Bytes, Edits, NotWritable, family};

/// The offset of the checksum in the common header (RFC 9260 section 3.1).
pub(super) const CHECKSUM: u32 = 8;

/// Updates the checksum of the packet whose SCTP header is at an offset from the network header, for a change of its ports. A
/// checksum of 0 stays: the network card or the kernel computes it when the packet leaves (`CHECKSUM_PARTIAL`). Returns 0 for
/// success.
#[inline(never)]
#[unsafe(no_mangle)]
pub(super) extern "C" fn update_sctp_checksum(
    ctx: *mut __sk_buff,
    offset: u32,
    change: u32,
) -> u32 {
    match update(&TcContext::new(ctx), offset & MAX_OFFSET, change) {
        Ok(()) => 0,
        Err(NotWritable) => 1,
    }
}

#[inline(always)]
fn update(ctx: &TcContext, offset: u32, change: u32) -> Result<(), NotWritable> {
    let bytes = Bytes(ctx);
    let [old] = bytes.words::<1>(offset + CHECKSUM).ok_or(NotWritable)?;
    if old == 0 {
        return Ok(());
    }
    let family = family(ctx).map_err(|_| NotWritable)?;
    let length = transport_length(&bytes, family, offset).ok_or(NotWritable)?;
    let multiply = |a, b| multiply_polynomials(a, b);
    let new = old ^ crc32c::difference(change, length, multiply);
    Edits(ctx).store(offset + CHECKSUM, &new, 0)
}

/// Calls [`crc32c::multiply`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn multiply_polynomials(a: u32, b: u32) -> u32 {
    crc32c::multiply(a, b)
}
