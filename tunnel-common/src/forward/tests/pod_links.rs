//! Links that lead to pods of this node.

use super::{
    ACK, BACKENDS, CLIENT, Client, NODE, Node, SYN, VIP, dialled,
    fixture::{ARRIVING, endpoint, packet, text_of, through_egress},
};
use crate::{
    addr::Protocol,
    flow::{Flow, Role},
    forward::{Step, arrive, redirect::may_be_redirected},
    packet::Packet,
    packet_link::PacketLink,
    reason::Reason,
    service::{Frontend, IndexRange},
};

const PODS: u32 = PacketLink::LEADS_TO_PODS;
const LOCAL: u32 = PacketLink::LOCAL_SENDERS;
const KNOWN: u32 = PacketLink::KNOWN_FLOWS_ONLY;

/// Returns the flags of the entry for packets of the client, and of the one for both directions.
fn flags_of(node: &Node, client: &Client<'_>) -> [u8; 2] {
    let dialled = node.flow(&dialled(client)).expect("an entry");
    let forwarded = node.flow(&dialled.key_of(Role::FORWARDED));
    [dialled.flags, forwarded.expect("an entry").flags]
}

#[test]
fn local_pods_choose_among_all_backends_under_policy_local_and_are_not_masqueraded() {
    for (link_flags, expected) in [
        (PODS | LOCAL, None),
        (PODS | PacketLink::PRESUMED_LOCAL, None),
        (PODS, Some((Reason::NoLocalBackend, true))),
        (0, Some((Reason::NoLocalBackend, true))),
    ] {
        let mut node = Node::new(&[VIP], &BACKENDS, Protocol::TCP);
        node.set_packet_flags(Frontend::MASQUERADE_FOREIGN);
        for frontend in &mut node.frontends {
            frontend.cluster = frontend.local;
            frontend.local = IndexRange::default();
            frontend.flags |= Frontend::HAS_ENDPOINTS;
        }
        node.link_flags.set([link_flags, 0]);
        let client = Client::new(&node, CLIENT, VIP, true);

        let sent = client.send(SYN);

        assert_eq!(sent.err(), expected, "{link_flags}");
        if let Ok((seen, _)) = sent {
            assert_eq!(seen, client.at);
            assert_eq!(flags_of(&node, &client), [Flow::ON_POD_LINKS; 2]);
        }
    }
}

#[test]
fn only_the_first_packet_of_a_flow_is_masqueraded_on_the_way_to_a_pod() {
    for protocol in [Protocol::TCP, Protocol::UDP] {
        for (link_flags, is_masqueraded) in [(PODS, true), (PODS | KNOWN, false)] {
            let mut node = Node::new(&[VIP], &BACKENDS[..1], protocol);
            node.masquerade();
            node.link_flags.set([0, link_flags]);
            let client = Client::new(&node, CLIENT, VIP, true);
            let ends = client.connect();
            assert_eq!(ends.0 != client.at, is_masqueraded, "{protocol}");
            assert_eq!(client.send(ACK), Ok(ends));
            client.expect_reply(ends, ACK);
            assert_eq!(client.send(ACK), Ok(ends));
            let [_, forwarded] = flags_of(&node, &client);
            assert_eq!(forwarded & Flow::ON_POD_LINKS != 0, is_masqueraded);
        }

        // The backend knows the client, since the link had no programs when the flow began.
        let mut node = Node::new(&[VIP], &BACKENDS[..1], protocol);
        node.masquerade();
        let client = Client::new(&node, CLIENT, VIP, false);
        let ends = client.connect();
        client.expect_reply(ends, ACK);
        node.link_flags.set([0, PODS]);
        let sent = client.send(ACK).expect("a backend");
        assert_eq!(through_egress(&node, sent, protocol, ACK), Ok(ends));
    }
}

#[test]
fn a_packet_that_returns_to_a_link_of_pods_is_masqueraded() {
    for (link_flags, is_masqueraded) in [(PODS, true), (0, false)] {
        let node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
        node.link_flags.set([link_flags; 2]);
        node.returns.set(true);
        let client = Client::new(&node, CLIENT, VIP, true);
        let ends = client.connect();
        let seen = text_of(ends.0);
        assert_eq!(seen == format!("{NODE}:40000"), is_masqueraded, "{seen}");
        assert_eq!(client.send(ACK), Ok(ends));
        assert_eq!(ends.1, endpoint(BACKENDS[0]));
    }
}

#[test]
fn flows_go_on_but_none_begins_on_a_link_for_known_flows_only() {
    let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    node.masquerade();
    node.link_flags.set([PODS; 2]);
    let client = Client::new(&node, CLIENT, VIP, true);
    let ends = client.connect();

    node.link_flags.set([PODS | KNOWN; 2]);
    assert_eq!(client.send(ACK), Ok(ends));
    client.expect_reply(ends, ACK);
    let other = Client::new(&node, "203.0.113.9:40001", VIP, true);
    assert_eq!(other.send(SYN), Ok((other.at, other.frontend)));
}

#[test]
fn only_whole_packets_are_redirected_and_only_on_links_that_redirect() {
    for (link_flags, is_fragment, expected) in [
        (PacketLink::REDIRECTS, false, true),
        (PacketLink::REDIRECTS, true, false),
        (0, false, false),
    ] {
        let node = Node::new(&[VIP], &BACKENDS, Protocol::UDP);
        node.link_flags.set([link_flags, 0]);
        let ends = (endpoint(CLIENT), endpoint(VIP));
        let whole = packet(ends, Protocol::UDP, 0);
        let sent = Packet {
            is_fragment,
            ..whole
        };
        assert_eq!(arrive(&node, &sent, ARRIVING), Step::Begin);
        assert_eq!(
            may_be_redirected(&node),
            expected,
            "{link_flags} {is_fragment}"
        );
    }
}
