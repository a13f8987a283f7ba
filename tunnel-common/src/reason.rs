//! The reasons for the outcome of a connection, datagram, stream or object. The kernel programs' counters,
//! metrics, logs and stream resets all use this list.

/// Declares the reasons, each with its number, label and description. The reasons that the kernel programs
/// count and those that the daemon counts are numbered separately.
macro_rules! reasons {
    (
        kernel {
            $($(#[$kernel_doc:meta])* $counted:ident = $index:literal, $word:literal, $sentence:literal;)+
        }
        daemon {
            $($(#[$doc:meta])* $name:ident = $number:literal, $label:literal, $meaning:literal;)+
        }
    ) => {
        /// A reason. The variants are in the order of the list: first the kernel programs' reasons, then the
        /// daemon's.
        #[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
        #[repr(u32)]
        pub enum Reason {
            $($(#[$kernel_doc])* $counted = $index,)+
            $($(#[$doc])* $name = Self::DAEMON + $number,)+
        }

        impl Reason {
            /// Every reason, in the order of the list.
            pub const ALL: [Self; [$($index,)+ $($number),+].len()] =
                [$(Self::$counted,)+ $(Self::$name),+];

            /// The reasons that the kernel programs count.
            pub const COUNTED_BY_KERNEL: [Self; [$($index),+].len()] = [$(Self::$counted),+];

            /// Returns the label used in metrics, logs and tables.
            #[must_use]
            pub const fn label(self) -> &'static str {
                match self {
                    $(Self::$counted => $word,)+
                    $(Self::$name => $label,)+
                }
            }

            /// Returns a description of the reason.
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
        /// A connection or datagram was sent to a backend that was selected for it.
        Translated = 0, "translated", "sent to a backend that was selected for it";
        /// A UDP datagram or connect() went to the backend that its flow already had.
        TranslatedSticky = 1, "translated_sticky", "sent to the backend that its UDP flow already had";
        /// Refused: the Service has no usable backend.
        NoBackend = 2, "no_backend", "refused: the Service has no usable backend";
        /// Refused: the frontend's record changed during every attempt to read it.
        RecordUnstable = 3, "record_unstable", "refused: the record of the frontend kept changing while it was read";
        /// Refused: a record points to a slot or backend that does not exist.
        RecordInvalid = 4, "record_invalid", "refused: a record points to a slot or backend that does not exist";
        /// UDP refused: the socket's storage can't be allocated, because of the limit `net.core.optmem_max`.
        SocketStorageFull = 5, "socket_storage_full", "UDP refused: no socket storage left (net.core.optmem_max)";
        /// A TCP connection was translated without socket storage, so getpeername() shows the backend.
        TranslatedUntracked = 6, "translated_untracked", "TCP translated without socket storage; peer names show the backend";
        /// A socket got its first translation.
        SocketTracked = 7, "socket_tracked", "a socket got its first translation";
        /// A socket with a translation was closed.
        SocketReleased = 8, "socket_released", "a socket with a translation was closed";
        /// An older translation of a UDP socket was moved to the map `older_shared`, because the socket's own
        /// storage is full.
        Overflowed = 9, "overflowed", "an older translation of a UDP socket moved to the map that all sockets share";
        /// A connection to an edge node was sent to the tunnel's ingress.
        Steered = 10, "steered", "sent to the tunnel's ingress";
        /// A connection was steered without socket storage, so getpeername() shows the steering address.
        SteeredUntracked = 11, "steered_untracked", "sent to the tunnel's ingress without socket storage; peer names show the steering prefix";
        /// Refused: the steering prefix has no route (yet).
        SteeringNoRoute = 12, "steering_no_route", "refused: no route to the steering prefix of this IP family";
        /// A packet from an uplink to a steering prefix was dropped.
        GuardDropped = 13, "guard_dropped", "dropped: a packet from an uplink to a steering prefix";
        /// An event from a kernel program was not logged, because the ring buffer was full.
        LogEventsLost = 14, "log_events_lost", "an event of the program in log.kernel was not logged: the ring buffer was full";
        /// Refused: the traffic policy is `Local`, and the Service has no usable backend on this node.
        NoLocalBackend = 15, "no_local_backend", "refused: the traffic policy is Local, and there is no usable backend on this node";
        /// A connection or datagram was sent to the backend stored for its client (session affinity).
        TranslatedAffinity = 16, "translated_affinity", "sent to the backend of its client (sessionAffinity)";
        /// Refused: the client is in none of the load balancer's source ranges.
        SourceRangeDenied = 17, "source_range_denied", "refused: the client is in none of the Service's loadBalancerSourceRanges";
        /// Refused: the address has source ranges, but the client's address is unknown.
        ClientAddressUnknown = 18, "client_address_unknown", "refused: the address has loadBalancerSourceRanges, and this kernel does not show the address of the client";
        /// A kernel socket's TCP connection was translated. It is not tracked, because no hook runs when it
        /// is closed.
        TranslatedKernel = 19, "translated_kernel", "TCP of a kernel socket (NFS, MPTCP) translated; not tracked, and peer names show the backend";
        /// An older translation of a UDP socket was lost: there is no socket storage for it, the map
        /// `older_shared` is full, or the socket has the maximum number of translations there.
        TranslationLost = 20, "translation_lost", "an older translation of a UDP socket was lost: bpf.maps.sharedTranslations is used up, or the socket uses too many addresses";
        /// Refused: the map of flows is full, and no flow can be spared.
        FlowsFull = 21, "flows_full", "packet refused: bpf.maps.flows is used up by open connections";
        /// Dropped: no port of this node can stand for the client.
        PortsFull = 22, "ports_full", "packet dropped: no port of this node is free to stand for the client";
        /// Left alone: a packet's headers contradict each other, or are truncated.
        PacketMalformed = 23, "packet_malformed", "packet left alone: its headers are truncated or contradict each other";
        /// Left alone: the first fragment of the packet was not translated, or has not been seen.
        FragmentUnmatched = 24, "fragment_unmatched", "fragment left alone: the first one of its packet was not translated, or has not arrived before it";
        /// A packet was refused, and its sender got no answer.
        RefusalUnsent = 25, "refusal_unsent", "no answer to a refused packet: service.packets.refusalsPerSecond is reached, or the packet has IP options or extension headers";
        /// An ICMP error about a packet of a flow was translated, as the flow's packets are.
        IcmpErrorTranslated = 26, "icmp_error_translated", "an ICMP error about a packet of a flow was translated";
        /// Left alone: an ICMP error is about a packet of no flow.
        IcmpErrorUnmatched = 27, "icmp_error_unmatched", "ICMP error left alone: the packet that it is about belongs to no flow";
        /// Dropped: an ICMP redirect would lead the packets of a flow past this node.
        IcmpRedirectDropped = 28, "icmp_redirect_dropped", "dropped: an ICMP redirect about a packet of a flow";
        /// Dropped: a first fragment is too short for the transport header.
        FragmentTooShort = 29, "fragment_too_short", "dropped: the first fragment of a packet is too short for the header with its ports";
        /// Dropped: the kernel could not allocate the entry of a new flow, although the map has room.
        FlowUnallocated = 30, "flow_unallocated", "dropped: the kernel had no memory at hand for a new flow; the client sends again";
        /// Refused: the packet is for a port of a cluster IP that the Service does not have.
        ClusterPortUnused = 31, "cluster_port_unused", "packet refused: the cluster IP has no such port";
        /// Dropped: the address could be a cluster IP, but is none.
        ClusterIpUnallocated = 32, "cluster_ip_unallocated", "packet dropped: the address in a ServiceCIDR is not the cluster IP of a Service";
        /// A flow of datagrams over IPv4 left a backend that no longer serves, or a Service that has lost the address.
        DatagramsMovedV4 = 33, "datagrams_moved_v4", "a flow of datagrams over IPv4 left a backend that no longer serves, or a Service that has lost the address";
        /// A flow of datagrams over IPv6 left a backend that no longer serves, or a Service that has lost the address.
        DatagramsMovedV6 = 34, "datagrams_moved_v6", "a flow of datagrams over IPv6 left a backend that no longer serves, or a Service that has lost the address";
        /// Refused or dropped: a packet of this host has no way to its backend by a link on which packets are translated.
        HostNoRoute = 35, "host_no_route", "packet of this host refused: no link with the programs leads to the backend";
        /// Dropped: a packet of this host to a frontend, or a reply to it, is a fragment.
        HostFragment = 36, "host_fragment", "packet of this host to a frontend, or reply to it, dropped: it is a fragment";
        /// Dropped: a packet of this host would begin a flow while the flows are being moved.
        FlowsMoving = 37, "flows_moving", "packet of this host dropped: flows are being moved to a map of another size; the client sends again";
        /// Passed on to the network stack: a packet could not be redirected.
        RedirectUnavailable = 38, "redirect_unavailable", "packet left to the network stack, although its link redirects: no route or neighbour, too big, or its TTL ends";
    }
    daemon {
        /// Not programmed: there is no room for another frontend.
        FrontendsFull = 14, "frontends_full", "not programmed as planned: bpf.maps.frontends is used up";
        /// Not programmed, or not with all endpoints: there is no room for a backend set's slots.
        SlotsFull = 15, "slots_full", "not programmed as planned: bpf.maps.slots is used up";
        /// Not programmed, or not with all endpoints: there is no room for another backend.
        BackendsFull = 16, "backends_full", "not programmed as planned: bpf.maps.backends is used up";
        /// Not programmed: another Service has the same address, port and protocol.
        FrontendConflict = 17, "frontend_conflict", "not programmed: another Service has this address, port and protocol";
        /// Not programmed: a write to a map failed.
        WriteFailed = 18, "write_failed", "not programmed: a write to a map failed; it is retried";
        /// Not read: a manifest or object is invalid.
        ObjectRejected = 19, "object_rejected", "not read: a manifest, or an object in it, is invalid";
        /// Not steered: there is no room for another steering record.
        SteeringFull = 20, "steering_full", "not steered: bpf.maps.steering or a steering prefix is used up";
        /// Not steered: an edge node has no address, or one that it may not have.
        NodeRejected = 21, "node_rejected", "not steered: an edge node has no address, or an address that it may not have";
        /// Not steered: an entry in a port list is invalid, or overridden by another list.
        PortsRejected = 22, "ports_rejected", "not steered: an entry of a port list is invalid, or another list overrides it";
        /// Both ends closed the stream.
        StreamCompleted = 23, "stream_completed", "closed by both ends";
        /// The client reset the stream.
        ClientReset = 24, "client_reset", "reset by the client";
        /// The target reset the stream.
        TargetReset = 25, "target_reset", "reset by the target";
        /// Refused: the connection reached the ingress from an uplink, or without being steered.
        ArrivedUnsteered = 26, "arrived_unsteered", "refused: the connection reached the ingress by an uplink, or without being steered";
        /// Refused: the steering address no longer belongs to any node and port.
        TargetUnknown = 27, "target_unknown", "refused: the steering address belongs to no node and port any more";
        /// Refused: the node's agent is not connected.
        AgentNotConnected = 28, "agent_not_connected", "refused: agent not connected";
        /// The session that carried the stream was lost.
        AgentConnectionLost = 29, "agent_connection_lost", "the connection to the agent was lost";
        /// Refused: every session of the node has the maximum number of streams, or the ingress already has
        /// the maximum number of clients.
        StreamLimit = 30, "stream_limit", "refused: every session of the node has tunnel.session.maxStreams streams, or the ingress has its maximum number of clients";
        /// Refused by the agent: the target is not on its allow-list.
        TargetDenied = 31, "target_denied", "refused by the agent: not on its allow-list";
        /// The target refused the agent's connection.
        DialRefused = 32, "dial_refused", "the target refused the agent's connect";
        /// The agent has no route to the target.
        DialUnreachable = 33, "dial_unreachable", "the agent has no route to the target";
        /// The target did not answer the agent's connection attempt in time.
        DialTimedOut = 34, "dial_timed_out", "the target did not answer the agent's connect in time";
        /// Refused by the agent: the maximum number of connection attempts is already in progress.
        DialLimit = 35, "dial_limit", "refused by the agent: tunnel.agent.maxPendingDials connects are in progress";
        /// Refused: this end is shutting down.
        Draining = 36, "draining", "refused: this end is shutting down";
        /// The peer violated the protocol.
        ProtocolError = 37, "protocol_error", "the peer violated the protocol";
        /// A TLS or tunnel handshake failed.
        HandshakeFailed = 38, "handshake_failed", "a TLS or tunnel handshake failed";
        /// A TLS or tunnel handshake timed out.
        HandshakeTimedOut = 39, "handshake_timed_out", "a TLS or tunnel handshake timed out";
        /// Refused: the limit on handshakes in progress has been reached.
        HandshakeLimit = 40, "handshake_limit", "refused: the limit of handshakes (tunnel.gateway.maxPendingHandshakes) is reached";
        /// Refused: the certificate is not an agent's, or names no node.
        IdentityRejected = 41, "identity_rejected", "refused: the certificate is not an agent's, or names no node";
        /// Ignored: a field is invalid; the object is used without it.
        FieldIgnored = 43, "field_ignored", "ignored: an invalid field of an object; the object is used without it";
        /// Another process is using a port that the daemon needs; the daemon retries.
        PortInUse = 44, "port_in_use", "a port of the daemon is in use by another process; it is retried";
        /// A connected socket was terminated, because its backend was removed from the Service.
        SocketTerminated = 46, "socket_terminated", "a connected socket was terminated: its backend was removed from the Service";
        /// Not served: another process or Service is using a Service's health check port.
        HealthPortInUse = 47, "health_port_in_use", "not served: another process or Service has this health check port; it is retried";
        /// Not programmed at an external IP that belongs to no Node and to no Service's load balancer.
        ExternalIpNotOwned = 49, "external_ip_not_owned", "not programmed at an external IP that no Node and no load balancer of a Service has (service.externalIPs)";
        /// A program, link or pin of Culvert was missing, and has been restored.
        ProgramRestored = 51, "program_restored", "a program, link or pin of Culvert was missing, and has been restored";
        /// Not programmed: there is no room for a load balancer's source ranges.
        SourceRangesFull = 52, "source_ranges_full", "not programmed: bpf.maps.sourceRanges is used up";
        /// Programmed with one slot for each endpoint, because there is no room for a Maglev table or for
        /// weights.
        SlotsReduced = 57, "slots_reduced", "not programmed as planned: no room in bpf.maps.slots for the Maglev table or the weights, so all endpoints get equal shares";
        /// Not programmed, or not with all endpoints: the Service's namespace has used up its share.
        NamespaceShareExceeded = 58, "namespace_share_exceeded", "not programmed as planned: the share of the namespace is used up";
        /// Not programmed at an external IP or load balancer address that is an address of this node.
        NodeAddressRefused = 59, "node_address_refused", "not programmed at an external IP or load balancer address that is an address of this node (service.nodeAddresses)";
        /// Ignored: a process of an untrusted user listens on a cluster IP that an interface of this node has.
        ListenerIgnored = 60, "listener_ignored", "ignored: a process of a user that is not in service.localListeners listens on a cluster IP of this node";
        /// Refused: the gateway's limit on sessions, or on sessions of one node, has been reached.
        SessionLimit = 62, "session_limit", "refused: the limit on sessions of the gateway, or of this node, is reached";
        /// Two machines use the certificate of one node.
        CertificateShared = 63, "certificate_shared", "two machines use the certificate of one node";
        /// Not programmed, or not with all endpoints: no range of free slots is long enough.
        SlotsFragmented = 64, "slots_fragmented", "not programmed as planned: bpf.maps.slots has enough free entries, but too few of them in a row";
        /// Refused: the client already holds its share of the streams of a node, or of the ingress.
        ClientShareExceeded = 65, "client_share_exceeded", "refused: the client holds its share of the streams of a node, or of the ingress";
        /// Two Nodes have the same address. Connections are refused if it is unknown which edge node had it first.
        AddressDisputed = 66, "address_disputed", "several nodes have this address; refused if it is unknown which edge node had it first";
        /// An edge node's address is steered, although nothing confirms that the node has it.
        AddressUnconfirmed = 67, "address_unconfirmed", "steered, although tunnel.steering.nodeCIDRs does not confirm that the address is an edge node's";
        /// A client was refused that may not use the ingress.
        ClientNotAllowed = 68, "client_not_allowed", "refused: tunnel.steering.allow does not list the client";
        /// The gateway has refused or ended a session, although the agent's certificate is valid.
        SessionRevoked = 70, "session_revoked", "revoked by the gateway: the deny list has the node or its certificate, there is no Node object, or `culvert nodes end` was called";
        /// No byte of the stream moved for the configured time.
        StreamIdle = 71, "stream_idle", "reset: no byte moved for tunnel.session.idleTimeout";
        /// Refused: the process has no file descriptor for the connection.
        DescriptorLimit = 72, "descriptor_limit", "refused: the process may not open more files (RLIMIT_NOFILE)";
        /// Refused or reset: the tunnel's memory for bytes that wait for slow receivers is used up.
        MemoryLimit = 73, "memory_limit", "refused or reset: bytes that wait for slow receivers use up tunnel.session.maxBufferedBytes";
        /// The certificate of an agent should have been renewed an hour ago.
        CertificateNotRenewed = 74, "certificate_not_renewed", "the certificate of an agent has not been renewed in time";
        /// The requests for a gateway's certificate have been without success for an hour.
        CertificateRequestFailed = 75, "certificate_request_failed", "the gateway has got no certificate for an hour";
    }
}

impl Reason {
    /// The number of entries in the map `reason_counts`. A new reason for the kernel programs takes the
    /// next free number below this, so that the map's layout stays the same.
    pub const CAPACITY: u32 = 96;

    /// The offset that is added to a daemon reason's number to give its value in this enum.
    const DAEMON: u32 = 256;

    /// Returns the index of the reason's counter in the map `reason_counts`. Meaningful only for reasons that
    /// the kernel programs count.
    #[inline(always)]
    #[must_use]
    #[expect(clippy::as_conversions, reason = "a field-less enum with repr(u32)")]
    pub const fn index(self) -> u32 {
        self as u32
    }

    /// Returns the reason whose counter is at an index in the map `reason_counts`.
    #[must_use]
    pub fn from_index(index: u32) -> Option<Self> {
        Self::COUNTED_BY_KERNEL
            .into_iter()
            .find(|reason| reason.index() == index)
    }

    /// Returns a daemon reason's number, as sent in stream resets, or `None` if the kernel programs count the
    /// reason.
    #[must_use]
    pub const fn number(self) -> Option<u32> {
        self.index().checked_sub(Self::DAEMON)
    }

    /// Returns the daemon reason with this number.
    #[must_use]
    pub fn from_number(number: u32) -> Option<Self> {
        Self::ALL
            .into_iter()
            .find(|reason| reason.number() == Some(number))
    }

    /// Returns true if the kernel programs count this reason, or false if the daemon does.
    #[must_use]
    pub const fn is_counted_by_kernel(self) -> bool {
        self.number().is_none()
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn reasons_are_ordered_by_their_numbers_and_the_map_has_room_for_many_more() {
        assert!(Reason::ALL.is_sorted_by(|one, next| one < next));
        for (index, reason) in (0..).zip(Reason::COUNTED_BY_KERNEL) {
            assert_eq!(reason.index(), index);
            assert_eq!(Reason::from_index(index), Some(reason));
            assert!(reason.is_counted_by_kernel() && index + 32 < Reason::CAPACITY);
        }
        for reason in Reason::ALL
            .into_iter()
            .filter(|reason| !reason.is_counted_by_kernel())
        {
            assert!(reason.index() >= Reason::CAPACITY);
            assert_eq!(Reason::from_index(reason.index()), None);
            assert_eq!(reason.number().and_then(Reason::from_number), Some(reason));
        }
    }

    #[test]
    fn no_two_reasons_share_a_label() {
        let labels: BTreeSet<_> = Reason::ALL.iter().map(|reason| reason.label()).collect();

        assert_eq!(labels.len(), Reason::ALL.len());
    }
}
