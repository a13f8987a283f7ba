//! Determines whether the sender of a packet counts as local: as a pod of this node or cluster, whose traffic is not
//! external (kube-proxy `pkg/proxy/util/localdetector.go`).

use crate::{addr::Address, service::SourceRange};

/// The number of entries in the array `local_ranges`.
pub const MAX_LOCAL_RANGES: u32 = 16;

/// An entry of `local_ranges` that is not used.
pub const UNUSED: SourceRange = SourceRange {
    first: Address::UNSPECIFIED,
    last: Address::UNSPECIFIED,
};

/// Returns an entry of `local_ranges` for a family in which senders are distinguished, but none that reaches an uplink is
/// local: it contains only the loopback address, from which no packet is translated.
#[must_use]
pub const fn nobody(is_v4: bool) -> SourceRange {
    let address = if is_v4 {
        Address::LOOPBACK_V4
    } else {
        Address::LOOPBACK_V6
    };
    SourceRange {
        first: address,
        last: address,
    }
}

/// The relation of a sender to this cluster.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Locality {
    /// Senders of this family are not distinguished.
    Unknown = 0,
    /// The sender is not local.
    Foreign = 1,
    /// The sender is local.
    Local = 2,
}

impl Locality {
    /// Returns the locality as a number, which a function can return in a register.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Returns the locality with this number.
    #[inline(always)]
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        match number {
            1 => Self::Foreign,
            2 => Self::Local,
            _ => Self::Unknown,
        }
    }

    /// Returns the locality of a sender, given the results of [`relation`] for all entries of `local_ranges`. Senders of a
    /// family without ranges are not distinguished.
    #[inline(always)]
    #[must_use]
    pub fn of(relation: impl Fn(u32) -> u32) -> Self {
        // Without branches, so that the verifier need not follow each combination.
        let relations = (0..MAX_LOCAL_RANGES).fold(0, |all, index| all | relation(index));
        if relations & CONTAINED != 0 {
            Self::Local
        } else if relations & SAME_FAMILY != 0 {
            Self::Foreign
        } else {
            Self::Unknown
        }
    }
}

/// The bit of [`relation`] for a range of the sender's family.
const SAME_FAMILY: u32 = 1;
/// The bit of [`relation`] for a range that contains the sender.
pub(crate) const CONTAINED: u32 = 2;

/// Returns the relation of a sender to a range, as bits.
#[inline(always)]
#[must_use]
pub fn relation(sender: &Address, range: &SourceRange) -> u32 {
    if range.last == Address::UNSPECIFIED || range.first.is_v4() != sender.is_v4() {
        0
    } else if range.first <= *sender && *sender <= range.last {
        SAME_FAMILY | CONTAINED
    } else {
        SAME_FAMILY
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn address(text: &str) -> Address {
        Address::from_ip(text.parse().expect("an address"))
    }

    fn locality(sender: &str, ranges: &[SourceRange]) -> Locality {
        let all = [ranges, &[UNUSED; 16]].concat();
        Locality::of(|index| relation(&address(sender), &all[index as usize]))
    }

    #[test]
    fn a_sender_is_local_in_a_range_and_foreign_in_a_family_that_has_another_one() {
        let range = SourceRange {
            first: address("10.0.0.0"),
            last: address("10.0.255.255"),
        };
        let v6 = SourceRange {
            first: address("fd00::"),
            last: address("fd00::ffff"),
        };
        assert_eq!(locality("10.0.3.4", &[range]), Locality::Local);
        assert_eq!(locality("10.1.0.0", &[range]), Locality::Foreign);
        assert_eq!(locality("fd00::1", &[range]), Locality::Unknown);
        assert_eq!(locality("fd00::1", &[range, v6]), Locality::Local);
        assert_eq!(locality("fd01::", &[range, v6]), Locality::Foreign);
        assert_eq!(locality("10.0.3.4", &[v6]), Locality::Unknown);
        assert_eq!(locality("10.0.3.4", &[]), Locality::Unknown);
        assert_eq!(locality("10.0.3.4", &[nobody(true)]), Locality::Foreign);
        assert_eq!(locality("fd00::1", &[nobody(true)]), Locality::Unknown);
        assert_eq!(locality("fd00::1", &[nobody(false)]), Locality::Foreign);
    }
}
