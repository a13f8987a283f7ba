//! The last translation of a socket, which is stored in the socket storage `origin`. The older translations of
//! UDP sockets are in the maps that [`crate::older`] describes.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    LAYOUT_VERSION,
    addr::{Address, Port, Protocol},
    service::{BackendState, FrontendKey},
};

/// The version of [`Origin`]. Open sockets keep their values across upgrades, so a change may use only
/// reserved fields, and must increment the version.
pub const ORIGIN_VERSION: u8 = 3;

/// The first version whose programs set [`Origin::CONNECTED`].
const VERSION_WITH_CONNECTED: u8 = 3;

/// The idle time after which a UDP flow chooses a backend again, in nanoseconds. The same as the conntrack
/// timeout for flows through kube-proxy (`net.netfilter.nf_conntrack_udp_timeout_stream`).
pub const UDP_IDLE_NS: u64 = 120_000_000_000;

/// A socket's translation: the VIP that was dialled, and the backend that was chosen.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Origin {
    /// The time at which a UDP flow was last used, in nanoseconds on the monotonic clock; 0 for TCP.
    pub last_used: u64,
    /// The address that was dialled.
    pub vip: Address,
    /// The address of the backend.
    pub backend: Address,
    /// The index of the backend in the array `backends`.
    pub index: u32,
    /// The backend's state when it was chosen.
    pub state: BackendState,
    /// The service port that owned the frontend when it was dialled.
    pub service: u32,
    /// The port that was dialled.
    pub vip_port: Port,
    /// The port of the backend.
    pub backend_port: Port,
    /// The transport protocol.
    pub protocol: Protocol,
    /// [`ORIGIN_VERSION`].
    pub version: u8,
    /// A combination of [`Origin::OVERFLOWED`], [`Origin::COUNTED`], [`Origin::HAS_OLDER`],
    /// [`Origin::REPLACED`] and [`Origin::CONNECTED`].
    pub flags: u16,
    /// The layout version of the map `reason_counts` that counts the socket as tracked, or 0 if none does. A
    /// newer layout counts from 0, so it must not count the release of a socket that it has not counted.
    pub tracked_by: u8,
    /// Zero.
    pub reserved: u8,
    /// Zero.
    pub reserved_half: u16,
}

impl Origin {
    /// Flag: a program of layout 7 or earlier stored older translations of this socket in `overflow`.
    pub const OVERFLOWED: u16 = 1;
    /// Flag: the socket is counted in the map `conns`, at [`Origin::index`]. Not set in values that were
    /// written before that map existed, or for kernel sockets, because no hook runs when they are closed.
    pub const COUNTED: u16 = 2;
    /// Flag: older translations of this socket are in the socket storage `older_few`.
    pub const HAS_OLDER: u16 = 4;
    /// Flag: the socket has chosen another backend for the VIP since. The translation is kept only because this
    /// backend may still answer.
    pub const REPLACED: u16 = 8;
    /// Flag: a connect() of the socket used this translation, and no later one dialled its backend. It counts only
    /// for a translation that leads to the socket's peer, because a later connect() may have failed.
    pub const CONNECTED: u16 = 16;
    /// The flags that stay with the socket when its translation is replaced.
    pub const LASTING_FLAGS: u16 = Self::OVERFLOWED | Self::HAS_OLDER;

    /// The value of [`Origin::tracked_by`] for a socket that the current layout counts as tracked.
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "checked below"
    )]
    pub const TRACKED: u8 = {
        assert!(LAYOUT_VERSION <= u8::MAX as u32);
        LAYOUT_VERSION as u8
    };

    /// The index and service port in a translation that leads not to a backend, but to the tunnel's ingress
    /// or to an address that refuses connections.
    pub const NO_BACKEND: u32 = u32::MAX;

    /// Creates a translation from a key to an address and port, with no backend index and not counted.
    #[inline(always)]
    #[must_use]
    pub fn new(key: &FrontendKey, backend: Address, backend_port: Port) -> Self {
        Self {
            last_used: 0,
            vip: key.address,
            backend,
            index: Self::NO_BACKEND,
            state: BackendState::default(),
            service: Self::NO_BACKEND,
            vip_port: key.port,
            backend_port,
            protocol: key.protocol,
            version: ORIGIN_VERSION,
            flags: 0,
            tracked_by: 0,
            reserved: 0,
            reserved_half: 0,
        }
    }

    /// Creates a value without a translation, for a UDP socket that has only older ones.
    #[inline(always)]
    #[must_use]
    pub fn without_translation() -> Self {
        let unspecified = Address::from_halves([0, 0]);
        let key = FrontendKey::new(unspecified, Port::from_network(0), Protocol::UDP);
        Self::new(&key, unspecified, Port::from_network(0))
    }

    /// Copies another translation, word by word. LLVM would compile an assignment between two map values into a
    /// call to a loop.
    #[inline(always)]
    pub fn copy_from(&mut self, other: &Self) {
        let to: &mut [u64; 8] = zerocopy::transmute_mut!(self);
        let from: &[u64; 8] = zerocopy::transmute_ref!(other);
        to[0] = from[0];
        to[1] = from[1];
        to[2] = from[2];
        to[3] = from[3];
        to[4] = from[4];
        to[5] = from[5];
        to[6] = from[6];
        to[7] = from[7];
    }

    /// Returns true if a UDP flow has used this translation within the time in [`UDP_IDLE_NS`]. An unused
    /// entry is not live.
    #[inline(always)]
    #[must_use]
    pub const fn is_live(&self, now: u64) -> bool {
        self.last_used != 0 && now.saturating_sub(self.last_used) < UDP_IDLE_NS
    }

    /// Returns true if the socket has chosen another backend for the VIP since.
    #[inline(always)]
    #[must_use]
    pub const fn is_replaced(&self) -> bool {
        self.flags & Self::REPLACED != 0
    }

    /// Returns true if the socket's last connect() used this translation, or may have used it because the value
    /// was stored before [`Origin::CONNECTED`] existed.
    #[inline(always)]
    #[must_use]
    pub const fn is_of_connect(&self) -> bool {
        self.version < VERSION_WITH_CONNECTED || self.flags & Self::CONNECTED != 0
    }

    /// Returns true if two translations lead from the same VIP to the same backend.
    #[inline(always)]
    #[must_use]
    pub fn is_same(&self, other: &Self) -> bool {
        self.index == other.index
            && self.state == other.state
            && self.leads_to(&other.backend, other.backend_port)
            && self.vip_port == other.vip_port
            && self.vip == other.vip
    }

    /// Returns true if the socket may have older translations.
    #[inline(always)]
    #[must_use]
    pub const fn has_older(&self) -> bool {
        self.flags & Self::LASTING_FLAGS != 0
    }

    /// Returns true if the current layout counts the socket as tracked.
    #[inline(always)]
    #[must_use]
    pub const fn is_tracked(&self) -> bool {
        self.tracked_by == Self::TRACKED
    }

    /// Returns the index of the backend that counts this socket as an open connection, or `None` if the
    /// socket is not counted.
    #[inline(always)]
    #[must_use]
    pub const fn counted_index(&self) -> Option<u32> {
        if self.flags & Self::COUNTED == 0 {
            None
        } else {
            Some(self.index)
        }
    }

    /// Returns true if this is the translation of `key`.
    #[inline(always)]
    #[must_use]
    pub fn is_for(&self, key: &FrontendKey) -> bool {
        self.vip_port == key.port && self.protocol == key.protocol && self.vip == key.address
    }

    /// Returns true if this address and port are the backend's.
    #[inline(always)]
    #[must_use]
    pub fn leads_to(&self, address: &Address, port: Port) -> bool {
        self.backend_port == port && self.backend == *address
    }
}

/// Key of the hash maps `older_shared` and `overflow`: a socket, and either the VIP or the backend of one of
/// its translations.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct OverflowKey {
    /// The socket's cookie.
    pub cookie: u64,
    /// The address of the VIP or backend.
    pub address: Address,
    /// The port of the VIP or backend.
    pub port: Port,
    /// The direction, which distinguishes a VIP from a backend.
    pub direction: Direction,
    reserved: u8,
    reserved_word: u32,
}

impl OverflowKey {
    /// Creates a key from a socket's cookie and a VIP or backend.
    ///
    /// The reserved fields are not an array of bytes, because programs would fill an array in a loop, and the
    /// verifier would follow every iteration.
    #[inline(always)]
    #[must_use]
    pub const fn new(cookie: u64, address: Address, port: Port, direction: Direction) -> Self {
        Self {
            cookie,
            address,
            port,
            direction,
            reserved: 0,
            reserved_word: 0,
        }
    }

    /// Copies another key, for the same reason as [`Origin::copy_from`]. The reserved fields must be zero already.
    #[inline(always)]
    pub const fn copy_from(&mut self, other: &Self) {
        self.set(other.cookie, &other.address, other.port, other.direction);
    }

    /// Changes the key in place. The reserved fields must be zero already.
    #[inline(always)]
    pub const fn set(&mut self, cookie: u64, address: &Address, port: Port, direction: Direction) {
        self.cookie = cookie;
        self.address = Address::from_halves(address.halves());
        self.port = port;
        self.direction = direction;
    }
}

/// The direction of an entry in `older_shared` or `overflow`.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(transparent)]
pub struct Direction(u8);

impl Direction {
    /// From a VIP to its backend.
    pub const FORWARD: Self = Self(0);
    /// From a backend to its VIP.
    pub const REVERSE: Self = Self(1);
}

/// Value of `overflow`, which programs of layout 7 and earlier wrote: the translation, and a copy of the
/// entry's key. The kernel may reuse a hash element
/// for another key while a program is reading it, so readers compare this copy with the key that they looked
/// up.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Overflow {
    /// A copy of the entry's key.
    pub key: OverflowKey,
    /// The translation.
    pub origin: Origin,
}

const _: () = {
    assert!(size_of::<Origin>() == 64);
    assert!(offset_of!(Origin, vip) == 8);
    assert!(offset_of!(Origin, backend) == 24);
    assert!(offset_of!(Origin, index) == 40);
    assert!(offset_of!(Origin, vip_port) == 52);
    assert!(offset_of!(Origin, version) == 57);
    assert!(offset_of!(Origin, flags) == 58);
    assert!(offset_of!(Origin, tracked_by) == 60);
    assert!(size_of::<OverflowKey>() == 32);
    assert!(offset_of!(OverflowKey, address) == 8);
    assert!(size_of::<Overflow>() == 96);
};
