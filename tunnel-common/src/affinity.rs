//! Session affinity (`sessionAffinity: ClientIP`): the entries of the map `affinity`.

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    addr::Address,
    service::{Membership, State},
};

const NANOSECONDS: u64 = 1_000_000_000;

/// The client that asks for a backend.
///
/// A socket chooses before it has an address, unless it was bound to one. So it is identified by the
/// address of its network namespace, or by the namespace itself if the kernel doesn't show that address:
/// all sockets of a pod are one client, and so are all sockets of the host.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Client {
    /// The address of the client; for a network namespace its cookie, in the last two words.
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

    /// Returns the client of [`Client::parts`].
    #[inline(always)]
    #[must_use]
    pub const fn from_parts(kind: u32, halves: [u64; 2]) -> Self {
        Self {
            address: Address::from_halves(halves),
            kind,
        }
    }

    /// Returns the words of the client, as input of a hash.
    #[inline(always)]
    #[must_use]
    pub const fn words(&self) -> &[u32; 5] {
        zerocopy::transmute_ref!(self)
    }
}

/// Key of the map `affinity`: a client of a service port. All frontends of the port share the entry, as
/// all addresses of a Service do in kube-proxy (`pkg/proxy/nftables/proxier.go`).
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct AffinityKey {
    /// The client.
    pub client: Client,
    /// The service port.
    pub service: u32,
}

/// Value of the map `affinity`: the backend, and the key it was written under. A hash element may be
/// reused for another key while it is read, so a reader compares the key.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Affinity {
    /// When the client last connected, in nanoseconds of the monotonic clock.
    pub used: u64,
    /// The index of the backend.
    pub index: u32,
    /// The state of the backend when it was chosen; distinguishes this generation of the index from the next.
    pub state: State,
    /// The key of this entry.
    pub key: AffinityKey,
}

impl Affinity {
    /// Returns true if the client keeps its backend: its last connect is less than `seconds` ago, and
    /// the backend is in the same generation and in the set to choose from.
    ///
    /// Another connection of the client may store a time after `now` was read; its entry is not too old.
    #[inline(always)]
    #[must_use]
    pub fn holds(
        &self,
        seconds: u32,
        state: State,
        (has, wanted): (Membership, Membership),
        now: u64,
    ) -> bool {
        self.state == state
            && state.is_serving()
            && has.includes(wanted)
            && now.saturating_sub(self.used) < u64::from(seconds).wrapping_mul(NANOSECONDS)
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

    const SECOND: u64 = NANOSECONDS;

    #[test]
    fn a_client_is_made_of_its_parts() {
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
    fn a_client_keeps_its_backend_while_it_comes_often_and_the_backend_serves_in_the_set() {
        let (cluster, local, none) = (Membership::CLUSTER, Membership::LOCAL, Membership::NONE);
        let (all, same) = (cluster.and(local), (cluster, cluster));
        let serving = State::default().next_use();
        let (gone, next) = (serving.gone(), serving.gone().next_use());
        let (last, end) = (5 * SECOND, 15 * SECOND);
        let affinity = Affinity {
            used: last,
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
            ("another was quicker", serving, same, last - 1, true),
            ("it is gone", gone, same, last, false),
            ("it is another by now", next, same, last, false),
            ("it is in both sets", serving, (all, local), last, true),
            ("not here", serving, (cluster, local), last, false),
            ("only here", serving, (local, cluster), last, false),
            ("in no set", serving, (none, cluster), last, false),
        ] {
            assert_eq!(affinity.holds(10, state, sets, now), holds, "{claim}");
        }
    }

    #[test]
    fn a_namespace_is_no_address() {
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
