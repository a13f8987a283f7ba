//! The flows that give way in a full map.

use super::{ACK, CLIENT, Client, Node, SYN, VIP};
use crate::addr::Protocol;

const FLOWS: u16 = 200;

/// Returns clients with different ports.
fn clients(node: &Node, ports: std::ops::Range<u16>) -> Vec<Client<'_>> {
    let address = CLIENT.split(':').next().expect("an address");
    let clients = ports.map(|port| Client::new(node, &format!("{address}:{port}"), VIP, false));
    clients.collect()
}

/// Fills a map with answered queries.
fn full_of_answered() -> Node {
    let node = Node::new(&[VIP], &super::BACKENDS, Protocol::UDP);
    node.capacity.set(2 * usize::from(FLOWS));
    for client in clients(&node, 1..FLOWS + 1) {
        let ends = client.send(0).expect("a backend");
        client.expect_reply(ends, 0);
    }
    node
}

#[test]
fn queries_on_their_way_do_not_end_each_other_in_a_map_full_of_answered_ones() {
    let node = full_of_answered();
    for round in 0..5 {
        let first = 1000 + 20 * round;
        let queries = clients(&node, first..first + 20);
        let sent: Vec<_> = queries
            .iter()
            .map(|query| query.send(0).expect("a backend"))
            .collect();
        for (query, ends) in queries.iter().zip(sent) {
            query.expect_reply(ends, 0);
        }
    }
}

#[test]
fn a_flood_of_datagrams_ends_none_of_those_that_last() {
    let node = full_of_answered();
    let lasting = clients(&node, 1..FLOWS + 1);
    node.wait(2);
    for client in &lasting {
        client.send(0).expect("a backend");
    }
    node.wait(20);
    // Room for one more.
    node.capacity.set(2 * usize::from(FLOWS) + 2);
    for flooding in clients(&node, 1000..5000) {
        flooding.send(0).expect("a backend");
    }
    for client in &lasting {
        assert!(node.flow(&super::dialled(client)).is_some());
    }
}

#[test]
fn connections_that_their_backend_has_not_answered_give_way_although_the_client_acknowledges() {
    let node = Node::new(&[VIP], &super::BACKENDS, Protocol::TCP);
    node.capacity.set(2 * usize::from(FLOWS));
    let open = clients(&node, 1..50);
    for client in &open {
        client.connect();
    }
    for forged in clients(&node, 1000..3000) {
        forged.send(SYN).expect("a backend");
        forged.send(ACK).expect("a backend");
        if node.entries() >= 2 * usize::from(FLOWS) - 2 {
            // Until then, an answer is expected.
            node.wait(2);
        }
    }
    for client in &open {
        assert!(node.flow(&super::dialled(client)).is_some());
    }
    Client::new(&node, CLIENT, VIP, false).connect();
}
