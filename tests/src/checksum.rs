//! The checksum of IP, TCP, UDP and ICMP.

/// Returns the ones' complement sum of bytes (RFC 1071), as if the parts followed each other. Each part but the last has an
/// even length. Bytes with a correct checksum have the sum 0xffff.
#[must_use]
pub fn sum_of(parts: &[&[u8]]) -> u16 {
    let mut sum = 0_u64;
    for part in parts {
        for pair in part.chunks(2) {
            let [high, low] = [pair[0], pair.get(1).copied().unwrap_or(0)];
            sum += u64::from(u16::from_be_bytes([high, low]));
        }
    }
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    u16::try_from(sum).unwrap_or(0)
}
