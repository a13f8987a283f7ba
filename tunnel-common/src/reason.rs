//! Why a connect, a datagram, a stream or an object ended as it did: one list for the kernel's
//! counters, the label of the metric, the word in the log and the reset of a stream.

/// Declares the reasons: number, word, meaning. A number is one among those that the kernel programs
/// count, or one among those that only the daemon counts.
macro_rules! reasons {
    (
        kernel {
            $($(#[$of_kernel:meta])* $counted:ident = $index:literal, $word:literal, $sentence:literal;)+
        }
        daemon {
            $($(#[$doc:meta])* $name:ident = $number:literal, $label:literal, $meaning:literal;)+
        }
    ) => {
        /// A reason, in the order of the list: those of the kernel programs, then those of the daemon.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[repr(u32)]
        pub enum Reason {
            $($(#[$of_kernel])* $counted = $index,)+
            $($(#[$doc])* $name = Self::DAEMON + $number,)+
        }

        impl Reason {
            /// Every reason, in the order of the list.
            pub const ALL: [Self; [$($index,)+ $($number),+].len()] =
                [$(Self::$counted,)+ $(Self::$name),+];

            /// Those that the kernel programs count.
            pub const OF_KERNEL: [Self; [$($index),+].len()] = [$(Self::$counted),+];

            /// The word for metrics, logs and tables.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$counted => $word,)+
                    $(Self::$name => $label,)+
                }
            }

            /// What it means, in a sentence for people.
            #[must_use]
            pub const fn meaning(self) -> &'static str {
                match self {
                    $(Self::$counted => $sentence,)+
                    $(Self::$name => $meaning,)+
                }
            }
        }
    };
}

reasons! {
    kernel {
        /// A connect or datagram was sent on to a backend that was chosen for it.
        Translated = 0, "translated", "sent to a backend that was chosen for it";
        /// A connect or datagram was sent on to the backend that its flow already had.
        TranslatedSticky = 1, "translated_sticky", "sent to the backend that its UDP flow already had";
        /// Refused: the front has no usable backend.
        NoBackend = 2, "no_backend", "refused: the Service has no usable backend";
        /// Refused: the record that was looked up changed under each of the reader's tries.
        RecordUnstable = 3, "record_unstable", "refused: the record kept changing while it was read";
        /// Refused: a record led to a slot or backend that does not exist.
        RecordBroken = 4, "record_broken", "refused: a record led to nowhere";
        /// UDP refused: the socket can't remember its translation (`net.core.optmem_max`).
        StorageFull = 5, "storage_full", "UDP refused: no socket storage (net.core.optmem_max)";
        /// TCP translated although the socket can't remember it: its peer name shows the backend.
        TranslatedUntracked = 6, "translated_untracked", "TCP translated without socket storage; peer names show the backend";
        /// A socket began to remember a translation.
        SocketTracked = 7, "socket_tracked", "a socket began to remember a translation";
        /// A socket that remembered a translation was closed.
        SocketReleased = 8, "socket_released", "a socket that remembered a translation was closed";
        /// A socket's older translation moved to the map `overflow`.
        Overflowed = 9, "overflowed", "an older translation of a socket moved to the overflow map";
        /// A connect to an edge node was sent to the tunnel's ingress.
        Steered = 10, "steered", "sent to the tunnel's ingress";
        /// A connect was steered although the socket can't remember it: its peer name shows the ingress.
        SteeredUntracked = 11, "steered_untracked", "sent to the tunnel's ingress without socket storage; peer names show the steering prefix";
        /// Refused: there is no route to the steering prefix (yet), so the ingress can't be reached.
        SteeringClosed = 12, "steering_closed", "refused: there is no route to the steering prefix of its family";
        /// Dropped: a packet from an uplink to a steering prefix.
        Guarded = 13, "guarded", "dropped: a packet from an uplink to a steering prefix";
        /// An event of a program was not logged: the ring was full.
        LogLost = 14, "log_lost", "an event of the program that log.kernel names was not logged: the ring was full";
        /// Refused: the front's policy is Local, and the Service has no usable backend on this node.
        NoLocalBackend = 15, "no_local_backend", "refused: traffic of this policy needs a backend on this node, and there is none";
        /// A connect or datagram was sent on to the backend that its client keeps.
        TranslatedAffine = 16, "translated_affine", "sent to the backend that its client keeps (sessionAffinity)";
        /// Refused: the client is in none of the ranges that may use the load balancer's address.
        SourceRefused = 17, "source_refused", "refused: the client is in none of the Service's loadBalancerSourceRanges";
        /// Refused: only some clients may use the load balancer's address, and the client's is not known.
        SourceUnknown = 18, "source_unknown", "refused: only loadBalancerSourceRanges may use this address, and this kernel does not show the client's";
        /// A TCP connect of one of the kernel's own sockets was sent on: it remembers nothing, and is not
        /// counted, since its close is not seen.
        TranslatedKernel = 19, "translated_kernel", "TCP of a kernel socket (NFS, MPTCP) translated; not counted, and peer names show the backend";
    }
    daemon {
        /// Not programmed: no room for another front.
        FrontsFull = 14, "fronts_full", "not programmed: bpf.maps.frontends is used up";
        /// Not programmed: no room for the slots of a set.
        SlotsFull = 15, "slots_full", "not programmed: bpf.maps.slots is used up";
        /// Not programmed: no room for another backend.
        BackendsFull = 16, "backends_full", "not programmed: bpf.maps.backends is used up";
        /// Not programmed: another Service has the same address, port and protocol.
        FrontClaimed = 17, "front_claimed", "not programmed: another Service has this address, port and protocol";
        /// Not programmed: a map could not be written.
        WriteFailed = 18, "write_failed", "not programmed: the kernel refused a map write; it is tried again";
        /// Not read: a manifest, or an object in it, is bad.
        ObjectRefused = 19, "object_refused", "not read: a manifest, or an object in it, is bad";
        /// Not steered: no room for another address and port of an edge node.
        SteeringFull = 20, "steering_full", "not steered: bpf.maps.steering or a steering prefix is used up";
        /// Not steered: an edge node without an address, or with that of another node.
        NodeRefused = 21, "node_refused", "not steered: an edge node without an address, or with that of another node";
        /// Not steered: an entry of a port list that is no port, or that another list overrules.
        PortsRefused = 22, "ports_refused", "not steered: an entry of a port list is no port, or another list overrules it";
        /// A stream ended as both of its ends wanted.
        StreamServed = 23, "stream_served", "ended as both ends wanted";
        /// A stream ended by a reset from the client.
        ClientReset = 24, "client_reset", "the client reset it";
        /// A stream ended by a reset from the target.
        TargetReset = 25, "target_reset", "the target reset it";
        /// Refused: it reached the ingress by an uplink, or without being steered.
        ArrivedOutside = 26, "arrived_outside", "refused: it reached the ingress by an uplink, or without being steered";
        /// Refused: its steering address stands for no node and port any more.
        TargetUnknown = 27, "target_unknown", "refused: its steering address stands for no node and port any more";
        /// Refused: no agent of the node is connected.
        AgentNotConnected = 28, "agent_not_connected", "refused: agent not connected";
        /// A stream ended because the session that carried it did.
        AgentLost = 29, "agent_lost", "the connection to the agent was lost";
        /// Refused: every session of the node has as many streams as it may.
        StreamsFull = 30, "streams_full", "refused: every session of the node has as many streams as it may";
        /// Refused by the agent: the target is not on its allow-list.
        TargetDenied = 31, "target_denied", "refused by the agent: not on its allow-list";
        /// The target refused the agent's connect.
        DialRefused = 32, "dial_refused", "the target refused the agent's connect";
        /// The agent found no way to the target.
        DialUnreachable = 33, "dial_unreachable", "the agent found no way to the target";
        /// The target did not answer the agent's connect in time.
        DialTimedOut = 34, "dial_timed_out", "the target did not answer the agent's connect in time";
        /// Refused by the agent: it waits for as many targets as it may.
        DialsFull = 35, "dials_full", "refused by the agent: it waits for as many targets as it may";
        /// Refused: this end is about to stop.
        Draining = 36, "draining", "refused: this end is about to stop";
        /// The other end of the session broke the protocol.
        ProtocolBroken = 37, "protocol_broken", "the other end broke the protocol";
        /// A handshake of TLS or of the tunnel failed.
        HandshakeFailed = 38, "handshake_failed", "a handshake of TLS or of the tunnel failed";
        /// A handshake of TLS or of the tunnel took too long.
        HandshakeTimedOut = 39, "handshake_timed_out", "a handshake of TLS or of the tunnel took too long";
        /// Refused: the gateway has as many unfinished handshakes, or sessions, as it may.
        HandshakesFull = 40, "handshakes_full", "refused: the gateway has as many unfinished handshakes, or sessions, as it may";
        /// Refused: a certificate that is not that of an agent, or names no node.
        IdentityRefused = 41, "identity_refused", "refused: the certificate is not that of an agent, or names no node";
        /// A field that can't be used was left out; the object is used without it.
        FieldIgnored = 43, "field_ignored", "left out: a field of an object that can't be used; the object is used without it";
        /// A port of the daemon's own is taken by another process; it is tried again.
        PortTaken = 44, "port_taken", "a port of the daemon is taken by another process; it is tried again";
        /// A connected socket was ended, since its backend serves its Service no more.
        SocketEnded = 46, "socket_ended", "a connected socket was ended: its backend serves the Service no more";
        /// The health check port of a Service is not served: another process or Service has it.
        HealthPortTaken = 47, "health_port_taken", "not served: another process or Service has this health check port; it is tried again";
        /// Not programmed: an external IP that no Node and no load balancer of a Service has.
        ExternalIpNotOwned = 49, "external_ip_not_owned", "not programmed: no Node and no load balancer of a Service has this external IP (service.externalIPs)";
        /// Not programmed: no room for the ranges that may use the address of a load balancer.
        SourcesFull = 52, "sources_full", "not programmed: bpf.maps.sourceRanges is used up";
    }
}

impl Reason {
    /// How many reasons the map `count` has room for. A further one of the kernel programs takes the next
    /// number below, which changes no layout.
    pub const CAPACITY: u32 = 96;

    /// The number that those of the daemon follow.
    const DAEMON: u32 = 256;

    /// The index of the counter in the map `count`, of one that the kernel programs count.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn index(self) -> u32 {
        self as u32
    }

    /// The reason that the kernel programs count at an index of the map `count`.
    #[must_use]
    pub fn of_index(index: u32) -> Option<Self> {
        Self::OF_KERNEL
            .into_iter()
            .find(|reason| reason.index() == index)
    }

    /// The number among those of the daemon; the ends of streams are told by it.
    #[must_use]
    pub const fn number(self) -> Option<u32> {
        self.index().checked_sub(Self::DAEMON)
    }

    /// The reason of the daemon with that number.
    #[must_use]
    pub fn of_number(number: u32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|reason| reason.number() == Some(number))
    }

    /// Whether the kernel programs count it; the daemon counts the others.
    #[must_use]
    pub const fn is_of_kernel(self) -> bool {
        self.number().is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn reasons_stand_in_the_order_of_their_numbers_and_the_map_has_room_for_many_more() {
        assert!(Reason::ALL.is_sorted_by(|one, next| one < next));
        for (index, reason) in (0..).zip(Reason::OF_KERNEL) {
            assert_eq!(reason.index(), index);
            assert_eq!(Reason::of_index(index), Some(reason));
            assert!(reason.is_of_kernel() && index + 32 < Reason::CAPACITY);
        }
        for reason in Reason::ALL
            .into_iter()
            .filter(|reason| !reason.is_of_kernel())
        {
            assert!(reason.index() >= Reason::CAPACITY);
            assert_eq!(Reason::of_index(reason.index()), None);
            assert_eq!(reason.number().and_then(Reason::of_number), Some(reason));
        }
    }

    #[test]
    fn no_two_reasons_share_a_word() {
        let words: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();

        assert_eq!(words.len(), Reason::ALL.len());
    }
}
