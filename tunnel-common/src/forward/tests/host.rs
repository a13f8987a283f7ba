//! Packets between this host and a frontend, whose sockets met no socket program.

use super::{
    ACK, FIN, NODE, Node, RST, SYN, VIP, endpoint,
    fixture::{Ends, LEAVING, Refusal, packet, reason, text_of, through_egress, through_ingress},
};
use crate::{
    addr::Protocol,
    flow::{Flow, FlowKey, Role},
    forward::{End, Step, errors, host},
    packet::icmp::ErrorHeader,
    packet_link::PacketLink,
    reason::Reason,
    service::{Frontend, IndexRange},
};

/// More backends than fit into the frontend's own record.
const BACKENDS: [&str; 4] = [
    "10.244.1.5:8080",
    "10.244.2.5:8080",
    "10.244.3.5:8080",
    "10.244.4.5:8080",
];
const HOST: &str = "192.0.2.1:40000";

/// A socket of this host that sends packets to a frontend.
struct HostSocket<'a> {
    node: &'a Node,
    at: crate::flow::Endpoint,
    protocol: Protocol,
    /// True if there is a route to the backend.
    has_route: bool,
    /// True if the source is an address of this host.
    is_own: bool,
}

/// Returns a node whose Service has these backends for local clients only.
fn node_with(backends: &[&str], protocol: Protocol) -> Node {
    let mut node = Node::new(&[VIP], backends, protocol);
    node.set_packet_flags(Frontend::MASQUERADE_FOREIGN);
    for frontend in &mut node.frontends {
        frontend.cluster = frontend.local;
        frontend.local = IndexRange::default();
        if !backends.is_empty() {
            frontend.flags |= Frontend::HAS_ENDPOINTS;
        }
    }
    node
}

impl<'a> HostSocket<'a> {
    fn new(node: &'a Node) -> Self {
        Self {
            node,
            at: endpoint(HOST),
            protocol: node.frontends[0].key.protocol,
            has_route: true,
            is_own: true,
        }
    }

    /// Sends a packet to the frontend, and returns its ends when it reaches the backend.
    fn send(&self, flags: u8) -> Result<Ends, Refusal> {
        let ends = self.send_to_link(flags)?;
        through_egress(self.node, ends, self.protocol, flags)
    }

    /// Sends a packet to the frontend, and returns its ends when it leaves for the link to the backend.
    fn send_to_link(&self, flags: u8) -> Result<Ends, Refusal> {
        let ends = (self.at, endpoint(VIP));
        assert_eq!(
            through_egress(self.node, ends, self.protocol, flags),
            Ok(ends),
            "it belongs to no flow by its ends"
        );
        host::start(self.node, &packet(ends, self.protocol, flags));
        let link = if self.has_route { LEAVING } else { 0 };
        let step = host::leave(self.node, |to| match to {
            host::To::Source => {
                if self.is_own {
                    host::LOCAL
                } else {
                    LEAVING
                }
            }
            host::To::Backend => link,
        });
        let run = self.node.run();
        match step {
            Step::Pass => Ok(ends),
            Step::Translate | Step::Begin => {
                Ok((ends.0.with_port(run.other_port), run.replacement))
            }
            Step::Refuse => Err((reason(&run), false)),
            Step::Drop => Err((reason(&run), true)),
            Step::Next | Step::Defer => panic!("{step:?}"),
        }
    }

    /// Sends a reply to a packet that has reached the backend, and checks that it reaches the socket from the frontend.
    fn expect_reply(&self, (seen, backend): Ends, flags: u8) {
        let ends = through_ingress(self.node, (backend, seen), self.protocol, flags);
        ends.expect("a reply");
        assert!(host::is_reply(self.node));
        assert_eq!(host::receive(self.node), Step::Translate);
        let reply = self.node.run().translated(End::Source);
        let ends = [reply.source_endpoint(), reply.destination_endpoint()];
        assert_eq!(ends.map(text_of), [VIP.to_owned(), text_of(self.at)]);
    }

    fn connect(&self) -> Ends {
        let ends = self.send(SYN).expect("a backend");
        self.expect_reply(ends, SYN | ACK);
        assert_eq!(self.send(ACK), Ok(ends));
        ends
    }

    fn entry(&self, role: Role) -> Flow {
        let dialled = FlowKey::arriving(self.at, endpoint(VIP), self.protocol);
        let dialled = self.node.flow(&dialled).expect("an entry");
        let forwarded = self.node.flow(&dialled.key_of(Role::FORWARDED));
        let forwarded = forwarded.expect("an entry");
        *self.node.flow(&forwarded.key_of(role)).expect("an entry")
    }
}

#[test]
fn packets_of_the_host_reach_a_backend_as_the_links_address_and_replies_come_from_the_frontend() {
    for protocol in [Protocol::TCP, Protocol::UDP] {
        let node = node_with(&BACKENDS, protocol);
        let socket = HostSocket::new(&node);

        let ends = socket.connect();

        assert_eq!(text_of(ends.0), format!("{NODE}:40000"));
        assert!(BACKENDS.contains(&text_of(ends.1).as_str()), "{ends:?}");
        assert_eq!(node.entries(), 3);
        for role in [Role::DIALLED, Role::FORWARDED, Role::MASQUERADED] {
            let flags = Flow::OF_HOST | Flow::MUST_MASQUERADE;
            assert_eq!(socket.entry(role).flags, flags);
        }

        // The port is taken by the socket itself, for example.
        node.taken.borrow_mut().push(40_001);
        let other = HostSocket {
            at: endpoint("192.0.2.1:40001"),
            ..socket
        };
        assert_ne!(other.connect().0.port.to_host(), 40_001);
    }
}

#[test]
fn a_reserved_port_is_replaced_by_another_reserved_port_only_if_it_is_taken() {
    for (taken, expected) in [(false, 700..=700), (true, 665..=1023)] {
        let node = node_with(&BACKENDS, Protocol::TCP);
        if taken {
            node.taken.borrow_mut().push(700);
        }
        let socket = HostSocket {
            at: endpoint("192.0.2.1:700"),
            ..HostSocket::new(&node)
        };
        let port = socket.connect().0.port.to_host();
        assert!(expected.contains(&port), "{port}");
        assert_eq!(port == 700, !taken);
    }
}

#[test]
fn packets_from_outside_that_claim_to_be_the_hosts_touch_no_flow_of_it() {
    let node = node_with(&BACKENDS, Protocol::TCP);
    let spoof = |flags| {
        let ends = (endpoint(HOST), endpoint(VIP));
        through_ingress(&node, ends, Protocol::TCP, flags)
    };
    let socket = HostSocket::new(&node);
    let ends = socket.connect();
    let before = socket.entry(Role::DIALLED);
    for flags in [SYN, ACK, RST, FIN] {
        assert_eq!(spoof(flags), Ok((socket.at, endpoint(VIP))), "{flags}");
    }
    assert_eq!(socket.entry(Role::DIALLED), before);
    assert_eq!(socket.send(ACK), Ok(ends));

    // They come first.
    let mut node = node_with(&BACKENDS, Protocol::TCP);
    for frontend in &mut node.frontends {
        frontend.local = frontend.cluster;
    }
    let ends = (endpoint(HOST), endpoint(VIP));
    through_ingress(&node, ends, Protocol::TCP, SYN).expect("a backend");
    HostSocket::new(&node).connect();
}

#[test]
fn packets_with_the_source_of_another_host_are_left_alone() {
    let node = node_with(&BACKENDS, Protocol::TCP);
    let other = HostSocket {
        is_own: false,
        ..HostSocket::new(&node)
    };
    assert_eq!(other.send(SYN), Ok((other.at, endpoint(VIP))));
    assert_eq!(node.entries(), 0);
}

#[test]
fn replies_show_the_phase_of_a_flow_of_the_host() {
    let node = node_with(&BACKENDS, Protocol::TCP);
    let socket = HostSocket::new(&node);
    let ends = socket.connect();
    socket.expect_reply(ends, FIN);
    let [forwarded, dialled] = [Role::FORWARDED, Role::DIALLED].map(|role| socket.entry(role));
    let phase = forwarded.seen.union(dialled.seen).phase(Protocol::TCP);
    assert_eq!(phase, crate::flow::Phase::HalfClosed);
}

#[test]
fn a_flow_of_the_host_begins_only_if_its_replies_arrive_on_a_link_with_the_programs() {
    let known = PacketLink::LEADS_TO_PODS | PacketLink::KNOWN_FLOWS_ONLY;
    for (has_route, link_flags, is_served) in [
        (true, 0, true),
        (true, PacketLink::LEADS_TO_PODS, true),
        (true, known, false),
        (false, 0, false),
    ] {
        let node = node_with(&BACKENDS, Protocol::TCP);
        node.link_flags.set([0, link_flags]);
        let socket = HostSocket {
            has_route,
            ..HostSocket::new(&node)
        };
        if is_served {
            socket.connect();
        } else {
            assert_eq!(socket.send(SYN), Err((Reason::HostNoRoute, false)));
            assert_eq!(node.entries(), 0);
        }
    }
}

#[test]
fn packets_of_the_host_to_others_pass_and_those_that_cannot_be_served_are_refused_or_dropped() {
    let node = node_with(&BACKENDS, Protocol::TCP);
    let socket = HostSocket::new(&node);
    assert_eq!(
        socket.send(ACK),
        Ok((socket.at, endpoint(VIP))),
        "in the middle"
    );

    node.is_frozen.set(true);
    assert_eq!(socket.send(SYN), Err((Reason::FlowsMoving, true)));
    node.is_frozen.set(false);
    socket.connect();

    let node = node_with(&[], Protocol::TCP);
    let refused = HostSocket::new(&node).send(SYN);
    assert_eq!(refused, Err((Reason::NoBackend, false)));
    assert_eq!(node.entries(), 0);
}

#[test]
fn an_icmp_error_about_a_packet_of_the_host_shows_the_frontend() {
    let node = node_with(&BACKENDS, Protocol::TCP);
    let socket = HostSocket::new(&node);
    let (seen, backend) = socket.connect();
    let router = endpoint("192.0.2.254:0").address;
    let header = ErrorHeader {
        source: router,
        destination: seen.address,
        ..zerocopy::FromZeros::new_zeroed()
    };

    errors::set_header(&node, &header);
    errors::start(&node, &packet((seen, backend), Protocol::TCP, ACK));
    assert_eq!(errors::arrive(&node), Step::Translate);
    assert!(host::is_reply(&node));
    assert_eq!(host::receive_error(&node), Step::Translate);

    let run = node.run();
    assert_eq!(run.error.destination, socket.at.address);
    let quoted = run.translated(End::Destination);
    let ends = [quoted.source_endpoint(), quoted.destination_endpoint()];
    assert_eq!(ends.map(text_of), [text_of(socket.at), VIP.to_owned()]);
}
