//! The events that packets of a flow have shown, and the phase that follows from them.

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{addr::Protocol, packet::TcpFlags};

/// The events that the packets of an entry have shown: a set.
#[derive(
    Clone, Copy, Debug, Default, Eq, FromBytes, Hash, Immutable, IntoBytes, KnownLayout, PartialEq,
)]
#[repr(transparent)]
pub struct Seen(u8);

impl Seen {
    /// Nothing but the first packet.
    pub const NOTHING: Self = Self(0);
    const ACK_OF_CLIENT: u8 = 1;
    const REPLY: u8 = 1 << 1;
    const FIN_OF_CLIENT: u8 = 1 << 2;
    const FIN_OF_BACKEND: u8 = 1 << 3;
    const RST: u8 = 1 << 4;
    const LATER: u8 = 1 << 5;

    /// Returns what a packet from the client shows.
    #[inline(always)]
    #[must_use]
    pub const fn from_client(flags: TcpFlags) -> Self {
        let mut seen = 0;
        if flags.has_ack() {
            seen |= Self::ACK_OF_CLIENT;
        }
        if flags.has_fin() {
            seen |= Self::FIN_OF_CLIENT;
        }
        if flags.has_rst() {
            seen |= Self::RST;
        }
        Self(seen)
    }

    /// Returns the events as a number, which a function can return in a register.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::as_conversions, reason = "`From` is not const")]
    pub const fn number(self) -> u32 {
        self.0 as u32
    }

    /// Returns the events with this number.
    #[inline(always)]
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        let [byte, _, _, _] = number.to_le_bytes();
        Self(byte)
    }

    /// The handshake of the client, whose packet has shown the number that the backend has sent.
    pub const HANDSHAKE_OF_CLIENT: Self = Self(Self::ACK_OF_CLIENT);

    /// Returns true if the set contains events by which somebody with a forged address could keep or end a connection, so that
    /// the client must prove that it is the one that the backend talks to.
    #[inline(always)]
    #[must_use]
    pub const fn needs_proof(self) -> bool {
        self.0 & (Self::ACK_OF_CLIENT | Self::RST) != 0
    }

    /// Returns these events without those of the other set.
    #[inline(always)]
    #[must_use]
    pub const fn without(self, other: Self) -> Self {
        Self(self.0 & !other.0)
    }

    /// Returns these events with the end of the client's data instead of a reset, if there is one.
    #[inline(always)]
    #[must_use]
    pub const fn with_fin_for_rst(self) -> Self {
        if self.0 & Self::RST == 0 {
            return self;
        }
        Self(self.0 & !Self::RST | Self::FIN_OF_CLIENT)
    }

    /// Returns true if the backend sends no more data.
    #[inline(always)]
    #[must_use]
    pub const fn is_closed_by_backend(self) -> bool {
        self.0 & Self::FIN_OF_BACKEND != 0
    }

    /// Returns true if the backend has sent a packet.
    #[inline(always)]
    #[must_use]
    pub const fn has_reply(self) -> bool {
        self.0 & Self::REPLY != 0
    }

    /// Returns that the client has sent a packet in a later second than the one before, if it has. Most queries get one answer, and
    /// no packet of theirs follows.
    #[inline(always)]
    #[must_use]
    pub const fn later_than(last_used: u32, now: u32) -> Self {
        Self(if last_used == now { 0 } else { Self::LATER })
    }

    /// Returns true if the client has sent packets in several seconds.
    #[inline(always)]
    #[must_use]
    pub const fn is_lasting(self) -> bool {
        self.0 & Self::LATER != 0
    }

    /// Returns what a packet from the backend shows.
    #[inline(always)]
    #[must_use]
    pub const fn from_backend(flags: TcpFlags) -> Self {
        let mut seen = Self::REPLY;
        if flags.has_fin() {
            seen |= Self::FIN_OF_BACKEND;
        }
        if flags.has_rst() {
            seen |= Self::RST;
        }
        Self(seen)
    }

    /// Returns all events of two sets.
    #[inline(always)]
    #[must_use]
    pub const fn union(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }

    /// Returns true if every event of the other set is in this one.
    #[inline(always)]
    #[must_use]
    pub const fn includes(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    /// Returns the phase of a flow. Nothing that a client sends makes a connection last before the backend has answered; anyone
    /// can send it with a forged address.
    #[inline(always)]
    #[must_use]
    pub const fn phase(self, protocol: Protocol) -> Phase {
        const FINS: u8 = Seen::FIN_OF_CLIENT | Seen::FIN_OF_BACKEND;
        const HANDSHAKE: u8 = Seen::ACK_OF_CLIENT | Seen::REPLY;
        if !protocol.has_connections() {
            if self.0 & Self::REPLY != 0 {
                Phase::Answered
            } else {
                Phase::Unanswered
            }
        } else if self.0 & Self::RST != 0 {
            Phase::Closed
        } else if self.0 & HANDSHAKE != HANDSHAKE {
            Phase::HalfOpen
        } else if self.0 & FINS == FINS {
            Phase::Closing
        } else if self.0 & FINS != 0 {
            Phase::HalfClosed
        } else {
            Phase::Established
        }
    }
}

/// The phase of a flow, in which it ends when no packet has passed for some time.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub enum Phase {
    /// A connection (TCP or SCTP) that was reset.
    Closed,
    /// A connection that both ends have closed.
    Closing,
    /// A connection whose handshake has not been completed.
    HalfOpen,
    /// Datagrams without an answer.
    Unanswered,
    /// Datagrams in both directions.
    Answered,
    /// A connection that one end has closed.
    HalfClosed,
    /// An open connection.
    Established,
}

impl Phase {
    /// All phases.
    pub const ALL: [Self; 7] = [
        Self::Closed,
        Self::Closing,
        Self::HalfOpen,
        Self::Unanswered,
        Self::Answered,
        Self::HalfClosed,
        Self::Established,
    ];

    /// Returns the name used in tables and metrics.
    #[must_use]
    pub const fn label(self) -> &'static str {
        match self {
            Self::Closed => "closed",
            Self::Closing => "closing",
            Self::HalfOpen => "half_open",
            Self::Unanswered => "unanswered",
            Self::Answered => "answered",
            Self::HalfClosed => "half_closed",
            Self::Established => "established",
        }
    }
}
