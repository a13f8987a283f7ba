//! Tests of packets with a forged address, whose sender doesn't see what the backend sends.

use super::{
    BACKENDS, CLIENT, VIP, dialled,
    fixture::{ACK, Client, Ends, FIN, Node, RST, SYN, text_of},
};
use crate::{
    addr::Protocol,
    flow::{Phase, Role, Timeouts},
    packet::TcpNumbers,
};

/// The numbers of the client's data and of the backend's, and one that somebody has guessed.
const OF_CLIENT: u16 = 700;
const OF_BACKEND: u16 = 5000;
const GUESSED: u16 = 40_000;

const fn numbers(sequence: u16, acknowledged: u16) -> TcpNumbers {
    TcpNumbers {
        sequence,
        acknowledged,
    }
}

/// Nodes whose backends see the client, and one of their addresses.
fn nodes() -> [Node; 2] {
    [false, true].map(|must_masquerade| {
        let mut node = Node::new(&[VIP], &BACKENDS, Protocol::TCP);
        if must_masquerade {
            node.masquerade();
        }
        node
    })
}

/// Sends a packet of the client's, or one that looks like it.
fn send(client: &Client<'_>, numbers: TcpNumbers, flags: u8) {
    client.node.numbers_of_packets.set(numbers);
    client.send(flags).expect("translated, or left alone");
}

/// Sends a packet of the backend.
fn reply(client: &Client<'_>, ends: Ends, numbers: TcpNumbers, flags: u8) {
    client.node.numbers_of_packets.set(numbers);
    client.expect_reply(ends, flags);
}

/// Sends the first packet of a connection, and returns its ends when it reaches the backend.
fn begin(client: &Client<'_>) -> Ends {
    client.node.numbers_of_packets.set(numbers(OF_CLIENT, 0));
    client.send(SYN).expect("a backend")
}

/// Exchanges the packets of a handshake with numbers.
fn connect(client: &Client<'_>) {
    let ends = begin(client);
    reply(client, ends, numbers(OF_BACKEND, OF_CLIENT), SYN | ACK);
    send(client, numbers(OF_CLIENT, OF_BACKEND), ACK);
}

/// Returns the phase of the client's flow.
fn phase(client: &Client<'_>) -> Phase {
    let dialled = client.node.flow(&dialled(client)).expect("a flow");
    let forwarded = dialled.key_of(Role::FORWARDED);
    let forwarded = client.node.flow(&forwarded).expect("an entry");
    dialled.seen.union(forwarded.seen).phase(Protocol::TCP)
}

#[test]
fn a_handshake_ends_with_the_number_that_the_backend_has_sent() {
    for node in nodes() {
        let client = Client::new(&node, CLIENT, VIP, true);
        let ends = begin(&client);
        reply(&client, ends, numbers(OF_BACKEND, OF_CLIENT), SYN | ACK);

        send(&client, numbers(OF_CLIENT, GUESSED), ACK);
        send(&client, numbers(OF_CLIENT, GUESSED), FIN);
        send(&client, numbers(OF_CLIENT, GUESSED), RST | ACK);
        // The backend answers what it can't accept.
        reply(&client, ends, numbers(OF_BACKEND, OF_CLIENT), ACK);
        send(&client, numbers(OF_BACKEND, OF_CLIENT), ACK);
        assert_eq!(phase(&client), Phase::HalfOpen);

        send(&client, numbers(OF_CLIENT, OF_BACKEND), ACK);
        assert_eq!(phase(&client), Phase::Established);
    }
}

#[test]
fn a_handshake_ends_although_the_first_packet_of_the_backend_was_missed() {
    for node in nodes() {
        let client = Client::new(&node, CLIENT, VIP, true);
        let ends = begin(&client);
        send(&client, numbers(OF_CLIENT, OF_BACKEND), ACK);
        assert_eq!(phase(&client), Phase::HalfOpen);

        reply(&client, ends, numbers(OF_BACKEND, OF_CLIENT), ACK);
        send(&client, numbers(OF_CLIENT, OF_BACKEND), ACK);
        assert_eq!(phase(&client), Phase::Established);
    }
}

#[test]
fn a_reset_counts_if_its_number_is_the_one_that_the_backend_expects() {
    // The backend has acknowledged nothing, or some data.
    for acknowledged in [OF_CLIENT, OF_CLIENT + 30] {
        for node in nodes() {
            let client = Client::new(&node, CLIENT, VIP, true);
            connect(&client);
            let ends = client.send(ACK).expect("open");
            if acknowledged != OF_CLIENT {
                reply(&client, ends, numbers(OF_BACKEND, acknowledged), ACK);
            }

            // A packet that the backend ignores or answers is no end.
            send(&client, numbers(GUESSED, 0), ACK);
            node.wait(Timeouts::DEFAULT.half_open + 1);
            send(&client, numbers(GUESSED, 0), ACK);
            assert_eq!(phase(&client), Phase::Established);
            send(&client, numbers(GUESSED, 0), RST);
            assert_eq!(phase(&client), Phase::HalfClosed);
            node.wait(Timeouts::DEFAULT.closed + 1);
            assert_eq!(client.send(ACK), Ok(ends));

            send(&client, numbers(acknowledged, 0), RST);
            assert_eq!(phase(&client), Phase::Closed);
        }
    }
}

#[test]
fn nobody_moves_a_connection_to_another_backend_by_forged_packets() {
    for flags in [&[SYN][..], &[FIN, SYN], &[RST, SYN], &[RST, FIN, SYN, SYN]] {
        for node in nodes() {
            let client = Client::new(&node, CLIENT, VIP, true);
            connect(&client);
            let ends = client.send(ACK).expect("open");
            for _ in 0..20 {
                for flags in flags {
                    send(&client, numbers(GUESSED, GUESSED), *flags);
                }
                assert_eq!(client.send(ACK), Ok(ends), "{flags:?}");
            }
        }
    }
}

#[test]
fn a_syn_leaves_a_removed_backend_that_does_not_answer() {
    let mut node = Node::new(&[VIP], &BACKENDS[..2], Protocol::TCP);
    node.masquerade();
    let chosen = |node: &Node| {
        let client = Client::new(node, CLIENT, VIP, true);
        connect(&client);
        client.send(ACK).expect("open")
    };
    let ends = chosen(&node);
    let node = node.without_backend(usize::from(text_of(ends.1) != BACKENDS[0]));
    let client = Client::new(&node, CLIENT, VIP, true);

    for _ in 0..3 {
        // A backend that is alive answers a SYN with the number that it expects.
        assert_eq!(client.send(SYN), Ok(ends));
        client.expect_reply(ends, ACK);
        node.wait(5);
    }
    assert_eq!(client.send(SYN), Ok(ends));
    node.wait(3);
    let moved = client.send(SYN).expect("the other backend");
    assert_ne!(moved.1, ends.1);
}
