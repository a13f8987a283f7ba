//! Tests that the programs that translate packets leave packets of nobody's alone, whatever their bytes are.

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_common::reason::Reason;
use tunnel_tests::node::Node;
use tunnel_userspace::{
    bpf::{self, Counters, DataPath, PacketSettings, PinDirectory, ProgramSettings, Translation},
    reconcile::MapSizes,
};

const PASS: i32 = -1;

struct Loaded {
    translation: Translation,
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
    let (_maps, counters) = data_path.open_maps()?;
    Ok(Loaded {
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
        for (verdict, after) in [
            self.translation.arrive(frame)?,
            self.translation.leave(frame)?,
        ] {
            ensure!(verdict == PASS, "{verdict} for {frame:x?}");
            ensure!(after == frame, "{frame:x?} became {after:x?}");
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
