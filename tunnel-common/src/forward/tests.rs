mod client;
mod errors;
mod fixture;
mod forged;
mod fragments;
mod host;
mod lifetime;
mod pod_links;
mod ports;
mod reclaim;
mod steering;

use std::collections::BTreeMap;

use proptest::{collection::vec, prelude::*};

use self::fixture::{ACK, Client, Ends, FIN, NODE, Node, RST, SYN, endpoint, text_of};
use super::*;
use crate::{
    addr::Protocol,
    service::Frontend,
    service_range::{CLUSTER_IP, LEFT_ALONE, RangeKind},
};

const CLIENT: &str = "203.0.113.9:40000";
const VIP: &str = "198.51.100.1:80";
const BACKENDS: [&str; 3] = ["10.244.1.5:8080", "10.244.2.5:8080", "10.244.3.5:8080"];

#[test]
fn packets_reach_a_backend_and_replies_come_from_the_frontend_of_either_family() {
    for (client, frontend, backend) in [
        (CLIENT, VIP, BACKENDS[0]),
        (
            "[2001:db8::9]:40000",
            "[2001:db8:1::1]:80",
            "[fd00::5]:8080",
        ),
    ] {
        for protocol in [Protocol::TCP, Protocol::UDP] {
            for is_remote in [true, false] {
                let node = Node::new(&[frontend], &[backend], protocol);
                let client = Client::new(&node, client, frontend, is_remote);
                let ends = client.connect();
                assert_eq!(
                    ends,
                    (client.at, endpoint(backend)),
                    "the backend sees the client"
                );
                assert_eq!(node.entries(), 2);
            }
        }
    }
}

#[test]
fn a_masqueraded_client_appears_as_the_node_with_its_own_port_if_that_is_free() {
    let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    node.masquerade();
    let first = Client::new(&node, CLIENT, VIP, true);
    assert_eq!(text_of(first.connect().0), format!("{NODE}:40000"));
    assert_eq!(node.entries(), 3);

    let other = Client::new(&node, "203.0.113.10:40000", VIP, true);
    let (seen, _) = other.connect();
    assert_eq!(seen.address, endpoint(&format!("{NODE}:1")).address);
    assert_ne!(seen.port.to_host(), 40_000, "another client has it");

    node.taken.borrow_mut().push(40_001);
    let third = Client::new(&node, "203.0.113.11:40001", VIP, true);
    assert_ne!(third.connect().0.port.to_host(), 40_001, "a socket has it");
    for client in [&first, &other, &third] {
        let ends = client.send(ACK).expect("open");
        client.expect_reply(ends, ACK);
    }
}

#[test]
fn other_packets_pass_and_take_no_entry() {
    let node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    let client = Client::new(&node, CLIENT, VIP, true);
    for flags in [ACK, SYN | ACK, FIN, RST] {
        assert_eq!(
            client.send(flags),
            Ok((client.at, client.frontend)),
            "in the middle"
        );
    }
    let elsewhere = Client::new(&node, CLIENT, "198.51.100.2:80", true);
    assert_eq!(elsewhere.send(SYN), Ok((elsewhere.at, elsewhere.frontend)));
    assert_eq!(node.entries(), 0);
}

#[test]
fn a_service_without_backends_refuses() {
    let node = Node::new(&[VIP], &[], Protocol::UDP);
    let refused = Client::new(&node, CLIENT, VIP, true).send(0);
    assert_eq!(refused, Err((Reason::NoBackend, false)));
    assert_eq!(node.entries(), 0);
}

#[test]
fn other_ports_of_cluster_ips_are_refused_and_packets_to_unallocated_addresses_dropped() {
    let address = |text: &str| Address::from_ip(text.parse().expect("an address"));
    let mut node = Node::new(&["10.96.0.1:80"], &BACKENDS, Protocol::TCP);
    node.service_ranges = vec![ServiceRange {
        addresses: SourceRange {
            first: address("10.96.0.0"),
            last: address("10.96.0.255"),
        },
        kind: RangeKind::SERVICE_CIDR,
    }];
    node.addresses = vec![
        (address("10.96.0.1"), CLUSTER_IP),
        (address("10.96.0.3"), LEFT_ALONE),
    ];
    let unused = Reason::ClusterPortUnused;
    for (to, flags, expected) in [
        ("10.96.0.1:80", SYN, None),
        ("10.96.0.1:81", SYN, Some((unused, false))),
        ("10.96.0.1:81", ACK, None),
        (
            "10.96.0.2:80",
            SYN,
            Some((Reason::ClusterIpUnallocated, true)),
        ),
        ("10.96.0.3:80", SYN, None),
        ("10.97.0.1:80", SYN, None),
    ] {
        let sent = Client::new(&node, CLIENT, to, true).send(flags);
        assert_eq!(sent.err(), expected, "{to}");
    }
}

#[test]
fn a_tcp_connection_keeps_its_backend_and_datagrams_leave_one_that_is_removed() {
    for (protocol, keeps) in [(Protocol::TCP, true), (Protocol::UDP, false)] {
        let mut node = Node::new(&[VIP], &BACKENDS[..2], protocol);
        node.masquerade();
        let client = Client::new(&node, CLIENT, VIP, true);
        let (_, backend) = client.connect();
        for _ in 0..50 {
            assert_eq!(client.send(ACK).expect("a backend").1, backend);
        }

        let index = BACKENDS
            .iter()
            .position(|text| endpoint(text) == backend)
            .expect("one of them");
        let node = node.without_backend(index);
        let client = Client::new(&node, CLIENT, VIP, true);

        let ends = client.send(ACK).expect("a backend");
        assert_eq!(ends.1 == backend, keeps, "{protocol}");
        assert_eq!(node.entries(), 3, "those of the old backend have ended");
        client.expect_reply(ends, ACK);
        assert_eq!(client.send(ACK), Ok(ends));
        let moved = [Reason::DatagramsMovedV4];
        assert_eq!(*node.counted.borrow(), moved[..usize::from(!keeps)]);
    }
}

fn dialled(client: &Client<'_>) -> FlowKey {
    FlowKey::arriving(client.at, client.frontend, client.protocol)
}

#[test]
fn in_a_full_map_new_flows_are_refused_and_existing_ones_go_on() {
    let node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    node.capacity.set(5);
    let clients = [1, 2, 3].map(|host| {
        let at = format!("203.0.113.{host}:40000");
        Client::new(&node, &at, VIP, true)
    });
    let ends = [0, 1].map(|at| clients[at].connect());

    assert_eq!(clients[2].send(SYN), Err((Reason::FlowsFull, false)));
    for (client, ends) in clients.iter().zip(ends) {
        assert_eq!(client.send(ACK), Ok(ends));
        client.expect_reply(ends, ACK);
    }
    // The flow that was refused holds no entry, but for one that has ended.
    clients[0].send(RST).expect("open");
    node.wait(Timeouts::DEFAULT.closed + 1);
    clients[2].connect();
    assert_eq!(clients[1].send(ACK), Ok(ends[1]));
}

#[test]
fn in_a_full_map_connections_that_both_ends_have_closed_or_one_has_reset_give_way() {
    let is_over: [(&[u8], &[u8]); 3] = [(&[FIN], &[FIN]), (&[RST], &[]), (&[], &[RST])];
    for (sent, received) in is_over {
        for must_masquerade in [false, true] {
            let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
            if must_masquerade {
                node.masquerade();
            }
            node.capacity.set(6);
            let clients = [1, 2, 3].map(|host| {
                let at = format!("203.0.113.{host}:{}", 40_000 + host);
                Client::new(&node, &at, VIP, true)
            });
            let [closed, open] = [0, 1].map(|at| clients[at].connect());
            for flags in sent {
                assert_eq!(clients[0].send(*flags), Ok(closed));
            }
            for flags in received {
                clients[0].expect_reply(closed, *flags);
            }

            // Without masquerade, there is room for a third one.
            clients[2].connect();
            let further = Client::new(&node, "203.0.113.4:40004", VIP, true);
            assert_eq!(further.send(SYN).is_ok(), !must_masquerade, "{sent:?}");
            assert_eq!(clients[1].send(ACK), Ok(open));
        }
    }
}

#[test]
fn without_memory_for_an_entry_a_packet_is_dropped_and_the_next_one_begins_the_flow() {
    let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    node.masquerade();
    // A flow has three entries. One of them is written twice.
    for insertions in 0..4 {
        let at = format!("203.0.113.{insertions}:40000");
        let client = Client::new(&node, &at, VIP, true);
        let entries = node.entries();
        // A second attempt fails as well.
        node.unallocated.set((insertions, 2));

        let (reason, _) = client.send(SYN).expect_err("an entry is missing");

        assert_eq!(reason, Reason::FlowUnallocated, "{insertions}");
        assert_eq!(node.entries(), entries, "{insertions}");
        client.connect();
    }
    for insertions in 0..4 {
        let at = format!("203.0.113.{insertions}:50000");
        node.unallocated.set((insertions, 1));
        Client::new(&node, &at, VIP, true).connect();
    }
}

/// A step of a random sequence.
#[derive(Clone, Copy, Debug)]
enum Step {
    /// A client connects to a frontend.
    Connect(usize, usize),
    /// A client and its backend exchange packets.
    Exchange(usize, usize),
    /// A client resets its connection.
    Reset(usize, usize),
    /// Nothing happens for some seconds.
    Wait(u32),
}

fn any_step() -> impl Strategy<Value = Step> {
    let pair = || (0..4_usize, 0..2_usize);
    prop_oneof![
        3 => pair().prop_map(|(client, frontend)| Step::Connect(client, frontend)),
        4 => pair().prop_map(|(client, frontend)| Step::Exchange(client, frontend)),
        1 => pair().prop_map(|(client, frontend)| Step::Reset(client, frontend)),
        1 => (0..200_u32).prop_map(Step::Wait),
    ]
}

proptest! {
    #[test]
    fn no_two_connections_are_one_to_a_backend_and_each_gets_its_own_replies(
        steps in vec(any_step(), 1..80),
        must_masquerade: bool,
        is_remote: bool,
        capacity in 4..30_usize,
    ) {
        const FRONTENDS: [&str; 2] = [VIP, "198.51.100.2:80"];
        let mut node = Node::new(&FRONTENDS, &BACKENDS[..2], Protocol::TCP);
        if must_masquerade {
            node.masquerade();
        }
        node.capacity.set(capacity);
        // All clients use one port, and two of them have one address.
        let addresses = ["203.0.113.1:7", "203.0.113.2:7", "203.0.113.3:7", "203.0.113.1:8"];
        let client = |at: usize, frontend: usize| {
            Client::new(&node, addresses[at], FRONTENDS[frontend], is_remote)
        };
        let mut open: BTreeMap<(usize, usize), Ends> = BTreeMap::new();
        for step in steps {
            match step {
                Step::Connect(at, frontend) => {
                    let client = client(at, frontend);
                    let before = node.entries();
                    match client.send(SYN) {
                        Ok(ends) => {
                            prop_assert_eq!(open.get(&(at, frontend)).unwrap_or(&ends), &ends);
                            open.insert((at, frontend), ends);
                            let others = open.iter().filter(|(key, _)| **key != (at, frontend));
                            for (other, seen) in others {
                                prop_assert_ne!(seen, &ends, "{:?}", other);
                            }
                            client.expect_reply(ends, SYN | ACK);
                            prop_assert_eq!(client.send(ACK), Ok(ends));
                        }
                        Err(refused) => {
                            prop_assert_eq!(refused.0, Reason::FlowsFull);
                            prop_assert!(node.entries() <= before, "a flow has all entries or none");
                            prop_assert!(!open.contains_key(&(at, frontend)));
                        }
                    }
                }
                Step::Exchange(at, frontend) => {
                    if let Some(ends) = open.get(&(at, frontend)) {
                        let client = client(at, frontend);
                        prop_assert_eq!(client.send(ACK), Ok(*ends));
                        client.expect_reply(*ends, ACK);
                    }
                }
                Step::Reset(at, frontend) => {
                    if open.remove(&(at, frontend)).is_some() {
                        client(at, frontend).send(RST).expect("open");
                    }
                }
                Step::Wait(seconds) => node.wait(seconds),
            }
        }
    }
}

/// Returns what a backend sees of a client: the client itself, or the node.
fn seen(node: &Node, client: &str, frontend: &str) -> String {
    text_of(Client::new(node, client, frontend, true).connect().0)
}

#[test]
fn who_is_masqueraded_depends_on_the_frontend_and_on_whether_the_client_is_local() {
    const POD: &str = "10.244.9.9:40000";
    const AS_NODE: &str = "192.0.2.10:40000";
    let pods = SourceRange {
        first: endpoint("10.244.0.0:0").address,
        last: endpoint("10.244.255.255:0").address,
    };
    let foreign = Frontend::MASQUERADE_FOREIGN;
    // Flags, ranges, masqueradeAll; what backends see of a client outside, and of a pod.
    for (flags, ranges, masquerades_all, of_outside, of_pod) in [
        (0, vec![pods], false, CLIENT, POD),
        (foreign, vec![], false, CLIENT, POD),
        (foreign, vec![pods], false, AS_NODE, POD),
        (foreign, vec![], true, AS_NODE, AS_NODE),
        (foreign, vec![pods], true, AS_NODE, AS_NODE),
    ] {
        for (client, expected) in [(CLIENT, of_outside), (POD, of_pod)] {
            let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
            node.set_packet_flags(flags);
            node.local_ranges.clone_from(&ranges);
            node.masquerades_all = masquerades_all;
            let case = format!("{flags} {ranges:?} {masquerades_all} {client}");
            assert_eq!(seen(&node, client, VIP), expected, "{case}");
        }
    }
}

#[test]
fn a_backend_that_is_its_own_client_sees_the_node() {
    let node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    assert_eq!(seen(&node, "10.244.1.5:40000", VIP), "192.0.2.10:40000");
}

#[test]
fn a_frontend_whose_address_has_a_listener_is_left_alone() {
    let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    node.set_packet_flags(Frontend::NOT_PACKETS);
    let (source, destination) = (endpoint(CLIENT), endpoint(VIP));
    let packet = fixture::packet((source, destination), Protocol::TCP, SYN);
    assert_eq!(arrive(&node, &packet, 0), super::Step::Pass);
}

#[test]
fn while_flows_are_moved_none_begins_and_others_go_on() {
    for protocol in [Protocol::TCP, Protocol::UDP] {
        let node = Node::new(&[VIP], &BACKENDS[..1], protocol);
        let open = Client::new(&node, CLIENT, VIP, true);
        open.connect();
        node.is_frozen.set(true);
        let ends = open.send(ACK).expect("open");
        open.expect_reply(ends, ACK);
        let other = Client::new(&node, "203.0.113.10:40000", VIP, true);
        let ends = (endpoint("203.0.113.10:40000"), endpoint(VIP));
        let packet = fixture::packet(ends, protocol, SYN);
        assert_eq!(arrive(&node, &packet, 0), super::Step::Defer);
        node.is_frozen.set(false);
        other.connect();
    }
}
