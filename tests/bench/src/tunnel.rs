//! Measures the cost of streams through the tunnel, compared with plain TCP and a single bare TLS stream over
//! the same links.
//!
//! All variants use the same client program and the same server on the edge node. The plain TCP and TLS
//! clients dial the edge node's link address; the tunnel client dials an address from the edge node's Node
//! object, and Culvert steers its connections into the tunnel. Each round measures every variant once, in
//! shuffled order.

use std::time::Duration;

use anyhow::{Context as _, Result};
use clap::Args;
use serde::{Serialize, de::DeserializeOwned};
use tunnel_tests::{
    clock,
    load::{Latency, nanoseconds},
    process_usage,
    sandbox::COMMAND_TIMEOUT,
    table::{format_table, microseconds},
    throughput::{FloodReport, client::WARM_UP, divide},
};

use self::fixture::{Fixture, NetworkPath};
use crate::report::{CommonOptions, Verdict, median, ratio, run_rounds, thousandths};

mod fixture;

/// The numbers of concurrent streams whose throughput is measured.
const STREAMS: [u32; 2] = [1, 10];

/// The numbers of stalled readers alongside which echoes are measured.
const STALLED: [u32; 2] = [1, 200];

/// The targets relative to a single bare TLS stream, in thousandths: the minimum rate for any number of
/// tunnel streams, and the maximum CPU time per byte.
const MIN_RATE: u64 = 600;
const MAX_CPU_TIME: u64 = 1500;

/// The number of idle streams whose memory is measured, which is almost all streams of a node, and the maximum memory
/// of an idle stream at each end, in bytes.
const IDLE: u32 = 400;
const MAX_IDLE_BYTES: u64 = 8 << 10;
/// The time in which the processes return the memory of earlier streams.
const SETTLE_TIME: Duration = Duration::from_secs(4);

/// The target for the p99 of an echo alongside stalled readers.
const ECHO_TARGET: Duration = Duration::from_millis(2);

/// The benchmark's options.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: CommonOptions,
    /// The number of times to measure each variant.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The duration of one measurement, in milliseconds.
    #[arg(long, default_value_t = 1500)]
    slot_millis: u64,
}

/// A path from the cloud to the edge.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Variant {
    Plain,
    Tunnel,
    Tls,
}

impl Variant {
    const ALL: [Self; 3] = [Self::Plain, Self::Tls, Self::Tunnel];

    const fn name(self) -> &'static str {
        match self {
            Self::Plain => "plain TCP",
            Self::Tls => "bare TLS",
            Self::Tunnel => "tunnel",
        }
    }
}

/// A variant's measurements in one round.
#[derive(Clone, Copy, Debug, Default)]
struct Sample {
    /// The throughput for each of [`STREAMS`], in millions of bytes per second.
    megabytes: [u64; 2],
    /// The CPU time with one stream, in nanoseconds per million bytes.
    cpu: u64,
    p50_ns: u64,
    p99_ns: u64,
    /// The 99th percentile of the echo times, in nanoseconds, for each of [`STALLED`].
    stalled_p99_ns: [u64; 2],
    /// The memory of an idle stream at each end of the tunnel, in bytes.
    idle_bytes: u64,
}

/// A variant's medians.
#[derive(Clone, Debug, Serialize)]
struct Medians {
    variant: &'static str,
    megabytes_per_second_1: u64,
    megabytes_per_second_10: u64,
    /// The CPU time of the gateway and the agent or, in variants without a tunnel, of the client and the
    /// server.
    cpu_ms_per_gigabyte: u64,
    echo_p50_ns: u64,
    echo_p99_ns: u64,
    beside_1_stalled_p99_ns: u64,
    beside_200_stalled_p99_ns: u64,
    /// The memory of an idle stream at each end of the tunnel. Zero in variants without a tunnel.
    idle_stream_bytes: u64,
}

#[derive(Serialize)]
struct Measurements {
    rounds: u32,
    lines: [Medians; 3],
}

/// Runs the benchmark and prints the results. With `check`, a missed target is an error.
pub(crate) fn run(options: &Options) -> Result<()> {
    let fixture = Fixture::new(options)?;
    let slot = Duration::from_millis(options.slot_millis);
    let rounds = run_rounds(options.rounds.max(1), &Variant::ALL, |variant| {
        measure(&fixture, *variant, slot).with_context(|| variant.name())
    })?;
    let measured = Measurements {
        rounds: options.rounds,
        lines: [0, 1, 2].map(|at| medians(at, &rounds)),
    };
    let text = text(&measured);
    options.common.report(&measured, &text, &verdicts(&rounds))
}

fn measure(fixture: &Fixture, variant: Variant, slot: Duration) -> Result<Sample> {
    let path = fixture.path(variant);
    let mut sample = Sample::default();
    for (streams, megabytes) in STREAMS.iter().zip(&mut sample.megabytes) {
        let before = cpu_time(&path)?;
        let flood: FloodReport = run_client(fixture, &path, "flood", *streams, slot)?;
        *megabytes = flood.megabytes();
        if *streams == 1 {
            let processes = nanoseconds(cpu_time(&path)?.saturating_sub(before));
            // The CPU time of these processes includes the warm-up, so only the share that falls within the
            // measurement is counted. A client reports only the CPU time that it used during the measurement.
            let total = slot + WARM_UP;
            let share = u128::from(processes) * slot.as_nanos() / total.as_nanos().max(1);
            let own = if path.adds_client_cpu_time {
                flood.cpu_ns
            } else {
                0
            };
            let cpu = share + u128::from(own);
            sample.cpu = divide(cpu * 1_000_000, flood.bytes);
        }
    }
    let echoes: Latency = run_client(fixture, &path, "echo", 1, slot)?;
    (sample.p50_ns, sample.p99_ns) = (echoes.p50_ns, echoes.p99_ns);
    for (count, stalled_p99) in STALLED.iter().zip(&mut sample.stalled_p99_ns) {
        let _stalled = fixture.stall(&path, *count)?;
        let echoes: Latency = run_client(fixture, &path, "echo", 1, slot)?;
        *stalled_p99 = echoes.p99_ns;
    }
    if variant == Variant::Tunnel {
        clock::pause(SETTLE_TIME);
        let before = memory(&path)?;
        let _idle = fixture.idle(&path, IDLE)?;
        let ends = u64::try_from(path.measured_processes.len())? * u64::from(IDLE);
        sample.idle_bytes = memory(&path)?.saturating_sub(before) / ends;
    }
    Ok(sample)
}

fn memory(path: &NetworkPath) -> Result<u64> {
    let processes = path.measured_processes.iter();
    processes
        .map(|pid| process_usage::resident_memory(*pid))
        .sum()
}

fn cpu_time(path: &NetworkPath) -> Result<Duration> {
    path.measured_processes
        .iter()
        .map(|pid| process_usage::process_cpu_time(*pid))
        .sum()
}

fn run_client<T: DeserializeOwned>(
    fixture: &Fixture,
    path: &NetworkPath,
    mode: &str,
    connections: u32,
    slot: Duration,
) -> Result<T> {
    let client = fixture.client(path, mode, connections)?;
    let client = client.option("--millis", slot.as_millis()).start()?;
    client.finish(COMMAND_TIMEOUT + slot)?.parse_report()
}

fn medians(at: usize, rounds: &[Vec<Sample>]) -> Medians {
    let of = |pick: fn(&Sample) -> u64| median(rounds.iter().map(|samples| pick(&samples[at])));
    Medians {
        variant: Variant::ALL[at].name(),
        megabytes_per_second_1: of(|it| it.megabytes[0]),
        megabytes_per_second_10: of(|it| it.megabytes[1]),
        // Nanoseconds per million bytes are the same as microseconds per billion bytes.
        cpu_ms_per_gigabyte: of(|it| it.cpu / 1000),
        echo_p50_ns: of(|it| it.p50_ns),
        echo_p99_ns: of(|it| it.p99_ns),
        beside_1_stalled_p99_ns: of(|it| it.stalled_p99_ns[0]),
        beside_200_stalled_p99_ns: of(|it| it.stalled_p99_ns[1]),
        idle_stream_bytes: of(|it| it.idle_bytes),
    }
}

fn verdicts(rounds: &[Vec<Sample>]) -> Vec<Verdict> {
    // Ratios are computed within a round, since a disturbance affects all of the round's values.
    let [_, tls, ours] = [0, 1, 2];
    let to_tls = |pick: &dyn Fn(&Sample, &Sample) -> (u64, u64)| {
        median(rounds.iter().map(|samples| {
            let (ours, tls) = pick(&samples[ours], &samples[tls]);
            ratio(ours, tls)
        }))
    };
    let mut verdicts = Vec::new();
    for (at, streams) in STREAMS.iter().enumerate() {
        let rate = to_tls(&|ours, tls| (ours.megabytes[at], tls.megabytes[0]));
        let target = format!("{streams} streams: MB/s at least 0.600 of one stream of bare TLS");
        verdicts.push(Verdict::new(target, thousandths(rate), rate >= MIN_RATE));
    }
    let cpu = to_tls(&|ours, tls| (ours.cpu, tls.cpu));
    let target = "CPU time of both ends per byte at most 1.500 of bare TLS";
    verdicts.push(Verdict::new(target, thousandths(cpu), cpu <= MAX_CPU_TIME));
    for (at, stalled) in STALLED.iter().enumerate() {
        let delay = median(
            rounds
                .iter()
                .map(|samples| samples[ours].stalled_p99_ns[at]),
        );
        let target = format!("an echo alongside {stalled} stalled streams: p99 at most 2 ms");
        let met = delay <= nanoseconds(ECHO_TARGET);
        verdicts.push(Verdict::new(target, microseconds(delay), met));
    }
    let bytes = median(rounds.iter().map(|samples| samples[ours].idle_bytes));
    let target = "memory of an idle stream, at each end: at most 8 KiB";
    let measured = format!("{bytes} bytes");
    verdicts.push(Verdict::new(target, measured, bytes <= MAX_IDLE_BYTES));
    verdicts
}

fn text(Measurements { rounds, lines }: &Measurements) -> String {
    let table = format_table(
        lines,
        &[
            ("", |it| it.variant.to_owned()),
            ("MB/s, 1 stream", |it| it.megabytes_per_second_1.to_string()),
            ("10 streams", |it| it.megabytes_per_second_10.to_string()),
            ("CPU s/GB", |it| thousandths(it.cpu_ms_per_gigabyte)),
            ("echo p50", |it| microseconds(it.echo_p50_ns)),
            ("p99", |it| microseconds(it.echo_p99_ns)),
            ("p99, 1 stalled", |it| {
                microseconds(it.beside_1_stalled_p99_ns)
            }),
            ("200 stalled", |it| {
                microseconds(it.beside_200_stalled_p99_ns)
            }),
            ("", |_| String::new()),
        ],
    );
    format!("medians of {rounds} rounds; from the edge to the cloud; an echo has 64 bytes\n{table}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tunnel_is_compared_with_tls_of_the_same_round() {
        let sample = |megabytes, cpu, stalled_p99_ns| Sample {
            megabytes: [megabytes, 2 * megabytes],
            cpu,
            stalled_p99_ns: [stalled_p99_ns; 2],
            ..Sample::default()
        };
        let rounds = [
            [sample(1000, 100, 0), sample(700, 140, 1)],
            // In this disturbed round, both variants are slower.
            [sample(100, 900, 0), sample(65, 1300, 1)],
            [sample(1000, 100, 0), sample(500, 160, 3_000_000)],
        ];
        let rounds = rounds.map(|[tls, ours]| vec![Sample::default(), tls, ours]);

        let verdicts = verdicts(&rounds);

        let measured: Vec<_> = verdicts.iter().map(|it| it.measured.as_str()).collect();
        assert_eq!(measured[..3], ["0.650", "1.300", "1.444"]);
        assert!(verdicts.iter().all(|verdict| verdict.met));
    }
}
