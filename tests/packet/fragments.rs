//! Packets that come in fragments.

use anyhow::{Context as _, Result, ensure};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    flow::Endpoint,
    reason::Reason,
};
use tunnel_tests::checksum::sum_of;

use crate::{
    segment::{ETHERNET, ends, expect_correct, frame, segment, transport},
    service::{Flow, Node, Place},
    translation::{DROP, PASS},
};

/// The size of a datagram's content, and of its parts.
const SIZE: usize = 3000;
const PART: usize = 1024;

/// Returns a datagram's fragments, as frames.
fn fragments(from: Endpoint, to: Endpoint, id: u16, parts: usize) -> Result<Vec<Vec<u8>>> {
    let content: Vec<u8> = (0..SIZE)
        .map(|it| u8::try_from(it % 251))
        .collect::<Result<_, _>>()?;
    let whole = transport(from, to, Protocol::UDP, (0, &content))?;
    let (from, to) = (from.address.to_ip(), to.address.to_ip());
    let count = whole.len().div_ceil(parts);
    let mut frames = Vec::new();
    for (number, part) in whole.chunks(parts).enumerate() {
        let more = number + 1 < count;
        let offset = u16::try_from(number * parts / 8)?;
        let protocol = Protocol::UDP.number();
        if from.is_ipv4() {
            let mut frame = frame(from, to, protocol, part)?;
            let header = &mut frame[ETHERNET..ETHERNET + 20];
            header[4..6].copy_from_slice(&id.to_be_bytes());
            header[6..8].copy_from_slice(&(u16::from(more) << 13 | offset).to_be_bytes());
            header[10..12].fill(0);
            let sum = !sum_of(&[header]);
            header[10..12].copy_from_slice(&sum.to_be_bytes());
            frames.push(frame);
        } else {
            let [a, b] = (offset << 3 | u16::from(more)).to_be_bytes();
            let [c, d] = id.to_be_bytes();
            let part = [&[protocol, 0, a, b, 0, 0, c, d], part].concat();
            frames.push(frame(from, to, 44, &part)?);
        }
    }
    Ok(frames)
}

/// Puts fragments together again, and returns a frame with the whole packet.
fn join(fragments: &[Vec<u8>]) -> Result<Vec<u8>> {
    let mut parts = Vec::new();
    for fragment in fragments {
        let bytes = &fragment[ETHERNET..];
        let (offset, data) = if bytes[0] >> 4 == 4 {
            ensure!(sum_of(&[&bytes[..20]]) == 0xffff, "the sum");
            let field = u16::from_be_bytes([bytes[6], bytes[7]]);
            (field & 0x1fff, &bytes[20..])
        } else {
            (
                u16::from_be_bytes([bytes[42], bytes[43]]) >> 3,
                &bytes[48..],
            )
        };
        parts.push((offset, &bytes[..20], data));
    }
    parts.sort_by_key(|(offset, ..)| *offset);
    let mut addresses = fragments.iter().map(|it| addresses(it));
    let first = addresses.next().context("no fragment")?;
    ensure!(addresses.all(|it| it == first), "different addresses");
    let data: Vec<u8> = parts.iter().flat_map(|(.., data)| data.to_vec()).collect();
    let [from, to] = first;
    frame(from.to_ip(), to.to_ip(), Protocol::UDP.number(), &data)
}

fn addresses(frame: &[u8]) -> [Address; 2] {
    let bytes = &frame[ETHERNET..];
    let v4 = |at: usize| {
        let octets: [u8; 4] = bytes[at..at + 4].try_into().unwrap_or_default();
        Address::from_ip(octets.into())
    };
    let v6 = |at: usize| {
        let octets: [u8; 16] = bytes[at..at + 16].try_into().unwrap_or_default();
        Address::from_ip(octets.into())
    };
    if bytes[0] >> 4 == 4 {
        [v4(12), v4(16)]
    } else {
        [v6(8), v6(24)]
    }
}

/// Sends the fragments of a datagram to the node, and asserts that they are those of another datagram afterwards.
fn expect_translated(
    node: &Node,
    from: (Endpoint, Endpoint),
    to: (Endpoint, Endpoint),
    (id, programs): (u16, [bool; 2]),
) -> Result<()> {
    let mut fragments = fragments(from.0, from.1, id, PART)?;
    // The first one comes first, and the others in another order.
    fragments[1..].reverse();
    let [arrives, leaves] = programs;
    let translation = &node.loaded.translation;
    for fragment in &mut fragments {
        if arrives {
            *fragment = translation.arrive(fragment)?.frame;
        }
        if leaves {
            *fragment = translation.leave(fragment)?.frame;
        }
    }
    let whole = join(&fragments)?;
    expect_correct(&whole)?;
    let found = ends(&whole)?;
    ensure!(found == to, "{found:?} instead of {to:?}");
    Ok(())
}

fn expect_both_ways(node: &Node, flow: &Flow) -> Result<()> {
    let is_masqueraded = flow.place.is_masqueraded();
    let (sent, got) = ((flow.client, flow.frontend), (flow.seen, flow.backend));
    expect_translated(node, sent, got, (7, [true, is_masqueraded])).context("a request")?;
    let (sent, got) = ((flow.backend, flow.seen), (flow.frontend, flow.client));
    expect_translated(node, sent, got, (8, [is_masqueraded, true])).context("a reply")
}

#[test]
fn the_fragments_of_a_datagram_follow_the_first_one_in_both_directions() -> Result<()> {
    for is_v4 in [true, false] {
        for place in Place::ALL {
            let node = Node::of(place)?;
            let flow = node.begin(is_v4, Protocol::UDP, place)?;
            expect_both_ways(&node, &flow).with_context(|| format!("{place:?}, IPv4: {is_v4}"))?;
        }
    }
    Ok(())
}

#[test]
fn the_first_packet_of_a_flow_may_come_in_fragments() -> Result<()> {
    let node = Node::new()?;
    let flow = node.begin(true, Protocol::UDP, Place::ThisNode)?;
    let other = flow.client.with_port(Port::from_host(40_001));
    let to = (other, flow.backend);
    expect_translated(&node, (other, flow.frontend), to, (7, [true, false]))
}

#[test]
fn fragments_without_a_first_one_pass_unchanged_and_too_short_ones_are_dropped() -> Result<()> {
    for is_v4 in [true, false] {
        let node = Node::new()?;
        let flow = node.begin(is_v4, Protocol::UDP, Place::ThisNode)?;
        let translation = &node.loaded.translation;
        let fragments = fragments(flow.client, flow.frontend, 7, PART)?;
        for fragment in &fragments[1..] {
            let run = translation.arrive(fragment)?;
            ensure!(run.verdict == PASS && run.frame == *fragment, "{run:?}");
        }
        let unmatched = node.loaded.count(Reason::FragmentUnmatched)?;
        ensure!(unmatched == 2, "{unmatched}");

        let header = if is_v4 { 20 } else { 48 };
        let short = &fragments[0][..ETHERNET + header + 6];
        let run = translation.arrive(short)?;
        ensure!(run.verdict == DROP, "{run:?}");
        ensure!(node.loaded.count(Reason::FragmentTooShort)? == 1);
    }
    Ok(())
}

#[test]
fn fragments_do_not_follow_the_first_one_of_an_earlier_packet() -> Result<()> {
    for is_v4 in [true, false] {
        let node = Node::new()?;
        let flow = node.begin(is_v4, Protocol::UDP, Place::ThisNode)?;
        let first = fragments(flow.client, flow.frontend, 7, PART)?.swap_remove(0);
        ensure!(node.pass(&first, false)? != first, "not translated");

        // A packet with the same number, to another port.
        let elsewhere = flow.frontend.with_port(Port::from_host(9));
        for fragment in fragments(flow.client, elsewhere, 7, PART)? {
            ensure!(node.pass(&fragment, false)? == fragment, "IPv4: {is_v4}");
        }
    }
    Ok(())
}

#[test]
fn a_flood_of_first_fragments_harms_no_other_flow() -> Result<()> {
    let node = Node::new()?;
    let open = node.begin(true, Protocol::TCP, Place::OtherNode)?;
    let datagrams = node.begin(true, Protocol::UDP, Place::OtherNode)?;
    // The frontends' flows are few, so that they leave room for the connection.
    for id in 0..2000 {
        let from = datagrams.client.with_port(Port::from_host(50_000 + id % 8));
        let first = fragments(from, datagrams.frontend, id, PART)?.swap_remove(0);
        node.pass(&first, true)?;
        if id % 100 == 0 {
            open.expect_alive(&node)?;
            let sent = (datagrams.client, datagrams.frontend);
            let got = (datagrams.seen, datagrams.backend);
            expect_translated(&node, sent, got, (60_000 + id, [true, true]))
                .with_context(|| format!("after {id} first fragments"))?;
        }
    }
    let fresh = segment(
        open.client.with_port(Port::from_host(45_000)),
        open.frontend,
        Protocol::TCP,
        (2, b""),
    )?;
    node.pass(&fresh, true).map(drop)
}
