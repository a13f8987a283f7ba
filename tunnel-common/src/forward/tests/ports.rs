//! Tests of the ports that clients get between the programs and at backends.

use super::{
    BACKENDS, CLIENT, VIP, arrive,
    fixture::{self, ACK, Client, FIN, Node, RST, SYN, endpoint},
};
use crate::{addr::Protocol, flow::Timeouts, forward::Step, reason::Reason};

#[test]
fn without_a_free_port_a_client_is_refused_and_the_others_go_on() {
    let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    node.masquerade();
    node.taken.borrow_mut().extend(1024..1024 + 64);
    node.taken.borrow_mut().push(40_000);

    assert_eq!(
        Client::new(&node, CLIENT, VIP, true).send(SYN),
        Err((Reason::PortsFull, true))
    );
    assert_eq!(node.entries(), 0);
    Client::new(&node, "203.0.113.10:40001", VIP, true).connect();
}

#[test]
fn each_port_of_a_small_range_is_used_before_a_client_is_refused() {
    for ports in 1..=5 {
        let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
        node.masquerade();
        node.ports = ports;
        // The clients' own port is taken.
        node.taken.borrow_mut().push(40_000);
        let client = |number| Client::new(&node, &format!("203.0.113.{number}:40000"), VIP, true);
        for number in 1..=ports {
            client(number).connect();
        }
        let refused = client(100).send(SYN);
        assert_eq!(refused, Err((Reason::PortsFull, true)), "{ports}");
    }
}

#[test]
fn the_port_of_a_reset_connection_is_free_at_once_and_that_of_a_closed_one_if_no_other_is() {
    for flags in [RST, FIN | ACK] {
        let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
        node.masquerade();
        node.ports = 1;
        node.taken.borrow_mut().push(40_000);
        let first = Client::new(&node, CLIENT, VIP, true);
        let ends = first.connect();
        first.send(flags).expect("open");
        if flags != RST {
            first.expect_reply(ends, flags);
        }
        let other = Client::new(&node, "203.0.113.10:40000", VIP, true);
        assert_eq!(other.connect(), ends, "{flags}");
        assert_eq!(first.send(SYN), Err((Reason::PortsFull, true)), "{flags}");
    }
}

#[test]
fn the_port_of_a_handshake_that_nobody_answers_is_taken_if_no_other_is_free() {
    let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    node.masquerade();
    node.ports = 1;
    node.taken.borrow_mut().push(40_000);
    let ends = Client::new(&node, CLIENT, VIP, true)
        .send(SYN)
        .expect("a backend");
    let other = Client::new(&node, "203.0.113.10:40000", VIP, true);
    node.wait(1);
    assert_eq!(other.send(SYN), Err((Reason::PortsFull, true)));
    node.wait(1);
    assert_eq!(other.connect(), ends);
}

#[test]
fn a_client_that_dials_a_backend_itself_with_a_port_that_it_has_used_gets_the_backends_replies() {
    for (must_masquerade, is_remote) in [(false, false), (false, true), (true, true)] {
        let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
        if must_masquerade {
            node.masquerade();
        }
        let client = Client::new(&node, CLIENT, VIP, is_remote);
        let (_, backend) = client.connect();
        let (client_end, direct) = (endpoint(CLIENT), (endpoint(CLIENT), backend));
        client.send(RST).expect("open");
        let dial = |ends, flags| arrive(&node, &fixture::packet(ends, Protocol::TCP, flags), 0);
        assert_eq!(dial(direct, SYN), Step::Pass);
        for flags in [SYN | ACK, ACK] {
            let reply = fixture::through_egress(&node, (backend, client_end), Protocol::TCP, flags);
            assert_eq!(reply, Ok((backend, client_end)));
        }
    }
}

#[test]
fn one_client_port_reaches_one_backend_by_two_frontends() {
    const OTHER: &str = "198.51.100.2:80";
    for must_masquerade in [false, true] {
        for is_remote in [false, true] {
            let mut node = Node::new(&[VIP, OTHER], &BACKENDS[..1], Protocol::TCP);
            if must_masquerade {
                node.masquerade();
            }
            let clients = [VIP, OTHER].map(|vip| Client::new(&node, CLIENT, vip, is_remote));

            let [first, second] = [0, 1].map(|at| clients[at].connect());
            assert_ne!(first.0, second.0, "the backend sees two clients");
            for (client, ends) in clients.iter().zip([first, second]) {
                assert_eq!(client.send(ACK), Ok(ends));
                client.expect_reply(ends, ACK);
            }
        }
    }
}

#[test]
fn an_expired_flow_takes_no_port_from_another() {
    const OTHER: &str = "198.51.100.2:80";
    for must_masquerade in [false, true] {
        let mut node = Node::new(&[VIP, OTHER], &BACKENDS[..1], Protocol::TCP);
        if must_masquerade {
            node.masquerade();
        }
        let first = Client::new(&node, CLIENT, VIP, true).connect();
        node.wait(Timeouts::DEFAULT.established + 1);

        let next = Client::new(&node, CLIENT, OTHER, true).connect();

        assert_eq!(next, first, "its own port");
    }
}
