//! Keys and values of the map `flows`: the flows whose packets the tc programs translate.
//!
//! A flow has an entry for each address pair by which its packets are met:
//!
//! | role | packets | at |
//! |---|---|---|
//! | [`Role::DIALLED`] | client → frontend | tc ingress |
//! | [`Role::FORWARDED`] | client → backend, and backend → client | tc egress |
//! | [`Role::MASQUERADED`] | backend → the node's address | tc ingress |
//!
//! Every entry contains all addresses and ports of the flow, so that flows outlive the service maps. The index of the
//! backend only shows whether the backend still serves. The key follows from the value, so a reader that finds a value
//! of another flow, since the kernel reuses elements at once, notices it.

mod seen;
mod timeouts;

use core::mem::{offset_of, size_of};

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

pub use self::{
    seen::{Phase, Seen},
    timeouts::Timeouts,
};
use crate::{
    addr::{Address, Port, Protocol},
    packet::Packet,
    service::BackendState,
};

/// The index in the array `packet_state` of the answers to refused packets ([`crate::refusal::Refusals`]).
pub const REFUSALS: u32 = 0;
/// The index in the array `packet_state` of the time, in seconds of the monotonic clock, until which no flow begins, while
/// flows are moved to another map. Packets that begin flows arrive again and again until then.
pub const FROZEN_UNTIL: u32 = 1;

/// An address and a port.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Endpoint {
    /// The address.
    pub address: Address,
    /// The port.
    pub port: Port,
    /// Zero.
    pub reserved: u16,
}

impl Endpoint {
    /// No endpoint.
    pub const NONE: Self = Self::new(Address::UNSPECIFIED, Port::from_network(0));

    /// Creates an endpoint.
    #[inline(always)]
    #[must_use]
    pub const fn new(address: Address, port: Port) -> Self {
        Self {
            address,
            port,
            reserved: 0,
        }
    }

    /// Returns true if both ends are equal. Unlike `==`, compiles to code without branches, which saves the verifier work.
    #[inline(always)]
    #[must_use]
    pub const fn is(&self, other: &Self) -> bool {
        let [a, b] = self.address.halves();
        let [c, d] = other.address.halves();
        let [port, other_port] = [self.port.to_network(), other.port.to_network()];
        #[expect(clippy::as_conversions, reason = "`From` is not const")]
        let ports = (port ^ other_port) as u64;
        (a ^ c) | (b ^ d) | ports == 0
    }

    /// Returns true if this end comes before another one, in an arbitrary order.
    #[inline(always)]
    const fn is_before(&self, other: &Self) -> bool {
        let [a, b] = self.address.halves();
        let [c, d] = other.address.halves();
        // IPv4 addresses differ in the lower half.
        if b != d {
            return b < d;
        }
        if a != c {
            return a < c;
        }
        self.port.to_network() < other.port.to_network()
    }

    /// Returns the same address with another port.
    #[inline(always)]
    #[must_use]
    pub const fn with_port(self, port: Port) -> Self {
        Self::new(self.address, port)
    }
}

/// Key of the map `flows`.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct FlowKey {
    /// The source of an arriving packet, or the lesser end of a forwarded one.
    pub first: Endpoint,
    /// The destination of an arriving packet, or the greater end of a forwarded one.
    pub second: Endpoint,
    /// The transport protocol.
    pub protocol: Protocol,
    /// 1 if the key stands for both directions, otherwise 0.
    pub both_directions: u8,
    /// Zero.
    pub reserved: u16,
}

impl FlowKey {
    const NONE: Self = Self {
        first: Endpoint::NONE,
        second: Endpoint::NONE,
        protocol: Protocol::TCP,
        both_directions: 0,
        reserved: 0,
    };

    /// Makes this the key of a packet at tc ingress. Unlike an assignment, needs no second key on the stack.
    #[inline(always)]
    pub const fn set_arriving(
        &mut self,
        source: &Endpoint,
        destination: &Endpoint,
        protocol: Protocol,
    ) {
        self.first = Endpoint::new(source.address, source.port);
        self.second = Endpoint::new(destination.address, destination.port);
        (self.protocol, self.both_directions, self.reserved) = (protocol, 0, 0);
    }

    /// Makes this the key of a packet at tc egress, as [`Self::forwarded`] does.
    #[inline(always)]
    pub const fn set_forwarded(&mut self, one: &Endpoint, other: &Endpoint, protocol: Protocol) {
        if one.is_before(other) {
            self.set_arriving(one, other, protocol);
        } else {
            self.set_arriving(other, one, protocol);
        }
        self.both_directions = 1;
    }

    /// Returns the key of a packet at tc ingress.
    #[inline(always)]
    #[must_use]
    pub const fn arriving(source: Endpoint, destination: Endpoint, protocol: Protocol) -> Self {
        let mut key = Self::NONE;
        key.set_arriving(&source, &destination, protocol);
        key
    }

    /// Returns the key of a packet at tc egress, which is the same for both directions.
    #[inline(always)]
    #[must_use]
    pub const fn forwarded(one: Endpoint, other: Endpoint, protocol: Protocol) -> Self {
        let mut key = Self::NONE;
        key.set_forwarded(&one, &other, protocol);
        key
    }
}

/// The packets by which an entry is found.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(transparent)]
pub struct Role(u8);

impl Role {
    /// Returns the role as a number, which can be passed to a function in a register.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::as_conversions, reason = "`From` is not const")]
    pub const fn number(self) -> u32 {
        self.0 as u32
    }

    /// Returns the role with this number.
    #[inline(always)]
    #[must_use]
    #[expect(
        clippy::as_conversions,
        clippy::cast_possible_truncation,
        reason = "at most 2"
    )]
    pub const fn from_number(number: u32) -> Self {
        Self(number as u8)
    }

    /// Packets from the client to the frontend.
    pub const DIALLED: Self = Self(0);
    /// Packets between the client and the backend, in both directions.
    pub const FORWARDED: Self = Self(1);
    /// Packets from the backend to the node's address that stands for the client.
    pub const MASQUERADED: Self = Self(2);
}

/// Value of the map `flows`.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Flow {
    /// The client, as it sends packets to the frontend.
    pub client: Endpoint,
    /// The frontend that the client has dialled.
    pub frontend: Endpoint,
    /// The backend.
    pub backend: Endpoint,
    /// The node's address and port that stand for the client, or [`Endpoint::NONE`].
    pub masquerade: Endpoint,
    /// The index of the backend in the array `backends`.
    pub backend_index: u32,
    /// The state that the backend had when it was chosen.
    pub backend_state: BackendState,
    /// The service port.
    pub service: u32,
    /// The time at which a packet last used this entry, in seconds of the monotonic clock.
    pub last_used: u32,
    /// The port of the client between the two programs. It differs from the client's own port if another flow has the
    /// same client and the same backend, over another frontend.
    pub forwarded_port: Port,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The packets by which this entry is found.
    pub role: Role,
    /// The events that the packets of this entry have shown.
    pub seen: Seen,
    /// A combination of [`Flow::MUST_MASQUERADE`], [`Flow::ENDED`], [`Flow::ON_POD_LINKS`] and [`Flow::OF_HOST`].
    pub flags: u8,
    /// In the forwarded entry of a TCP connection, the upper half of a number that the client shows to prove that it receives the
    /// packets of the backend: until it has completed the handshake, the acknowledgment number; then the sequence number,
    /// which is the one that the backend has acknowledged last. Otherwise 0.
    pub expected: u16,
}

impl Flow {
    /// Flag: packets to a backend leave with the node's address, if they leave by a link that has the programs.
    pub const MUST_MASQUERADE: u8 = 1;
    /// Flag: the entry is about to be removed, and counts as absent.
    pub const ENDED: u8 = 1 << 1;
    /// Flag: packets of the flow are translated on links that lead to pods. An entry lacks the flag if it was inserted before
    /// this was known.
    pub const ON_POD_LINKS: u8 = 1 << 2;
    /// Flag: the client is a socket of this host whose destination no socket program has replaced.
    pub const OF_HOST: u8 = 1 << 3;
    /// Stands for the index of the backend if it is the ingress of the tunnel.
    pub const NO_BACKEND: u32 = u32::MAX;
    /// Stands for the service id if a packet is for no Service.
    pub const NO_SERVICE: u32 = u32::MAX;

    /// Returns the client as it appears between the two programs.
    #[inline(always)]
    #[must_use]
    pub const fn forwarded_client(&self) -> Endpoint {
        self.client.with_port(self.forwarded_port)
    }

    /// Returns the key of this entry.
    #[inline(always)]
    #[must_use]
    pub const fn key(&self) -> FlowKey {
        self.key_of(self.role)
    }

    /// Returns the key of the flow's entry with a role.
    #[inline(always)]
    #[must_use]
    pub const fn key_of(&self, role: Role) -> FlowKey {
        let mut key = FlowKey::NONE;
        self.set_key(role, &mut key);
        key
    }

    /// Makes a key that of the flow's entry with a role, as [`Self::key_of`] does.
    #[inline(always)]
    pub const fn set_key(&self, role: Role, key: &mut FlowKey) {
        let protocol = self.protocol;
        if role.0 == Role::DIALLED.0 {
            key.set_arriving(&self.client, &self.frontend, protocol);
        } else if role.0 == Role::FORWARDED.0 {
            key.set_forwarded(&self.forwarded_client(), &self.backend, protocol);
        } else {
            key.set_arriving(&self.backend, &self.masquerade, protocol);
        }
    }

    /// Returns true if this entry belongs to a key. The entry is a copy, whose original another flow may have replaced.
    #[inline(always)]
    #[must_use]
    pub const fn belongs_to(&self, key: &FlowKey) -> bool {
        let own = self.key();
        own.first.is(&key.first)
            && own.second.is(&key.second)
            && own.protocol.number() == key.protocol.number()
            && own.both_directions == key.both_directions
    }

    /// Returns true if this entry has not ended and belongs to a key.
    #[inline(always)]
    #[must_use]
    pub const fn is_met_by(&self, key: &FlowKey) -> bool {
        self.flags & Self::ENDED == 0 && self.belongs_to(key)
    }

    /// Returns true if another entry has the same client and frontend, and so belongs to this flow or to an earlier one.
    #[inline(always)]
    #[must_use]
    pub const fn has_ends_of(&self, other: &Self) -> bool {
        self.client.is(&other.client) && self.frontend.is(&other.frontend)
    }

    /// Returns true if no packet has used the entry for longer than its phase allows.
    #[inline(always)]
    #[must_use]
    pub const fn is_expired(&self, timeouts: &Timeouts, now: u32) -> bool {
        timeouts.is_over(self.seen.phase(self.protocol), self.last_used, now)
    }

    /// Returns true if the entry, taken by itself, has ended or expired.
    #[inline(always)]
    #[must_use]
    pub const fn is_unused(&self, timeouts: &Timeouts, now: u32) -> bool {
        self.flags & Self::ENDED != 0 || self.is_expired(timeouts, now)
    }
}

impl Packet {
    /// Returns the sender.
    #[inline(always)]
    #[must_use]
    pub const fn source_endpoint(&self) -> Endpoint {
        Endpoint::new(self.source, self.source_port)
    }

    /// Returns the receiver.
    #[inline(always)]
    #[must_use]
    pub const fn destination_endpoint(&self) -> Endpoint {
        Endpoint::new(self.destination, self.destination_port)
    }

    /// Returns true if the packet opens a TCP connection.
    #[inline(always)]
    #[must_use]
    pub const fn opens(&self) -> bool {
        self.protocol.has_connections() && self.flags.opens()
    }

    /// Returns true if the packet belongs to a TCP connection that has begun.
    #[inline(always)]
    #[must_use]
    pub const fn continues(&self) -> bool {
        self.protocol.has_connections() && !self.flags.opens()
    }
}

const _: () = {
    assert!(size_of::<Endpoint>() == 20);
    assert!(size_of::<FlowKey>() == 44);
    assert!(offset_of!(FlowKey, protocol) == 40);
    assert!(size_of::<Flow>() == 104);
    assert!(offset_of!(Flow, backend_index) == 80);
    assert!(offset_of!(Flow, last_used) == 92);
    assert!(offset_of!(Flow, seen) == 100);
};
