//! Tests of ICMP errors about packets of flows.

use super::{
    BACKENDS, CLIENT, NODE, VIP,
    fixture::{Client, Ends, Node, endpoint, packet, text_of},
};
use crate::{
    addr::{Address, Protocol},
    forward::{End, Flows as _, Step, errors},
    packet::{Packet, icmp::ErrorHeader},
    reason::Reason,
};

const ROUTER: &str = "203.0.113.1:0";

/// The addresses of an error, and the ends of the packet that it quotes.
type Error = ([Address; 2], Ends);

/// Returns an error about a packet, which goes to the sender of the packet.
fn about(quoted: Ends) -> Error {
    ([endpoint(ROUTER).address, quoted.0.address], quoted)
}

fn error(
    ([source, destination], quoted): Error,
    protocol: Protocol,
    is_redirect: bool,
) -> (ErrorHeader, Packet) {
    let header = ErrorHeader {
        source,
        destination,
        offset: 20,
        is_redirect: u32::from(is_redirect),
    };
    (header, packet(quoted, protocol, 0))
}

/// Returns what a program makes of an error, or `None` if it drops it, and the reason.
fn through(
    node: &Node,
    (header, quoted): &(ErrorHeader, Packet),
    end: End,
) -> (Option<Error>, Reason) {
    errors::set_header(node, header);
    errors::start(node, quoted);
    let (step, quoted_end) = match end {
        End::Destination => (errors::arrive(node), End::Source),
        End::Source => (errors::leave(node), End::Destination),
    };
    let run = node.with_run(|run| *run).expect("a run");
    let reason = Reason::from_index(run.reason).expect("a reason");
    let unchanged = (
        [header.source, header.destination],
        (quoted.source_endpoint(), quoted.destination_endpoint()),
    );
    let new = match step {
        Step::Pass => Some(unchanged),
        Step::Drop => None,
        Step::Translate => {
            let quoted = run.translated(quoted_end);
            let new = run.replacement.address;
            let addresses = match end {
                End::Destination => [header.source, new],
                End::Source => [new, header.destination],
            };
            Some((
                addresses,
                (quoted.source_endpoint(), quoted.destination_endpoint()),
            ))
        }
        Step::Next | Step::Begin | Step::Refuse | Step::Defer => panic!("{step:?}"),
    };
    (new, reason)
}

/// Sends an error through tc ingress, tc egress, or both, and returns what arrives.
fn translated(node: &Node, protocol: Protocol, mut current: Error, ends: &[End]) -> Error {
    for end in ends {
        let (new, reason) = through(node, &error(current, protocol, false), *end);
        assert_eq!(reason, Reason::IcmpErrorTranslated, "{end:?}");
        current = new.expect("not dropped");
    }
    current
}

fn expect_error(found: Error, addresses: [Address; 2], quoted: Ends) {
    assert_eq!(found.0.map(Address::to_ip), addresses.map(Address::to_ip));
    assert_eq!(
        [found.1.0, found.1.1].map(text_of),
        [quoted.0, quoted.1].map(text_of)
    );
}

#[test]
fn an_error_is_about_the_packet_that_its_receiver_has_sent() {
    use End::{Destination, Source};
    let router = endpoint(ROUTER).address;
    for protocol in [Protocol::TCP, Protocol::UDP] {
        for is_remote in [true, false] {
            let mut node = Node::new(&[VIP], &BACKENDS[..1], protocol);
            node.masquerade();
            let client = Client::new(&node, CLIENT, VIP, is_remote);
            // The client as the backend sees it.
            let (seen, backend) = client.connect();
            let (at, frontend) = (client.at, client.frontend);

            // Beyond the client's link, about a reply.
            let programs: &[End] = if is_remote {
                &[Destination, Source]
            } else {
                &[Destination]
            };
            let found = translated(&node, protocol, about((frontend, at)), programs);
            let source = if is_remote { seen.address } else { router };
            expect_error(found, [source, backend.address], (backend, seen));

            // Beyond the other node's link, about a request.
            if is_remote {
                assert_eq!(text_of(seen), format!("{NODE}:40000"));
                let found = translated(
                    &node,
                    protocol,
                    about((seen, backend)),
                    &[Destination, Source],
                );
                expect_error(found, [frontend.address, at.address], (at, frontend));
            }

            // By this node or the backend.
            let found = translated(&node, protocol, about((at, backend)), &[Source]);
            expect_error(found, [frontend.address, at.address], (at, frontend));
        }
    }
}

#[test]
fn an_error_of_either_family_is_translated() {
    let (at, frontend, backend) = (
        "[2001:db8::9]:40000",
        "[2001:db8:1::1]:80",
        "[fd00::5]:8080",
    );
    let node = Node::new(&[frontend], &[backend], Protocol::UDP);
    let client = Client::new(&node, at, frontend, false);
    client.connect();
    let (at, frontend, backend) = (client.at, client.frontend, endpoint(backend));
    let towards_backend = error(about((frontend, at)), Protocol::UDP, false);
    let (found, _) = through(&node, &towards_backend, End::Destination);
    expect_error(
        found.expect("not dropped"),
        [endpoint(ROUTER).address, backend.address],
        (backend, at),
    );
}

#[test]
fn a_port_that_was_replaced_between_the_programs_is_put_back() {
    const OTHER_VIP: &str = "198.51.100.2:80";
    let node = Node::new(&[VIP, OTHER_VIP], &BACKENDS[..1], Protocol::UDP);
    Client::new(&node, CLIENT, VIP, false).connect();
    let client = Client::new(&node, CLIENT, OTHER_VIP, false);
    let (seen, backend) = client.connect();
    assert_ne!(seen.port, client.at.port, "another flow has it");
    let (at, frontend) = (client.at, client.frontend);

    let found = translated(
        &node,
        Protocol::UDP,
        about((frontend, at)),
        &[End::Destination],
    );
    assert_eq!(found.1, (backend, seen));
    let found = translated(&node, Protocol::UDP, about((seen, backend)), &[End::Source]);
    assert_eq!(found.1, (at, frontend));
}

#[test]
fn an_error_that_is_about_no_flow_or_goes_to_somebody_else_passes() {
    let node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    let client = Client::new(&node, CLIENT, VIP, false);
    client.connect();
    let (at, frontend) = (client.at, client.frontend);
    let elsewhere = endpoint("198.51.100.9:80");

    let of_other_flow = about((elsewhere, at));
    let to_other_host = ([at.address, elsewhere.address], (frontend, at));
    let of_wrong_direction = about((at, frontend));
    for found in [of_other_flow, to_other_host, of_wrong_direction] {
        for end in [End::Destination, End::Source] {
            let passed = through(&node, &error(found, Protocol::TCP, false), end);
            assert_eq!(passed, (Some(found), Reason::IcmpErrorUnmatched), "{end:?}");
        }
    }
    let other_protocol = error(about((frontend, at)), Protocol::UDP, false);
    let (_, reason) = through(&node, &other_protocol, End::Destination);
    assert_eq!(reason, Reason::IcmpErrorUnmatched);
}

#[test]
fn the_backend_of_a_client_that_is_not_masqueraded_gets_the_error_as_it_is() {
    let node = Node::new(&[VIP], &BACKENDS[..1], Protocol::TCP);
    let client = Client::new(&node, CLIENT, VIP, true);
    let (seen, backend) = client.connect();
    let reply = about((backend, seen));
    let (found, _) = through(&node, &error(reply, Protocol::TCP, false), End::Source);
    assert_eq!(found, Some(reply));
}

#[test]
fn a_redirect_is_dropped_only_if_it_is_about_a_flow() {
    let mut node = Node::new(&[VIP], &BACKENDS[..1], Protocol::UDP);
    node.masquerade();
    let client = Client::new(&node, CLIENT, VIP, true);
    let (seen, backend) = client.connect();
    let frontend = client.frontend;
    for (quoted, end) in [
        ((frontend, client.at), End::Destination),
        ((seen, backend), End::Destination),
        ((client.at, backend), End::Source),
    ] {
        let redirect = error(about(quoted), Protocol::UDP, true);
        let (found, reason) = through(&node, &redirect, end);
        assert_eq!(
            (found, reason),
            (None, Reason::IcmpRedirectDropped),
            "{end:?}"
        );
    }
    let foreign = about((endpoint("198.51.100.9:80"), client.at));
    let (found, _) = through(
        &node,
        &error(foreign, Protocol::UDP, true),
        End::Destination,
    );
    assert_eq!(found, Some(foreign));
}
