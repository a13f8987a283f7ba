//! Tests that the programs that translate packets leave packets of nobody's alone, whatever their bytes are.

use std::{
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    reason::Reason,
    service::{Frontend, FrontendKey},
};
use tunnel_tests::node::Node;
use tunnel_userspace::{
    bpf::{
        self, Counters, DataPath, KernelMaps, PacketSettings, PinDirectory, ProgramSettings,
        Translation,
    },
    reconcile::{MapSizes, MapWriter as _},
};
use zerocopy::FromZeros as _;

const PASS: i32 = -1;

struct Loaded {
    translation: Translation,
    maps: KernelMaps,
    counters: Counters,
    _pins: PinDirectory,
    _node: Node,
}

fn load() -> Result<Loaded> {
    let node = Node::new()?;
    let pins = PinDirectory::lock(&node.bpffs())?;
    let settings = ProgramSettings {
        packets: Some(PacketSettings::default()),
        ..ProgramSettings::default()
    };
    let sizes = MapSizes::uniform(16);
    let data_path = DataPath::load(&pins, sizes, bpf::probe()?, &settings, Duration::ZERO)?;
    let (maps, counters) = data_path.open_maps()?;
    Ok(Loaded {
        maps,
        translation: data_path.translation()?,
        counters,
        _pins: pins,
        _node: node,
    })
}

impl Loaded {
    fn count(&self, reason: Reason) -> Result<u64> {
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

    for reason in [Reason::PacketMalformed, Reason::PacketFragment] {
        ensure!(loaded.count(reason)? > 100, "{reason:?}");
    }
    for reason in [Reason::Translated, Reason::FlowsFull, Reason::NoBackend] {
        ensure!(loaded.count(reason)? == 0, "{reason:?}");
    }
    Ok(())
}

/// The verdict on a packet that goes back (`TC_ACT_REDIRECT`).
const REDIRECT: i32 = 7;

/// Returns the ones' complement sum of bytes (RFC 1071). A packet with a correct checksum has the sum 0xffff.
fn sum_of(parts: &[&[u8]]) -> u64 {
    let words = parts.iter().flat_map(|part| part.chunks(2));
    let mut sum: u64 = words
        .map(|pair| u64::from(pair[0]) << 8 | u64::from(pair.get(1).copied().unwrap_or(0)))
        .sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    sum
}

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
        let number = protocol.number();
        let mut transport = 40_000_u16.to_be_bytes().to_vec();
        transport.extend(to.port().to_be_bytes());
        if is_tcp {
            transport.extend([
                1, 2, 3, 4, 0, 0, 0, 0, 0x60, 0x02, 1, 0, 0, 0, 0, 0, 2, 4, 5, 0xb4,
            ]);
        } else {
            transport.extend([0, 13, 0, 0, b'h', b'e', b'l', b'l', b'o']);
        }
        let length = u16::try_from(transport.len()).expect("short");
        let (mut network, ether_type) = match (from, to.ip()) {
            (IpAddr::V4(from), IpAddr::V4(to)) => {
                let [a, b] = (20 + length).to_be_bytes();
                let mut header = vec![0x45, 0, a, b, 0, 7, 0, 0, 64, number, 0, 0];
                header.extend(from.octets().into_iter().chain(to.octets()));
                let [a, b, ..] = (!sum_of(&[&header]) << 48).to_be_bytes();
                header[10..12].copy_from_slice(&[a, b]);
                (header, [8, 0])
            }
            (IpAddr::V6(from), IpAddr::V6(to)) => {
                let [a, b] = length.to_be_bytes();
                let mut header = vec![0x60, 0, 0, 0, a, b, number, 64];
                header.extend(from.octets().into_iter().chain(to.octets()));
                (header, [0x86, 0xdd])
            }
            _ => bail!("{from} and {to} are of two families"),
        };
        let header = network.len();
        let addresses = if header == 20 { 12..20 } else { 8..40 };
        let [a, b] = length.to_be_bytes();
        let pseudo = [&network[addresses.clone()], &[0, number, a, b]].concat();
        let [a, b, ..] = (!sum_of(&[&pseudo, &transport]) << 48).to_be_bytes();
        let at = if is_tcp { 16 } else { 6 };
        transport[at..at + 2].copy_from_slice(&[a, b]);
        let mut frame = vec![0; 12];
        frame.extend(ether_type);
        frame.append(&mut network);
        frame.extend(transport);
        Ok(Self {
            frame,
            addresses,
            header,
            is_tcp,
        })
    }

    /// Asserts that a frame is a correct answer to this one.
    fn expect_answer(&self, answer: &[u8]) -> Result<()> {
        let (asked, answer) = (&self.frame[14..], &answer[14..]);
        let half = self.addresses.len() / 2;
        let (from, to) = answer[self.addresses.clone()].split_at(half);
        let (client, dialled) = asked[self.addresses.clone()].split_at(half);
        ensure!((from, to) == (dialled, client), "addresses: {answer:x?}");
        let rest = &answer[self.header..];
        let is_v4 = self.header == 20;
        ensure!(
            !is_v4 || sum_of(&[&answer[..20]]) == 0xffff,
            "header: {answer:x?}"
        );
        let protocol = answer[if is_v4 { 9 } else { 6 }];
        let expected = match (self.is_tcp, is_v4) {
            (true, _) => 6,
            (false, true) => 1,
            (false, false) => 58,
        };
        ensure!(protocol == expected, "protocol {protocol}");
        let [a, b] = u16::try_from(rest.len())?.to_be_bytes();
        let pseudo = [&answer[self.addresses.clone()], &[0, protocol, a, b]].concat();
        // ICMPv4 has no pseudo-header.
        let pseudo: &[u8] = if protocol == 1 { &[] } else { &pseudo };
        ensure!(sum_of(&[pseudo, rest]) == 0xffff, "checksum: {answer:x?}");
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
        for protocol in [Protocol::TCP, Protocol::UDP] {
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
