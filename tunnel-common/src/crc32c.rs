//! The checksum of SCTP, CRC32c (RFC 9260 appendix A), as far as a change of the ports changes it.
//!
//! The checksum is linear: that of a changed packet differs from the old one by that of the change alone. Of a change in the
//! first four bytes, it depends only on these bytes and on the length of the packet. Polynomials are 32 bits, the coefficient
//! of x^0 in the highest one.

/// The generator polynomial, without x^32.
const POLYNOMIAL: u32 = 0x82f6_3b78;
/// The polynomial x^0.
const ONE: u32 = 1 << 31;
/// The polynomial x^8, by which the checksum is multiplied for each byte.
const BYTE: u32 = ONE >> 8;
/// The number of bits in the length of a packet.
const LENGTH_BITS: u32 = 16;

/// Multiplies two polynomials modulo the generator polynomial. Without branches, so that the verifier need not follow each
/// combination.
#[inline(always)]
#[must_use]
pub const fn multiply(a: u32, b: u32) -> u32 {
    let (mut product, mut shifted) = (0, b);
    let mut bit = 0;
    while bit < 32 {
        let is_set = (a >> (31 - bit)) & 1;
        product ^= shifted & is_set.wrapping_neg();
        // Times x.
        let carry = shifted & 1;
        shifted = (shifted >> 1) ^ (POLYNOMIAL & carry.wrapping_neg());
        bit += 1;
    }
    product
}

/// Returns the difference of the checksums of two packets of a length in bytes, which differ in their first four bytes. `change`
/// is the difference of these bytes (XOR), as a little-endian word, and so is the result. `multiply` is [`multiply`].
#[inline(always)]
#[must_use]
pub fn difference(change: u32, length: u32, multiply: impl Fn(u32, u32) -> u32) -> u32 {
    let (mut sum, mut power) = (change, BYTE);
    for bit in 0..LENGTH_BITS {
        if (length >> bit) & 1 != 0 {
            sum = multiply(sum, power);
        }
        power = multiply(power, power);
    }
    sum
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::{collection::vec, prelude::*};

    use super::*;

    /// Computes the checksum bit by bit.
    pub(crate) fn crc32c(bytes: &[u8]) -> u32 {
        let mut crc = u32::MAX;
        for byte in bytes {
            crc ^= u32::from(*byte);
            for _ in 0..8 {
                crc = if crc & 1 == 0 {
                    crc >> 1
                } else {
                    (crc >> 1) ^ POLYNOMIAL
                };
            }
        }
        !crc
    }

    #[test]
    fn the_scalar_checksum_is_that_of_the_standard() {
        // RFC 3720 appendix B.4, and the check value of CRC-32C.
        assert_eq!(crc32c(&[0; 32]), 0x8a91_36aa);
        assert_eq!(crc32c(b"123456789"), 0xe306_9283);
    }

    proptest! {
        #[test]
        fn the_difference_leads_from_the_old_checksum_to_the_new_one(
            mut packet in vec(any::<u8>(), 12..2000), ports in any::<[u8; 4]>(),
        ) {
            let (old, first) = (crc32c(&packet), u32::from_le_bytes([packet[0], packet[1], packet[2], packet[3]]));
            packet[..4].copy_from_slice(&ports);
            let change = first ^ u32::from_le_bytes(ports);
            let length = u32::try_from(packet.len()).expect("a length");
            prop_assert_eq!(old ^ difference(change, length, multiply), crc32c(&packet));
        }
    }
}
