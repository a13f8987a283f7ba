//! Tests of how long flows last.

use super::{
    BACKENDS, CLIENT, VIP, dialled,
    fixture::{ACK, Client, FIN, Node, RST, SYN},
};
use crate::{
    addr::Protocol,
    flow::{Seen, Timeouts},
    reason::Reason,
};

#[test]
fn a_flow_ends_after_the_timeout_of_its_phase() {
    let timeouts = Timeouts::DEFAULT;
    // For each case: the packets of the client and of the backend, and the timeout.
    let cases: [(_, &[u8], &[u8], _); 8] = [
        (Protocol::TCP, &[SYN], &[], timeouts.half_open),
        (Protocol::TCP, &[SYN], &[ACK], timeouts.half_open),
        // The backend has not answered, so the client's address may be forged.
        (Protocol::TCP, &[SYN, ACK], &[], timeouts.half_open),
        (Protocol::TCP, &[SYN, ACK, FIN], &[], timeouts.half_open),
        (Protocol::TCP, &[SYN, ACK], &[ACK], timeouts.established),
        (
            Protocol::TCP,
            &[SYN, ACK, FIN],
            &[ACK],
            timeouts.half_closed,
        ),
        (Protocol::UDP, &[0], &[], timeouts.unanswered),
        (Protocol::UDP, &[0], &[0], timeouts.answered),
    ];
    for (protocol, sent, received, timeout) in cases {
        for (idle, is_kept) in [(timeout, true), (timeout + 1, false)] {
            let node = Node::new(&[VIP], &BACKENDS[..1], protocol);
            let client = Client::new(&node, CLIENT, VIP, true);
            let (first, others) = sent.split_first().expect("a packet");
            let ends = client.send(*first).expect("translated");
            for flags in received {
                client.expect_reply(ends, *flags);
            }
            for flags in others {
                assert_eq!(client.send(*flags), Ok(ends));
            }
            let before = *node.flow(&dialled(&client)).expect("an entry");
            node.wait(idle);

            client
                .send(if protocol.is_tcp() { ACK } else { 0 })
                .expect("passes, or a backend");

            let entry = node.flow(&dialled(&client)).expect("an entry");
            let is_new = entry.seen == Seen::NOTHING && before.last_used < entry.last_used;
            let was_used = entry.last_used == node.now.get();
            let expected = if protocol.is_tcp() {
                (false, is_kept)
            } else {
                (!is_kept, true)
            };
            let is_new = is_new && !is_kept;
            assert_eq!(
                (is_new, was_used),
                expected,
                "{protocol} {sent:?} after {idle} s"
            );
        }
    }
}

#[test]
fn replies_keep_a_flow_alive_although_the_client_is_silent() {
    let node = Node::new(&[VIP], &BACKENDS, Protocol::UDP);
    for port in 1..10 {
        let at = format!("203.0.113.9:{port}");
        let client = Client::new(&node, &at, VIP, true);
        let ends = client.send(0).expect("a backend");
        for _ in 0..3 {
            node.wait(Timeouts::DEFAULT.answered - 1);
            client.expect_reply(ends, 0);
        }

        assert_eq!(client.send(0), Ok(ends));
    }
}

#[test]
fn datagrams_leave_a_service_that_has_lost_the_frontend_to_another_one() {
    let mut node = Node::new(&[VIP], &BACKENDS, Protocol::UDP);
    let client = Client::new(&node, CLIENT, VIP, true);
    let ends = client.send(0).expect("a backend");
    node.wait(1);
    assert_eq!(client.send(0), Ok(ends));

    node.frontends[0].service = 2;
    let client = Client::new(&node, CLIENT, VIP, true);
    // The frontend is looked up once in a second.
    assert_eq!(client.send(0), Ok(ends));
    node.wait(1);
    client.send(0).expect("a backend");
    let flow = node.flow(&dialled(&client)).expect("a flow");
    assert_eq!(flow.service, 2);
    assert_eq!(node.counted.borrow()[..], [Reason::DatagramsMovedV4]);
}

#[test]
fn a_syn_begins_another_connection_only_if_the_last_one_has_ended() {
    // For each case: the packets after the handshake, as those of the client and of the backend.
    let cases: [(&[u8], &[u8], bool); 6] = [
        (&[], &[], false),
        // Anyone can send such a packet.
        (&[FIN], &[], false),
        (&[], &[FIN], true),
        (&[FIN], &[FIN], true),
        (&[RST], &[], true),
        (&[], &[RST], true),
    ];
    for (sent, received, is_new) in cases {
        for must_masquerade in [false, true] {
            let mut node = Node::new(&[VIP], &BACKENDS, Protocol::TCP);
            if must_masquerade {
                node.masquerade();
            }
            let client = Client::new(&node, CLIENT, VIP, true);
            let mut backends = Vec::new();
            for _ in 0..20 {
                let ends = client.connect();
                for flags in sent {
                    assert_eq!(client.send(*flags), Ok(ends));
                }
                for flags in received {
                    client.expect_reply(ends, *flags);
                }
                backends.push(ends.1);
            }
            backends.dedup();
            // The choice is random.
            assert_eq!(backends.len() > 1, is_new, "{sent:?} {received:?}");
        }
    }
}
