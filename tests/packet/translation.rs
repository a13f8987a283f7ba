//! Tests that the programs that translate packets leave packets of nobody's alone, whatever their bytes are.

use std::{
    collections::BTreeMap,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    flow::Endpoint,
    reason::Reason,
    service::{Frontend, FrontendKey},
};
use tunnel_tests::node::Node;
use tunnel_userspace::{
    bpf::{
        self, Counters, DataPath, KernelMaps, PacketSettings, PinDirectory, ProgramSettings,
        Translation,
    },
    net::{PacketPrograms as _, TranslatedLink},
    reconcile::{MapSizes, MapWriter as _},
};
use zerocopy::FromZeros as _;

use crate::segment::{SYN, expect_correct, segment};

/// The verdict on a packet that passes, and on one that is dropped.
pub(crate) const PASS: i32 = -1;
pub(crate) const DROP: i32 = 2;

pub(crate) struct Loaded {
    pub(crate) translation: Translation,
    pub(crate) maps: KernelMaps,
    counters: Counters,
    _pins: PinDirectory,
    _node: Node,
}

/// The index of the loopback device, on which the kernel runs programs for tests.
pub(crate) const LOOPBACK: u32 = 1;

pub(crate) fn load() -> Result<Loaded> {
    let node = Node::new()?;
    let pins = PinDirectory::lock(&node.bpffs())?;
    let settings = ProgramSettings {
        packets: Some(PacketSettings::default()),
        ..ProgramSettings::default()
    };
    // Kernels before Linux 6.16 evict up to 128 entries of an LRU hash at once, so a small map loses entries in use.
    let sizes = MapSizes {
        fragments: 1024,
        ..MapSizes::uniform(16)
    };
    let data_path = DataPath::load(&pins, sizes, bpf::probe()?, &settings, Duration::ZERO)?;
    let (maps, counters) = data_path.open_maps()?;
    let mut translation = data_path.translation()?;
    // No flow begins on a link that the programs don't know.
    translation.set_links(&BTreeMap::from([(LOOPBACK, TranslatedLink::default())]))?;
    Ok(Loaded {
        maps,
        translation,
        counters,
        _pins: pins,
        _node: node,
    })
}

impl Loaded {
    pub(crate) fn count(&self, reason: Reason) -> Result<u64> {
        let counts = self.counters.read()?;
        let found = counts.into_iter().find(|(it, _)| *it == reason);
        Ok(found.map_or(0, |(_, count)| count))
    }

    fn expect_unchanged(&self, frame: &[u8]) -> Result<()> {
        for run in [
            self.translation.arrive(frame)?,
            self.translation.leave(frame)?,
        ] {
            ensure!(run.verdict == PASS, "{run:?} for {frame:x?}");
            ensure!(run.frame == frame, "{frame:x?} became {run:x?}");
        }
        Ok(())
    }
}

/// Numbers that look random, and are the same in each run.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u8 {
        self.0 = self.0.wrapping_mul(0x5851_f42d_4c95_7f2d).wrapping_add(1);
        self.0.to_be_bytes()[0]
    }
}

/// Builds a frame for this host (a loopback device has no link-layer address) from random bytes, which begins like an
/// IPv4 or IPv6 packet of TCP or UDP.
fn random_frame(numbers: &mut Numbers, length: usize) -> Vec<u8> {
    let mut frame = vec![0; 12];
    let is_v4 = numbers.next().is_multiple_of(2);
    frame.extend(if is_v4 { [0x08, 0x00] } else { [0x86, 0xdd] });
    frame.extend((0..length).map(|_| numbers.next()));
    let protocols = [6, 17, 0, 43, 44, 60, 1, 132];
    let protocol = protocols[usize::from(numbers.next()) % protocols.len()];
    let (version, at) = if is_v4 { (0x40, 9) } else { (0x60, 6) };
    frame[14] = version | (frame[14] & 0x0f);
    frame[14 + at] = protocol;
    if is_v4 && !numbers.next().is_multiple_of(4) {
        // Not a fragment.
        frame[20..22].fill(0);
    }
    frame
}

#[test]
fn random_packets_pass_unchanged_and_malformed_ones_and_fragments_are_counted() -> Result<()> {
    let loaded = load()?;
    let mut numbers = Numbers(1);
    for length in (40..200).cycle().take(4_000) {
        loaded.expect_unchanged(&random_frame(&mut numbers, length))?;
    }

    // Only fragments of TCP and UDP are counted.
    for (reason, min) in [
        (Reason::PacketMalformed, 100),
        (Reason::FragmentUnmatched, 20),
    ] {
        ensure!(loaded.count(reason)? > min, "{reason:?}");
    }
    for reason in [Reason::Translated, Reason::FlowsFull, Reason::NoBackend] {
        ensure!(loaded.count(reason)? == 0, "{reason:?}");
    }
    Ok(())
}

/// The verdict on a packet that goes back (`TC_ACT_REDIRECT`).
const REDIRECT: i32 = 7;

/// A packet to a frontend without endpoints.
struct Refused {
    frame: Vec<u8>,
    /// The place of the addresses in the network header, and the length of the header.
    addresses: std::ops::Range<usize>,
    header: usize,
    is_tcp: bool,
}

impl Refused {
    /// Builds a packet with a correct checksum.
    fn new(from: IpAddr, to: SocketAddr, protocol: Protocol) -> Result<Self> {
        let is_tcp = protocol == Protocol::TCP;
        let at =
            |at: SocketAddr| Endpoint::new(Address::from_ip(at.ip()), Port::from_host(at.port()));
        let content: &[u8] = if is_tcp { b"" } else { b"hello" };
        let from = SocketAddr::new(from, 40_000);
        let (header, addresses) = if to.is_ipv4() {
            (20, 12..20)
        } else {
            (40, 8..40)
        };
        Ok(Self {
            frame: segment(at(from), at(to), protocol, (SYN, content))?,
            addresses,
            header,
            is_tcp,
        })
    }

    /// Asserts that a frame is a correct answer to this one.
    fn expect_answer(&self, answer: &[u8]) -> Result<()> {
        expect_correct(answer)?;
        let (asked, answer) = (&self.frame[14..], &answer[14..]);
        let half = self.addresses.len() / 2;
        let (from, to) = answer[self.addresses.clone()].split_at(half);
        let (client, dialled) = asked[self.addresses.clone()].split_at(half);
        ensure!((from, to) == (dialled, client), "addresses: {answer:x?}");
        let rest = &answer[self.header..];
        let is_v4 = self.header == 20;
        let protocol = answer[if is_v4 { 9 } else { 6 }];
        let expected = match (self.is_tcp, is_v4) {
            (true, _) => 6,
            (false, true) => 1,
            (false, false) => 58,
        };
        ensure!(protocol == expected, "protocol {protocol}");
        if self.is_tcp {
            ensure!(rest.len() == 20 && rest[13] == 0x14, "no reset: {rest:x?}");
            ensure!(
                rest[8..12] == [1, 2, 3, 5],
                "acknowledges {:x?}",
                &rest[8..12]
            );
        } else {
            let kind = if is_v4 { [3, 3] } else { [1, 4] };
            ensure!(rest[..2] == kind, "another error: {rest:x?}");
            ensure!(rest[8..] == asked[..self.header + 8], "quotes {rest:x?}");
        }
        Ok(())
    }
}

#[test]
fn packets_to_a_frontend_without_endpoints_become_correct_answers() -> Result<()> {
    let mut loaded = load()?;
    let clients: [IpAddr; 2] = ["203.0.113.9".parse()?, "2001:db8::9".parse()?];
    let frontends = ["198.51.100.7:80", "[2001:db8:7::7]:80"];
    let mut index = 0;
    for (client, frontend) in clients.into_iter().zip(frontends) {
        let frontend: SocketAddr = frontend.parse()?;
        for protocol in [Protocol::TCP, Protocol::UDP, Protocol::SCTP] {
            let address = Address::from_ip(frontend.ip());
            let key = FrontendKey::new(address, Port::from_host(frontend.port()), protocol);
            let record = Frontend {
                key,
                ..Frontend::new_zeroed()
            };
            loaded.maps.write_frontend(index, &record)?;
            loaded.maps.write_frontend_key(&key, index)?;
            index += 1;
            let refused = Refused::new(client, frontend, protocol)?;
            let run = loaded.translation.arrive(&refused.frame)?;
            let what = format!("{frontend} {protocol}");
            ensure!(run.verdict == REDIRECT, "{what}: verdict {}", run.verdict);
            refused.expect_answer(&run.frame).context(what)?;
        }
    }
    ensure!(
        loaded.count(Reason::NoBackend)? == u64::from(index),
        "not counted"
    );
    Ok(())
}
