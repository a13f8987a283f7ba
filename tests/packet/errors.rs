//! ICMP errors about the packets of flows.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use tunnel_common::{
    addr::{Port, Protocol},
    flow::Endpoint,
    reason::Reason,
};

use crate::{
    segment::{error_about, error_ends, expect_correct, segment},
    service::{Flow, Node, Place},
    translation::{DROP, PASS},
};

/// The type and the code of each error: a packet is too large, nothing listens on the port, and the TTL is used up.
const fn kinds(is_v4: bool) -> [[u8; 2]; 3] {
    if is_v4 {
        [[3, 4], [3, 3], [11, 0]]
    } else {
        [[2, 0], [1, 4], [3, 0]]
    }
}

fn router(is_v4: bool) -> Result<IpAddr> {
    Ok(if is_v4 { "203.0.113.1" } else { "2001:db8::1" }.parse()?)
}

/// An error, and what must become of it: its source and destination, and the ends of the packet that it quotes.
struct Case {
    what: &'static str,
    error: Vec<u8>,
    arrives: bool,
    leaves: bool,
    addresses: [IpAddr; 2],
    quoted: (Endpoint, Endpoint),
}

fn cases(flow: &Flow, kind: [u8; 2], length: usize) -> Result<Vec<Case>> {
    let ip = |endpoint: Endpoint| endpoint.address.to_ip();
    let router = router(ip(flow.client).is_ipv4())?;
    let is_masqueraded = flow.place.is_masqueraded();
    let source = if is_masqueraded {
        ip(flow.seen)
    } else {
        router
    };
    let towards_backend = Case {
        what: "towards the backend",
        error: error_about(&flow.reply()?, router, kind, length)?,
        arrives: true,
        leaves: is_masqueraded,
        addresses: [source, ip(flow.backend)],
        quoted: (flow.backend, flow.seen),
    };
    let from = if flow.place == Place::OtherNode {
        router
    } else {
        ip(flow.backend)
    };
    let towards_client = Case {
        what: "towards the client",
        error: error_about(&flow.request()?, from, kind, length)?,
        arrives: is_masqueraded,
        leaves: true,
        addresses: [ip(flow.frontend), ip(flow.client)],
        quoted: (flow.client, flow.frontend),
    };
    Ok(vec![towards_backend, towards_client])
}

impl Case {
    fn run(&self, node: &Node) -> Result<()> {
        let translation = &node.loaded.translation;
        let mut frame = self.error.clone();
        expect_correct(&frame).context("as it was built")?;
        if self.arrives {
            frame = translation.arrive(&frame)?.frame;
        }
        if self.leaves {
            frame = translation.leave(&frame)?.frame;
        }
        expect_correct(&frame)?;
        let (addresses, quoted) = error_ends(&frame)?;
        ensure!(addresses == self.addresses, "{addresses:?}");
        ensure!(quoted == self.quoted, "{quoted:?}");
        Ok(())
    }
}

#[test]
fn errors_of_all_kinds_reach_both_ends_with_the_addresses_that_they_know() -> Result<()> {
    for is_v4 in [true, false] {
        for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
            for place in Place::ALL {
                let node = Node::of(place)?;
                let flow = node.begin(is_v4, protocol, place)?;
                expect_translated(&node, &flow)
                    .with_context(|| format!("{protocol}, IPv4: {is_v4}, {place:?}"))?;
            }
        }
    }
    Ok(())
}

fn expect_translated(node: &Node, flow: &Flow) -> Result<()> {
    let mut count = 0;
    for kind in kinds(flow.client.address.is_v4()) {
        for length in [8, 1000] {
            for case in cases(flow, kind, length)? {
                case.run(node)
                    .with_context(|| format!("{} {kind:?}, {length} bytes", case.what))?;
                count += u64::from(case.arrives) + u64::from(case.leaves);
            }
        }
    }
    let translated = node.loaded.count(Reason::IcmpErrorTranslated)?;
    ensure!(translated == count, "{translated} instead of {count}");
    flow.expect_alive(node)
}

#[test]
fn errors_about_no_flow_pass_unchanged_and_redirects_about_a_flow_are_dropped() -> Result<()> {
    let node = Node::new()?;
    let flow = node.begin(true, Protocol::UDP, Place::OtherNode)?;
    let translation = &node.loaded.translation;
    let elsewhere = flow.backend.with_port(Port::from_host(1));
    let other = segment(elsewhere, flow.client, Protocol::UDP, (0, b"another"))?;
    let foreign = error_about(&other, router(true)?, [3, 4], 8)?;
    for run in [translation.arrive(&foreign)?, translation.leave(&foreign)?] {
        ensure!(run.verdict == PASS && run.frame == foreign, "{run:?}");
    }
    ensure!(node.loaded.count(Reason::IcmpErrorUnmatched)? == 2);

    let redirect = error_about(&flow.request()?, router(true)?, [5, 1], 8)?;
    let run = translation.arrive(&redirect)?;
    ensure!(run.verdict == DROP, "{run:?}");
    ensure!(node.loaded.count(Reason::IcmpRedirectDropped)? == 1);
    Ok(())
}
