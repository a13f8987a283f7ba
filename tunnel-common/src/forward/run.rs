//! The state of a program while it handles a packet.

use core::mem::size_of;

use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout};

use crate::{
    addr::{Port, Protocol},
    flow::{Endpoint, Flow, FlowKey, Role, Seen},
    fragment::FragmentKey,
    packet::{Family, Packet, TcpFlags, TcpNumbers, icmp::ErrorHeader},
    reason::Reason,
    service::BackendState,
};

/// The state of a program while it handles a packet: value of the per-CPU array `packet_runs`. It would not fit into the
/// stack of a kernel program, and the program's steps are separate functions, which share it.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, IntoBytes, KnownLayout)]
#[repr(C)]
pub struct Run {
    // The flows come first, because they are copied in words of 64 bits.
    /// The packet's entry, or the entries that a new flow gets.
    pub flow: Flow,
    /// Another entry, for comparison.
    pub other: Flow,
    /// The entry of a flow that may give way.
    pub candidate: Flow,
    /// The sender of the packet.
    pub source: Endpoint,
    /// The receiver of the packet.
    pub destination: Endpoint,
    /// The end that the packet gets: the new receiver at tc ingress, and the new sender at tc egress.
    pub replacement: Endpoint,
    /// The transport protocol.
    pub protocol: Protocol,
    /// The flags of a TCP packet, or those that correspond to an SCTP chunk.
    pub flags: TcpFlags,
    /// The port that the packet gets at its other end.
    pub other_port: Port,
    /// The numbers of a TCP packet, which are stored when it is read.
    pub numbers: TcpNumbers,
    /// The time in seconds of the monotonic clock.
    pub now: u32,
    /// The offset of the transport header from the network header.
    pub transport_offset: u32,
    /// 1 if the packet is the first fragment of several, otherwise 0.
    pub is_fragment: u32,
    /// The index of the link that the packet arrives on or leaves by.
    pub link: u32,
    /// 1 if the packet leaves by the link that it has arrived on, otherwise 0.
    pub returns: u32,
    /// 1 if another Service has got the frontend of the packet's flow, otherwise 0.
    pub is_moved: u32,
    /// The index of the [`Reason`] for which the packet is counted.
    pub reason: u32,
    /// The key of an entry that is looked up, which would take much of a step's stack frame.
    pub key: FlowKey,
    /// The key of the packet's fragments.
    pub fragment: FragmentKey,
    /// The headers of an ICMP error. The ends and the protocol are then those of the quoted packet.
    pub error: ErrorHeader,
}

/// The end of a packet that a program replaces. It may also change the port of the other end.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum End {
    /// The sender.
    Source,
    /// The receiver.
    Destination,
}

/// The backend of a flow that begins.
#[derive(Clone, Copy, Debug)]
pub(super) struct NewBackend {
    pub(super) endpoint: Endpoint,
    /// The index, or [`Flow::NO_BACKEND`].
    pub(super) index: u32,
    pub(super) state: BackendState,
    /// The id of the service port, or [`Flow::NO_SERVICE`].
    pub(super) service: u32,
}

impl Run {
    /// Begins to handle a packet.
    #[inline(always)]
    #[expect(clippy::as_conversions, reason = "`From` is not const")]
    pub const fn start(&mut self, packet: &Packet, now: u32) {
        self.source = packet.source_endpoint();
        self.destination = packet.destination_endpoint();
        self.protocol = packet.protocol;
        self.flags = packet.flags;
        self.transport_offset = packet.transport_offset;
        self.is_fragment = packet.is_fragment as u32;
        self.is_moved = 0;
        self.now = now;
    }

    /// Returns the packet.
    #[inline(always)]
    #[must_use]
    pub const fn packet(&self) -> Packet {
        Packet {
            family: if self.source.address.is_v4() {
                Family::V4
            } else {
                Family::V6
            },
            source: self.source.address,
            destination: self.destination.address,
            source_port: self.source.port,
            destination_port: self.destination.port,
            protocol: self.protocol,
            flags: self.flags,
            transport_offset: self.transport_offset,
            is_fragment: self.is_fragment != 0,
        }
    }

    /// Returns the packet with its new ends.
    #[inline(always)]
    #[must_use]
    pub const fn translated(&self, end: End) -> Packet {
        let (new, other_port) = (&self.replacement, self.other_port);
        match end {
            End::Source => Packet {
                source: new.address,
                source_port: new.port,
                destination_port: other_port,
                ..self.packet()
            },
            End::Destination => Packet {
                destination: new.address,
                destination_port: new.port,
                source_port: other_port,
                ..self.packet()
            },
        }
    }

    /// Sets the key to that of the packet at tc ingress.
    #[inline(always)]
    pub(super) const fn set_arriving_key(&mut self) {
        self.key
            .set_arriving(&self.source, &self.destination, self.protocol);
    }

    /// Sets the key to that of the packet at tc egress.
    #[inline(always)]
    pub(super) const fn set_forwarded_key(&mut self) {
        self.key
            .set_forwarded(&self.source, &self.destination, self.protocol);
    }

    /// Makes the packet with its new ends the one that is handled.
    #[inline(always)]
    pub(super) const fn advance(&mut self, end: End) {
        match end {
            End::Source => {
                (self.source, self.destination.port) = (self.replacement, self.other_port);
            }
            End::Destination => {
                (self.destination, self.source.port) = (self.replacement, self.other_port);
            }
        }
    }

    /// Returns true if the packet opens a connection (TCP or SCTP).
    #[inline(always)]
    #[must_use]
    pub const fn opens(&self) -> bool {
        self.packet().opens()
    }

    /// Returns true if the packet belongs to a connection (TCP or SCTP) that has begun.
    #[inline(always)]
    #[must_use]
    pub const fn continues(&self) -> bool {
        self.packet().continues()
    }

    /// Stores the ends that the packet gets.
    #[inline(always)]
    pub(super) const fn replace(&mut self, replacement: Endpoint, other_port: Port) {
        (self.replacement, self.other_port) = (replacement, other_port);
    }

    /// Stores the entry of a flow that the packet begins, and the reason for which it is counted.
    #[inline(always)]
    pub(super) const fn begin(&mut self, backend: NewBackend, flags: u8, reason: Reason) {
        self.flow = Flow {
            client: self.source,
            frontend: self.destination,
            backend: backend.endpoint,
            masquerade: Endpoint::NONE,
            backend_index: backend.index,
            backend_state: backend.state,
            service: backend.service,
            last_used: self.now,
            forwarded_port: self.source.port,
            protocol: self.protocol,
            role: Role::FORWARDED,
            seen: Seen::NOTHING,
            flags,
            expected: 0,
        };
        self.set_reason(reason);
    }

    /// Stores the service port of a packet that goes nowhere, and the reason.
    #[inline(always)]
    pub(super) const fn stop(&mut self, service: u32, reason: Reason) {
        self.flow.service = service;
        self.set_reason(reason);
    }

    /// Stores the reason for which the packet is counted.
    #[inline(always)]
    pub(super) const fn set_reason(&mut self, reason: Reason) {
        self.reason = reason.index();
    }
}

/// The result of a step: the next step, or the verdict on the packet.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Step {
    /// The next step decides.
    Next = 0,
    /// The packet is left alone.
    Pass = 1,
    /// The packet belongs to a known flow, and gets the ends in [`Run`].
    Translate = 2,
    /// The packet is the first of a flow, gets the ends in [`Run`], and is counted.
    Begin = 3,
    /// The packet is dropped and counted, and the sender gets a reset or an ICMP error.
    Refuse = 4,
    /// The packet arrives once more at the same link, until it can be decided about.
    Defer = 5,
    /// The packet is dropped and counted.
    Drop = 6,
}

impl Step {
    /// Returns the step as a number, which a function can return in a register.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Returns the step with this number. Any other number drops the packet.
    #[inline(always)]
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Next,
            1 => Self::Pass,
            2 => Self::Translate,
            3 => Self::Begin,
            4 => Self::Refuse,
            5 => Self::Defer,
            _ => Self::Drop,
        }
    }
}

/// The result of inserting an entry.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
#[repr(u32)]
pub enum Insertion {
    /// The entry was inserted.
    Inserted = 0,
    /// There is an entry with this key.
    Exists = 1,
    /// The map is full.
    Full = 2,
    /// The kernel could not allocate the entry at the moment, although the map has room.
    NoMemory = 3,
}

impl Insertion {
    /// Returns the result as a number, which a function can return in a register.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn number(self) -> u32 {
        self as u32
    }

    /// Returns the result with this number. Any other number means that the entry could not be allocated.
    #[inline(always)]
    #[must_use]
    pub const fn from_number(number: u32) -> Self {
        match number {
            0 => Self::Inserted,
            1 => Self::Exists,
            2 => Self::Full,
            _ => Self::NoMemory,
        }
    }
}

const _: () = assert!(size_of::<Run>() == 532);
