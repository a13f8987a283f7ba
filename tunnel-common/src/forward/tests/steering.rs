//! Connections to edge nodes that the node forwards.

use core::net::IpAddr;

use super::{
    ACK, BACKENDS, Client, Node, RST, SYN, VIP, dialled,
    fixture::{endpoint, text_of},
};
use crate::{
    addr::{Address, Port, Protocol},
    flow::Flow,
    forward::Steering,
    lookup::Lookup,
    packet_link::PacketLink,
    reason::Reason,
    service::SourceRange,
    steering::{SteeringKey, SteeringRecord},
};

/// The steering maps of a node.
#[derive(Default)]
pub(super) struct SteeringMaps {
    records: Vec<SteeringRecord>,
    routed_families: u64,
    forward_ranges: Vec<SourceRange>,
}

impl Steering for Node {
    fn is_steering_enabled(&self) -> bool {
        !self.steering.records.is_empty()
    }

    fn steering_record(&self, key: &SteeringKey) -> Lookup<&SteeringRecord> {
        let mut records = self.steering.records.iter();
        let record = records.find(|record| record.key == *key);
        record.map_or(Lookup::None, Lookup::Found)
    }

    fn routed_families(&self) -> u64 {
        self.steering.routed_families
    }

    fn forwarded_range(&self, index: u32) -> Option<&SourceRange> {
        self.steering.forward_ranges.get(index as usize)
    }
}

const KUBELET: &str = "10.99.0.7:10250";
const INGRESS: &str = "198.19.0.1:10270";
const LISTED: &str = "203.0.113.9:40000";

fn range(first: &str, last: &str) -> SourceRange {
    let [first, last] = [first, last].map(|text| {
        let ip: IpAddr = text.parse().expect("an address");
        Address::from_ip(ip)
    });
    SourceRange { first, last }
}

/// Creates a node that steers connections to [`KUBELET`], and forwards those of 203.0.113.0/28.
fn node() -> Node {
    let mut node = Node::new(&[VIP], &BACKENDS, Protocol::TCP);
    let (kubelet, ingress) = (endpoint(KUBELET), endpoint(INGRESS));
    node.steering = SteeringMaps {
        records: vec![SteeringRecord {
            removed_at: 0,
            key: SteeringKey::new(kubelet.address, kubelet.port),
            steering_address: ingress.address,
            ingress_port: ingress.port,
            kind: SteeringRecord::NODE,
        }],
        routed_families: SteeringRecord::ROUTED_V4,
        forward_ranges: vec![range("203.0.113.0", "203.0.113.15")],
    };
    node
}

#[test]
fn connections_of_listed_clients_go_to_the_ingress_and_replies_come_from_the_kubelet() {
    let node = node();
    let client = Client::new(&node, LISTED, KUBELET, false);

    let (seen, backend) = client.connect();

    assert_eq!((seen, text_of(backend)), (client.at, INGRESS.to_owned()));
    let flow = node.flow(&dialled(&client)).expect("an entry");
    assert_eq!(flow.service, Flow::NO_SERVICE);
    assert_eq!(client.send(ACK).map(|(_, backend)| backend), Ok(backend));
}

#[test]
fn connections_of_others_and_to_other_ports_are_left_alone() {
    for (from, to) in [
        ("203.0.113.16:40000", KUBELET),
        ("[2001:db8::9]:40000", "[2001:db8::7]:10250"),
        (LISTED, "10.99.0.7:10251"),
        (LISTED, "10.99.0.8:10250"),
    ] {
        let node = node();
        let client = Client::new(&node, from, to, true);

        let (seen, backend) = client.send(SYN).expect("a packet");

        assert_eq!((seen, backend), (client.at, endpoint(to)), "{from} to {to}");
        assert_eq!(node.entries(), 0);
    }
}

#[test]
fn packets_that_begin_no_tcp_connection_are_left_alone() {
    for (protocol, flags) in [
        (Protocol::TCP, ACK),
        (Protocol::TCP, RST),
        (Protocol::UDP, 0),
        (Protocol::SCTP, SYN),
    ] {
        let node = node();
        let mut client = Client::new(&node, LISTED, KUBELET, true);
        client.protocol = protocol;

        assert_eq!(client.send(flags), Ok((client.at, endpoint(KUBELET))));
    }
}

#[test]
fn pods_of_this_node_need_not_be_listed() {
    let leads = PacketLink::LEADS_TO_PODS;
    for (flags, is_steered) in [
        (leads | PacketLink::PRESUMED_LOCAL, true),
        (leads | PacketLink::LOCAL_SENDERS, true),
        (leads, false),
        (
            leads | PacketLink::LOCAL_SENDERS | PacketLink::KNOWN_FLOWS_ONLY,
            false,
        ),
    ] {
        let node = node();
        node.link_flags.set([flags, 0]);
        let client = Client::new(&node, "10.244.0.9:40000", KUBELET, false);

        let (_, to) = client.send(SYN).expect("a packet");

        let expected = if is_steered { INGRESS } else { KUBELET };
        assert_eq!(text_of(to), expected, "{flags}");
    }
}

#[test]
fn without_a_route_to_the_ingress_connections_are_refused() {
    let mut node = node();
    node.steering.routed_families = SteeringRecord::ROUTED_V6;
    let client = Client::new(&node, LISTED, KUBELET, true);

    assert_eq!(client.send(SYN), Err((Reason::SteeringNoRoute, false)));
    assert_eq!(node.entries(), 0);
}

#[test]
fn the_address_of_the_daemons_probe_is_left_alone() {
    let mut node = node();
    let to = endpoint(KUBELET);
    node.steering.records = vec![SteeringRecord::probe(
        SteeringKey::new(to.address, Port::from_host(10_250)),
        1,
    )];
    let client = Client::new(&node, LISTED, KUBELET, true);

    assert_eq!(client.send(SYN), Ok((client.at, to)));
}
