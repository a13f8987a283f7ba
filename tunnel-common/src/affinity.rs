//! Session affinity (`sessionAffinity: ClientIP`): the entries of the map `affinity`.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    addr::Address,
    service::{BackendState, Membership},
};

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// The client of a Service: an IP address, or a network namespace.
///
/// At its connect a socket has no address yet, unless it was bound to one. The client is then the address
/// of the socket's network namespace, or the namespace itself if that address can't be read. So all
/// sockets of a pod are one client, and so are all sockets of the host.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Client {
    /// The address of the client. For a network namespace, the last two words are its cookie.
    address: Address,
    /// [`Client::ADDRESS`], or 1 for a network namespace.
    kind: u32,
}

impl Client {
    /// The kind of a client that is identified by its address.
    pub const ADDRESS: u32 = 0;
    const NAMESPACE: u32 = 1;

    /// Returns the client that is identified by an address.
    #[inline(always)]
    #[must_use]
    pub const fn of_address(address: Address) -> Self {
        Self {
            address,
            kind: Self::ADDRESS,
        }
    }

    /// Returns the client that is identified by the cookie of its network namespace.
    #[inline(always)]
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::as_conversions,
        reason = "the two halves of the cookie"
    )]
    pub const fn of_namespace(cookie: u64) -> Self {
        Self {
            address: Address::from_words([0, 0, (cookie >> 32) as u32, cookie as u32]),
            kind: Self::NAMESPACE,
        }
    }

    /// Returns the client as scalars: its kind, and the halves of its address.
    #[inline(always)]
    #[must_use]
    pub const fn parts(&self) -> (u32, [u64; 2]) {
        (self.kind, self.address.halves())
    }

    /// Creates a client from its [`Client::parts`].
    #[inline(always)]
    #[must_use]
    pub const fn from_parts(kind: u32, halves: [u64; 2]) -> Self {
        Self {
            address: Address::from_halves(halves),
            kind,
        }
    }

    /// Returns the client as words, to be hashed.
    #[inline(always)]
    #[must_use]
    pub const fn words(&self) -> &[u32; 5] {
        zerocopy::transmute_ref!(self)
    }
}

/// Key of the map `affinity`: a client and a service port. All frontends of the service port share the
/// entry, as in kube-proxy (`pkg/proxy/nftables/proxier.go`).
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct AffinityKey {
    /// The client.
    pub client: Client,
    /// The service port.
    pub service: u32,
}

/// Value of the map `affinity`: the client's backend, and the key of the entry. The kernel may reuse a
/// hash element for another key while a program reads it, so readers compare the key.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Affinity {
    /// The time of the client's last connect, in nanoseconds of the monotonic clock.
    pub last_used: u64,
    /// The index of the backend.
    pub index: u32,
    /// The state of the backend when it was chosen. It differs in every generation of the index.
    pub state: BackendState,
    /// The key of this entry.
    pub key: AffinityKey,
}

impl Affinity {
    /// Returns true if the client keeps its backend: its last connect is less than `seconds` ago, and
    /// the backend still serves in the same generation and is in the wanted set.
    ///
    /// A concurrent connect of the client may store a time later than `now`. Its entry is valid.
    #[inline(always)]
    #[must_use]
    pub fn is_valid(
        &self,
        seconds: u32,
        state: BackendState,
        (has, wanted): (Membership, Membership),
        now: u64,
    ) -> bool {
        self.state == state
            && state.is_serving()
            && has.includes(wanted)
            && now.saturating_sub(self.last_used)
                < u64::from(seconds).wrapping_mul(NANOS_PER_SECOND)
    }
}

const _: () = {
    assert!(size_of::<Client>() == 20);
    assert!(size_of::<AffinityKey>() == 24);
    assert!(size_of::<Affinity>() == 40);
    assert!(offset_of!(Affinity, key) == 16);
};

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: u64 = NANOS_PER_SECOND;

    #[test]
    fn a_client_survives_the_conversion_to_parts() {
        for client in [
            Client::of_address(Address::from_ip([10, 1, 2, 3].into())),
            Client::of_address(Address::LOOPBACK_V6),
            Client::of_namespace(0x0123_4567_89ab_cdef),
        ] {
            let (kind, halves) = client.parts();

            assert_eq!(Client::from_parts(kind, halves), client);
        }
    }

    #[test]
    fn a_client_keeps_its_backend_until_the_timeout_and_while_the_backend_serves_in_the_set() {
        let (cluster, local, none) = (Membership::CLUSTER, Membership::LOCAL, Membership::NONE);
        let (all, same) = (cluster.union(local), (cluster, cluster));
        let serving = BackendState::default().next_generation();
        let (gone, next) = (serving.removed(), serving.removed().next_generation());
        let (last, end) = (5 * SECOND, 15 * SECOND);
        let affinity = Affinity {
            last_used: last,
            index: 7,
            state: serving,
            key: AffinityKey {
                client: Client::of_namespace(9),
                service: 3,
            },
        };
        for (claim, state, sets, now, holds) in [
            ("at once", serving, same, last, true),
            ("in time", serving, same, end - 1, true),
            ("too late", serving, same, end, false),
            ("stored concurrently", serving, same, last - 1, true),
            ("it is removed", gone, same, last, false),
            ("the index is reused", next, same, last, false),
            ("it is in both sets", serving, (all, local), last, true),
            ("not here", serving, (cluster, local), last, false),
            ("only here", serving, (local, cluster), last, false),
            ("in no set", serving, (none, cluster), last, false),
        ] {
            assert_eq!(affinity.is_valid(10, state, sets, now), holds, "{claim}");
        }
    }

    #[test]
    fn the_client_of_a_namespace_never_equals_that_of_an_address() {
        let cookie = 0xffff_0a00_0001;
        let client = Client::of_namespace(cookie);
        let words = client.words();
        let address = Address::from_words([words[0], words[1], words[2], words[3]]);

        assert_ne!(Client::of_namespace(cookie), Client::of_address(address));
        assert_ne!(
            Client::of_namespace(1),
            Client::of_namespace(1 << 32),
            "both halves of the cookie count"
        );
    }
}
