//! Tests of packets that come in fragments.

use super::{
    BACKENDS, CLIENT, VIP,
    fixture::{ARRIVING, Ends, Node, endpoint, packet},
};
use crate::{
    addr::{Address, Protocol},
    forward::{
        Flows as _, Step, arrive,
        fragments::{self, Fragments},
    },
    fragment::{FragmentKey, FragmentRecord},
    packet::fragment::FragmentHeader,
};

impl Fragments for Node {
    fn fragment(&self, key: &FragmentKey) -> Option<FragmentRecord> {
        let fragments = self.fragments.borrow();
        fragments.iter().rev().find(|it| it.key == *key).copied()
    }

    fn insert_fragment(&self, record: &FragmentRecord) {
        self.fragments.borrow_mut().push(*record);
    }

    fn remove_fragment(&self, key: &FragmentKey) {
        self.fragments.borrow_mut().retain(|it| it.key != *key);
    }

    fn fragment_timeout(&self) -> u32 {
        30
    }
}

fn key((source, destination): Ends, id: u32) -> FragmentKey {
    let header = FragmentHeader {
        source: source.address,
        destination: destination.address,
        id,
        protocol: Protocol::UDP.number(),
        first: None,
    };
    FragmentKey::new(&header, false)
}

/// Sends the first fragment of a packet through tc ingress, and returns true if it is translated.
fn send_first(node: &Node, ends: Ends, id: u32) -> bool {
    let packet = packet(ends, Protocol::UDP, 0);
    fragments::start(node, &key(ends, id), &packet);
    let is_translated = matches!(
        arrive(node, &packet, ARRIVING),
        Step::Translate | Step::Begin
    );
    if is_translated {
        fragments::follow(node);
    }
    is_translated
}

/// Sends another fragment, and returns the address that it gets, if it is translated.
fn send_other(node: &Node, ends: Ends, id: u32) -> Option<Address> {
    let step = fragments::decide(node, &key(ends, id));
    let address = node.with_run(|run| run.replacement.address);
    address.filter(|_| step == Step::Translate)
}

#[test]
fn fragments_follow_the_first_one_of_their_packet() {
    let node = Node::new(&[VIP], &BACKENDS[..1], Protocol::UDP);
    let ends = (endpoint(CLIENT), endpoint(VIP));
    let backend = endpoint(BACKENDS[0]).address;

    assert_eq!(send_other(&node, ends, 1), None, "before the first");
    assert!(send_first(&node, ends, 1));
    assert_eq!(send_other(&node, ends, 1), Some(backend));
    assert_eq!(send_other(&node, ends, 1), Some(backend), "any number");
    assert_eq!(send_other(&node, ends, 2), None, "another packet");
    let of_other_client = (endpoint("203.0.113.10:1"), ends.1);
    assert_eq!(send_other(&node, of_other_client, 1), None);

    node.wait(30);
    assert_eq!(send_other(&node, ends, 1), Some(backend), "in time");
    node.wait(1);
    assert_eq!(send_other(&node, ends, 1), None, "too late");
}

#[test]
fn fragments_of_packets_that_are_left_alone_are_left_alone() {
    let node = Node::new(&[VIP], &BACKENDS[..1], Protocol::UDP);
    let ends = (endpoint(CLIENT), endpoint("198.51.100.9:80"));
    assert!(!send_first(&node, ends, 1));
    assert_eq!(send_other(&node, ends, 1), None);
}
