//! The older translations of a UDP socket that sends to several VIPs. The last translation is in the socket
//! storage `origin`.
//!
//! The most recently used ones are in the socket storage `older_few`, which is created when the socket uses a
//! second VIP. If that is full, the least recently used one moves to the socket storage `older_many`. If that
//! is full, too, the least recently used one moves to the hash map `older_shared`, which all sockets share. A
//! socket's entries in `older_shared` form a queue, so that they can be removed when the socket is closed.
//!
//! All hooks of a socket run while the kernel holds the socket's lock, and the close hook runs after all of
//! them. A program may therefore change the values of its own socket in place. Only the daemon reads them
//! concurrently.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    addr::{Address, Port},
    origin::{Direction, Origin, OverflowKey},
};

/// The number of translations in `older_few`.
pub const FEW: u32 = 6;
/// The number of translations in `older_many`.
pub const MANY: u32 = 112;
/// The maximum number of translations that a socket has in `older_shared`.
pub const MAX_SHARED: u32 = 512;

#[expect(clippy::as_conversions, reason = "`From` is not const")]
const FEW_LEN: usize = FEW as usize;
#[expect(clippy::as_conversions, reason = "`From` is not const")]
const MANY_LEN: usize = MANY as usize;

/// Value of `older_few`: a socket's few older translations.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct OlderFew {
    /// The translations. Unused entries are zero. If the socket is connected by an older translation
    /// ([`Origin::CONNECTED`]), it is the first entry, where the daemon finds it.
    pub entries: [Origin; FEW_LEN],
}

/// Value of `older_many`: further older translations of a socket.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct OlderMany {
    /// The translation that is being written to `older_shared`. It is here because the stack is small.
    pub scratch: OlderShared,
    /// A key that is being looked up, likewise.
    pub spare: OverflowKey,
    /// The keys of the oldest and of the newest translation that the socket has in `older_shared`.
    pub queue: [OverflowKey; 2],
    /// The number of translations that the socket has in `older_shared`.
    pub shared: u32,
    /// The number of entries that are or were in use.
    pub used: u32,
    /// For each entry, a hash of its VIP in the lower half, and a hash of its backend in the upper half.
    pub tags: [u32; MANY_LEN],
    /// The translations.
    pub entries: [Origin; MANY_LEN],
}

/// Value of `older_shared`: a translation, a copy of the entry's key, and the key of the translation that the
/// socket moved to the map next.
///
/// Each translation has two entries. The one under its VIP ([`Direction::FORWARD`]) is in the socket's queue.
/// The one under its backend ([`Direction::REVERSE`]) is not, and its `next` has no meaning.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct OlderShared {
    /// A copy of the entry's key.
    pub key: OverflowKey,
    /// The translation.
    pub origin: Origin,
    /// The key of the next translation in the socket's queue.
    pub next: OverflowKey,
}

/// Returns a hash of an address and port in 16 bits.
#[inline(always)]
#[must_use]
#[expect(clippy::as_conversions, reason = "`From` is not const")]
pub const fn tag(address: &Address, port: Port) -> u32 {
    let [upper, lower] = address.halves();
    let mixed = (upper ^ lower.rotate_left(23) ^ port.to_network() as u64)
        .wrapping_mul(0x9e37_79b9_7f4a_7c15);
    (mixed >> 48) as u32
}

/// Returns a translation's tags, for [`OlderMany::tags`].
#[inline(always)]
#[must_use]
pub const fn tags(origin: &Origin) -> u32 {
    tag(&origin.vip, origin.vip_port) | tag(&origin.backend, origin.backend_port) << 16
}

/// Returns true if a translation leads from this VIP, or to this backend, depending on the direction. A replaced
/// translation only leads to its backend.
#[inline(always)]
#[must_use]
fn matches(origin: &Origin, address: &Address, port: Port, direction: Direction) -> bool {
    if origin.last_used == 0 {
        false
    } else if direction == Direction::FORWARD {
        !origin.is_replaced() && origin.vip_port == port && origin.vip == *address
    } else {
        origin.leads_to(address, port)
    }
}

impl OlderFew {
    /// Returns the number of the most recently used translation of a VIP, or to a backend.
    ///
    /// This is not a loop, because LLVM would place the loop's parts in an order that Linux 5.10 rejects.
    #[inline(always)]
    #[must_use]
    pub fn find(&self, address: &Address, port: Port, direction: Direction) -> Option<u32> {
        let later = |(found, latest): (u32, u64), number, origin: &Origin| {
            if matches(origin, address, port, direction) && origin.last_used > latest {
                (number, origin.last_used)
            } else {
                (found, latest)
            }
        };
        let [first, second, third, fourth, fifth, sixth] = &self.entries;
        // An `Option` would leave its number undefined, and the verifier rejects any copy of an undefined value.
        let found = later((FEW, 0), 0, first);
        let found = later(found, 1, second);
        let found = later(found, 2, third);
        let found = later(found, 3, fourth);
        let found = later(found, 4, fifth);
        let (found, _) = later(found, 5, sixth);
        (found < FEW).then_some(found)
    }

    /// Returns the number of an unused entry, or else of the least recently used one. Entries before `first`
    /// are left out.
    ///
    /// Here and in the following functions, `at` converts a number to an index. Programs use it to hide the loop's
    /// variable from the compiler, which would otherwise turn the index into a pointer that the verifier can't
    /// follow.
    #[inline(always)]
    #[must_use]
    pub fn least_recent(&self, first: u32, at: impl Fn(u32) -> usize) -> u32 {
        let (mut found, mut earliest) = (first, u64::MAX);
        for number in 0..FEW {
            let Some(origin) = self.entries.get(at(number)) else {
                continue;
            };
            if number >= first && origin.last_used < earliest {
                earliest = origin.last_used;
                found = number;
            }
        }
        found
    }
}

impl OlderMany {
    /// Returns true if an entry is a translation of this VIP, or to this backend.
    #[inline(always)]
    #[must_use]
    pub fn matches(
        &self,
        index: usize,
        address: &Address,
        port: Port,
        direction: Direction,
    ) -> bool {
        let entry = self.entries.get(index);
        entry.is_some_and(|entry| matches(entry, address, port, direction))
    }

    /// Returns the number of the translation of a VIP, or of the first one that leads to a backend. Each VIP has
    /// at most one translation here that is not replaced.
    ///
    /// `is_match` must return the same as [`OlderMany::matches`]. It is called only for entries with the right
    /// tag. Programs pass a separate function, because the verifier would follow the comparison once for each
    /// entry.
    #[inline(always)]
    #[must_use]
    pub fn find(
        &self,
        address: &Address,
        port: Port,
        direction: Direction,
        at: impl Fn(u32) -> usize,
        is_match: impl Fn(u32) -> bool,
    ) -> Option<u32> {
        let wanted = tag(address, port);
        let shift = if direction == Direction::FORWARD {
            0
        } else {
            16
        };
        for number in 0..MANY {
            let Some(tags) = self.tags.get(at(number)) else {
                continue;
            };
            if tags >> shift & 0xffff == wanted && is_match(number) {
                return Some(number);
            }
        }
        None
    }

    /// Returns the number of an unused entry, or else of the least recently used one.
    #[inline(always)]
    #[must_use]
    pub fn least_recent(&self, at: impl Fn(u32) -> usize) -> u32 {
        if self.used < MANY {
            return self.used;
        }
        let (mut found, mut earliest) = (0, u64::MAX);
        for number in 0..MANY {
            let Some(origin) = self.entries.get(at(number)) else {
                continue;
            };
            if origin.last_used < earliest {
                earliest = origin.last_used;
                found = number;
            }
        }
        found
    }
}

const _: () = {
    // With its header of 72 bytes, or of 128 bytes before Linux 5.16 or so, each value fits into a power of two,
    // which is what the kernel allocates: 512 bytes and 8 KiB.
    assert!(size_of::<OlderFew>() + 128 == 512);
    assert!(size_of::<OlderMany>() + 128 <= 8192);
    assert!(offset_of!(OlderFew, entries) == 0);
    assert!(size_of::<OlderShared>() == 128);
};

#[cfg(test)]
mod tests;
