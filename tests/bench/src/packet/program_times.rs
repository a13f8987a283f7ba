//! Measures the programs alone with `BPF_PROG_TEST_RUN`, packet by packet.

use std::{
    collections::BTreeMap,
    fmt,
    net::{IpAddr, Ipv4Addr},
    time::Duration,
};

use anyhow::{Result, ensure};
use aya::programs::{TestRun as _, TestRunOptions};
use serde::Serialize;
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::{
        Backend, BackendState, Frontend, FrontendKey, IndexRange, InlineBackend, Membership, Slot,
    },
};
use tunnel_tests::{empty_program::EmptyProgram, node::Node};
use tunnel_userspace::{
    bpf::{
        self, DataPath, FrameRun, KernelMaps, PacketSettings, PinDirectory, ProgramSettings,
        Translation,
    },
    net::{PacketPrograms as _, TranslatedLink},
    reconcile::{MapSizes, MapWriter as _},
};
use zerocopy::FromZeros as _;

use crate::report::{Verdict, median};

/// The number of packets of each kind.
const RUNS: u16 = 5_000;

const CLIENT: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 9);
const FRONTEND: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 7);
const BACKEND: Ipv4Addr = Ipv4Addr::new(10, 1, 0, 2);
const FOREIGN: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 8);
const PORT: u16 = 80;

/// Bits of TCP's flags.
const SYN: u8 = 0x02;
const ACK: u8 = 0x10;

/// The index of the loopback device, on which the kernel runs the program.
const LOOPBACK: u32 = 1;

/// The index of the frontend, its backend and its slot.
const INDEX: u32 = 1;

/// The times for which the program for arriving packets runs, in nanoseconds: medians of the runs of single packets, less
/// the median of a program that does nothing.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct ProgramTimes {
    /// A packet of a flow that exists.
    known_ns: u64,
    /// The first packet of a flow.
    new_ns: u64,
    /// A packet that belongs to no flow.
    foreign_ns: u64,
    /// The program that does nothing. Most of it are the readings of the clock.
    empty_ns: u64,
}

impl ProgramTimes {
    pub(super) fn measure() -> Result<Self> {
        let node = Node::new()?;
        let pins = PinDirectory::lock(&node.bpffs())?;
        let settings = ProgramSettings {
            packets: Some(PacketSettings::default()),
            ..ProgramSettings::default()
        };
        let sizes = MapSizes::default();
        let data_path = DataPath::load(&pins, sizes, bpf::probe()?, &settings, Duration::ZERO)?;
        let (mut maps, _) = data_path.open_maps()?;
        write_frontend(&mut maps)?;
        let mut translation = data_path.translation()?;
        translation.set_links(&BTreeMap::from([(LOOPBACK, TranslatedLink::default())]))?;

        let (mut known, mut new, mut foreign) = (Vec::new(), Vec::new(), Vec::new());
        for port in 10_000..10_000 + RUNS {
            new.push(run(
                &translation,
                &frame(FRONTEND, port, SYN),
                Some(BACKEND),
            )?);
            known.push(run(
                &translation,
                &frame(FRONTEND, port, ACK),
                Some(BACKEND),
            )?);
            let frame = frame(FOREIGN, port, ACK);
            // The connection's packets before, as for a known flow.
            run(&translation, &frame, None)?;
            foreign.push(run(&translation, &frame, None)?);
        }
        let empty = time_of_empty_program()?;
        let beyond_empty = |times: Vec<u64>| median(times).saturating_sub(empty);
        Ok(Self {
            known_ns: beyond_empty(known),
            new_ns: beyond_empty(new),
            foreign_ns: beyond_empty(foreign),
            empty_ns: empty,
        })
    }

    /// Compares the times with the aims.
    pub(super) fn verdicts(&self) -> Vec<Verdict> {
        let rows = [
            ("a packet of a known flow", self.known_ns, 120),
            ("the first packet of a flow", self.new_ns, 500),
            ("a packet of no flow", self.foreign_ns, 50),
        ];
        let verdict = |(what, time, limit): (&str, u64, u64)| {
            let target = format!("the program runs at most {limit} ns for {what}");
            Verdict::new(target, format!("{time} ns"), time <= limit)
        };
        rows.into_iter().map(verdict).collect()
    }
}

impl fmt::Display for ProgramTimes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            known_ns,
            new_ns,
            foreign_ns,
            empty_ns,
        } = self;
        writeln!(
            f,
            "  the program for arriving packets alone: {known_ns} ns for a known flow, {new_ns} ns for a new one, \
             {foreign_ns} ns for a foreign packet, besides {empty_ns} ns for an empty program"
        )
    }
}

/// Returns the median time of a program that does nothing, in nanoseconds.
fn time_of_empty_program() -> Result<u64> {
    let mut empty = EmptyProgram::load()?;
    let program = empty.program()?;
    let frame = frame(FOREIGN, 1, ACK);
    let mut times = Vec::new();
    for _ in 0..RUNS {
        let options = TestRunOptions {
            data_in: Some(&frame),
            ..TestRunOptions::default()
        };
        let run = program.test_run(options)?;
        times.push(u64::try_from(run.duration.as_nanos())?);
    }
    Ok(median(times))
}

/// Writes a frontend with one backend.
fn write_frontend(maps: &mut KernelMaps) -> Result<()> {
    let address = |ip: Ipv4Addr| Address::from_ip(IpAddr::V4(ip));
    let port = Port::from_host(PORT);
    let backend = Backend {
        address: address(BACKEND),
        port,
        protocol: Protocol::TCP,
        state: BackendState::default().next_generation(),
        sets: Membership::CLUSTER,
        ..Backend::new_zeroed()
    };
    let (_, written) = maps.write_backends(&[(INDEX, backend)]);
    written?;
    let slot = Slot {
        backend: INDEX,
        share: 1,
    };
    maps.write_slots(INDEX, &[slot])?;
    let key = FrontendKey::new(address(FRONTEND), port, Protocol::TCP);
    let mut frontend = Frontend {
        key,
        cluster: IndexRange {
            base: INDEX,
            len: 1,
        },
        flags: Frontend::HAS_ENDPOINTS,
        ..Frontend::new_zeroed()
    };
    frontend.inline_backends[0] = InlineBackend {
        address: backend.address,
        port,
        share: 1,
        index: INDEX,
    };
    maps.write_frontend(INDEX, &frontend)?;
    maps.write_frontend_key(&key, INDEX)?;
    Ok(())
}

/// Runs the program on a frame, checks the destination that the frame has afterwards, and returns the time in
/// nanoseconds.
fn run(translation: &Translation, frame: &[u8], to: Option<Ipv4Addr>) -> Result<u64> {
    let FrameRun {
        verdict,
        frame: after,
        took,
    } = translation.arrive(frame)?;
    ensure!(verdict == -1, "verdict {verdict}");
    let unchanged: [u8; 4] = frame[30..34].try_into()?;
    let expected = to.map_or(unchanged, |to| to.octets());
    ensure!(
        after[30..34] == expected,
        "another destination: {:?}",
        &after[30..34]
    );
    Ok(u64::try_from(took.as_nanos())?)
}

/// Builds a TCP packet from the client, without checksums.
fn frame(to: Ipv4Addr, from_port: u16, flags: u8) -> Vec<u8> {
    let mut frame = vec![0; 12];
    frame.extend([8, 0, 0x45, 0, 0, 40, 0, 7, 0, 0, 64, 6, 0, 0]);
    frame.extend(CLIENT.octets());
    frame.extend(to.octets());
    frame.extend(from_port.to_be_bytes());
    frame.extend(PORT.to_be_bytes());
    frame.extend([1, 2, 3, 4, 0, 0, 0, 0, 0x50, flags, 1, 0, 0, 0, 0, 0]);
    frame
}
