//! Walks over IPv6 extension headers (RFC 8200 section 4) to the transport header.

use super::{Fragment, HEADER_V6, PacketBytes, Unread};

/// The maximum number of IPv6 extension headers before the transport header. The bound is needed by the verifier, and
/// so that an attacker can't make the walk long.
pub const MAX_EXTENSION_HEADERS: u32 = 8;

/// The maximum offset of a header behind extension headers, and a mask for it, which shows the verifier the bound.
pub const MAX_OFFSET: u32 = 0x1fff;

/// The number of IPv6's next header field that stands for a header (RFC 8200 section 4, RFC 4302 section 2).
pub(super) mod next_header {
    pub(in crate::packet) const HOP_BY_HOP: u32 = 0;
    pub(in crate::packet) const ROUTING: u32 = 43;
    pub(in crate::packet) const FRAGMENT: u32 = 44;
    pub(in crate::packet) const DESTINATION_OPTIONS: u32 = 60;
}

/// The bits of the fragment field: an offset other than 0, and "more fragments" (RFC 8200 section 4.5).
const FRAGMENT: u32 = 0xfff9;
/// The bits of the offset in the fragment field.
const FRAGMENT_OFFSET: u32 = 0xfff8;

/// The place behind the extension headers of a packet: the number of the first other header, its offset, and the position of
/// the packet if it is a fragment.
pub(super) type BehindExtensions = (u32, u32, Option<Fragment>);

/// A walk over extension headers: what follows, as a number that a function can take and return in a register.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Walk(u64);

impl Walk {
    /// The bits of each part: the fragment's number, the offset, the number of the header, and what was found.
    const OFFSET: u32 = 32;
    const NEXT: u32 = 48;
    const FOUND: u32 = 56;
    // The values of what was found.
    const WHOLE: u64 = 0;
    const FIRST_FRAGMENT: u64 = 1;
    const OTHER_FRAGMENT: u64 = 2;
    const OTHER_PROTOCOL: u64 = 3;
    const MALFORMED: u64 = 4;

    /// Converts a number of [`Self::number`].
    #[inline(always)]
    #[must_use]
    pub const fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number.
    #[inline(always)]
    #[must_use]
    pub const fn number(self) -> u64 {
        self.0
    }

    #[inline(always)]
    #[expect(clippy::as_conversions, reason = "`From` is not const")]
    const fn behind(next: u32, offset: u32, fragment: Option<Fragment>) -> Self {
        let (found, id) = match fragment {
            None => (Self::WHOLE, 0),
            Some(Fragment { id, is_first: true }) => (Self::FIRST_FRAGMENT, id),
            Some(Fragment { id, .. }) => (Self::OTHER_FRAGMENT, id),
        };
        Self(
            found << Self::FOUND
                | (next as u64 & 0xff) << Self::NEXT
                | (offset as u64 & 0xffff) << Self::OFFSET
                | id as u64,
        )
    }

    /// Returns the same walk with an offset that counts from an earlier place, for which it is larger.
    #[inline(always)]
    #[expect(clippy::as_conversions, reason = "`From` is not const")]
    pub(super) const fn moved_by(self, distance: u32) -> Self {
        let offset = (self.0 >> Self::OFFSET).wrapping_add(distance as u64) & 0xffff;
        Self(self.0 & !(0xffff << Self::OFFSET) | offset << Self::OFFSET)
    }

    /// Returns true if an extension header follows, which can be skipped.
    #[inline(always)]
    #[expect(clippy::as_conversions, reason = "a part of the number")]
    const fn is_before_header(self) -> bool {
        let is_header = matches!(
            (self.0 >> Self::NEXT) as u32 & 0xff,
            next_header::HOP_BY_HOP
                | next_header::ROUTING
                | next_header::FRAGMENT
                | next_header::DESTINATION_OPTIONS
        );
        is_header && self.0 >> Self::FOUND <= Self::FIRST_FRAGMENT
    }

    /// Skips one header.
    #[inline(always)]
    #[must_use]
    pub fn skip_header(self, bytes: &impl PacketBytes) -> Self {
        let Ok((next, offset, mut fragment)) = self.result() else {
            return self;
        };
        let Some([word]) = bytes.words::<1>(offset) else {
            return Self::failed(Self::MALFORMED);
        };
        let word = u32::from_be(word);
        let length = if next == next_header::FRAGMENT {
            if word & FRAGMENT != 0 {
                let is_first = word & FRAGMENT_OFFSET == 0;
                let Some([id]) = bytes.words::<1>(offset + 4) else {
                    return Self::failed(Self::MALFORMED);
                };
                fragment = Some(Fragment { id, is_first });
                if !is_first {
                    return Self::behind(word >> 24, offset, fragment);
                }
            }
            8
        } else {
            // The destination is the next stop, and not the final one, while segments are left.
            if next == next_header::ROUTING && word & 0xff != 0 {
                return Self::failed(Self::OTHER_PROTOCOL);
            }
            (((word >> 16) & 0xff) + 1) * 8
        };
        if offset + length > MAX_OFFSET {
            return Self::failed(Self::MALFORMED);
        }
        Self::behind(word >> 24, offset + length, fragment)
    }

    #[inline(always)]
    const fn failed(found: u64) -> Self {
        Self(found << Self::FOUND)
    }

    #[inline(always)]
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "parts of the number"
    )]
    const fn result(self) -> Result<BehindExtensions, Unread> {
        let next = (self.0 >> Self::NEXT) as u32 & 0xff;
        let offset = (self.0 >> Self::OFFSET) as u32 & MAX_OFFSET;
        let id = self.0 as u32;
        let fragment = match self.0 >> Self::FOUND {
            Self::WHOLE => None,
            Self::FIRST_FRAGMENT => Some(Fragment { id, is_first: true }),
            Self::OTHER_FRAGMENT => Some(Fragment {
                id,
                is_first: false,
            }),
            Self::OTHER_PROTOCOL => return Err(Unread::OtherProtocol),
            _ => return Err(Unread::Malformed),
        };
        Ok((next, offset, fragment))
    }
}

/// Walks over extension headers, up to the data of a fragment other than the first. `next` is the number of the first header.
#[inline(always)]
pub(super) fn skip(bytes: &impl PacketBytes, next: u32) -> Result<BehindExtensions, Unread> {
    let mut walk = Walk::behind(next, HEADER_V6, None);
    for _ in 0..MAX_EXTENSION_HEADERS {
        if !walk.is_before_header() {
            return walk.result();
        }
        walk = bytes.skip_header(walk);
    }
    if walk.is_before_header() {
        return Err(Unread::Malformed);
    }
    walk.result()
}
