//! Session affinity (`sessionAffinity: ClientIP`): the keys and values of the map `affinity`.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    addr::Address,
    service::{BackendState, Membership},
};

const NANOS_PER_SECOND: u64 = 1_000_000_000;

/// A client of a Service: an IP address, a network namespace, or a user.
///
/// A socket that is not bound to an address has none yet when it connects. Its client is then the address of
/// the socket's network namespace, or the namespace itself if that address can't be read. All sockets in a
/// pod are therefore one client, and so are all sockets on the host.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Client {
    /// The client's address. For a network namespace, the last two words hold its cookie; for a user, its id.
    address: Address,
    /// [`Client::ADDRESS`], 1 for a network namespace, or 2 for a user.
    kind: u32,
}

impl Client {
    /// The kind of a client that is identified by its address.
    pub const ADDRESS: u32 = 0;
    const NAMESPACE: u32 = 1;
    const USER_NAMESPACE: u32 = 2;

    /// Returns the client identified by an address.
    #[inline(always)]
    #[must_use]
    pub const fn of_address(address: Address) -> Self {
        Self {
            address,
            kind: Self::ADDRESS,
        }
    }

    /// Returns the client identified by the cookie of its network namespace.
    #[inline(always)]
    #[must_use]
    pub const fn of_namespace(cookie: u64) -> Self {
        Self::of_number(cookie, Self::NAMESPACE)
    }

    /// Returns the client identified by a user namespace: all network namespaces that belong to it, or to user
    /// namespaces in it. `number` is the kernel address of the user namespace, or 0 for all those that users without
    /// privileges created.
    #[inline(always)]
    #[must_use]
    pub const fn of_user_namespace(number: u64) -> Self {
        Self::of_number(number, Self::USER_NAMESPACE)
    }

    #[inline(always)]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::as_conversions,
        reason = "the two halves of the number"
    )]
    const fn of_number(number: u64, kind: u32) -> Self {
        Self {
            address: Address::from_words([0, 0, (number >> 32) as u32, number as u32]),
            kind,
        }
    }

    /// Returns the client as scalars: its kind, and the two halves of its address.
    #[inline(always)]
    #[must_use]
    pub const fn parts(&self) -> (u32, [u64; 2]) {
        (self.kind, self.address.halves())
    }

    /// Creates a client from the result of [`Client::parts`].
    #[inline(always)]
    #[must_use]
    pub const fn from_parts(kind: u32, halves: [u64; 2]) -> Self {
        Self {
            address: Address::from_halves(halves),
            kind,
        }
    }

    /// Returns the client as words, for hashing.
    #[inline(always)]
    #[must_use]
    pub const fn words(&self) -> &[u32; 5] {
        zerocopy::transmute_ref!(self)
    }
}

/// Key of the map `affinity`: a client and a service port. All frontends of a service port share one entry
/// per client, as in kube-proxy (`pkg/proxy/nftables/proxier.go`).
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct AffinityKey {
    /// The client.
    pub client: Client,
    /// The service port.
    pub service: u32,
}

/// Value of the map `affinity`: the client's backend, and a copy of the entry's key. The kernel may reuse a
/// hash element for another key while a program is reading it, so readers compare this copy with the key that
/// they looked up.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Affinity {
    /// The time at which the client last connected, in nanoseconds on the monotonic clock.
    pub last_used: u64,
    /// The index of the client's backend.
    pub index: u32,
    /// The backend's state when it was chosen. The state is different in each generation of the index.
    pub state: BackendState,
    /// A copy of the entry's key.
    pub key: AffinityKey,
}

impl Affinity {
    /// Returns true if the client keeps its backend: the client last connected less than `seconds` ago, and
    /// the backend is still serving in the same generation and belongs to the wanted set.
    ///
    /// A concurrent connect() from the same client may have stored a time later than `now`. Such an entry is
    /// valid too.
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
            Client::of_user_namespace(1000),
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
    fn the_client_of_a_namespace_never_equals_that_of_an_address_or_a_user_namespace() {
        let cookie = 0xffff_0a00_0001;
        let client = Client::of_namespace(cookie);
        let words = client.words();
        let address = Address::from_words([words[0], words[1], words[2], words[3]]);

        assert_ne!(client, Client::of_address(address));
        assert_ne!(client, Client::of_user_namespace(cookie));
        assert_ne!(
            Client::of_namespace(1),
            Client::of_namespace(1 << 32),
            "both halves of the cookie count"
        );
    }
}
