//! Measures the cost of connecting through Culvert, with different numbers of Services, compared with
//! connecting directly.
//!
//! All variants use the same client pod and the same backend, so their packets take the same path. They
//! differ only in the client's cgroup, and therefore in the programs that run on connect(). The exceptions
//! are the variants with rules like kube-proxy's: each has its own pod, with an equivalent path. Each round
//! measures every variant once, in shuffled order, and compares it with the direct connections in the same
//! round.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde::Serialize;
use tunnel_common::table::MapSizes;
use tunnel_tests::{
    clock::Instant,
    culvert_instance::{Instance, InstanceSettings},
    environment,
    load::connect::Report,
    manifest::Protocol,
    node_network::NodeNetwork,
    pod::{self, Server},
    process_usage,
    sandbox::{COMMAND_TIMEOUT, Sandbox},
    server::{Listener, ServerKind},
    table::{format_table, microseconds},
};

use self::kube_proxy::Rules;
use crate::{
    report::{CommonOptions, Verdict, median, ratio, run_rounds, thousandths},
    services::{FIRST_CLUSTER_IP, service_files},
};

mod kube_proxy;

const PORT: u16 = 80;
const TARGET_PORT: u16 = 9000;

/// The CPUs to which the client and the server are pinned.
const CPUS: [u32; 2] = [0, 1];

/// The name of the second variant with direct connections. Any difference from the first one is noise.
const CONTROL: &str = "direct-again";

/// The number of evenly spaced Services that the client connects to. It is the same in all variants, so that
/// they differ only in how many Services exist.
const USED_SERVICES: u32 = 100;

/// The suffix in the name of the variant that connects to every Service.
const UNCACHED_SUFFIX: &str = " in turn";

/// The number of variants with direct connections, which come first in the list.
const DIRECT_VARIANTS: usize = 2;

/// The first instance's admin port. Each instance uses two consecutive ports: admin and healthz.
const FIRST_ADMIN_PORT: u16 = 10_300;

/// The benchmark's options.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: CommonOptions,
    /// The number of times to measure each variant.
    #[arg(long, default_value_t = 31)]
    rounds: u32,
    /// The numbers of Services with which to measure Culvert; an empty list skips Culvert.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,10000,100000")]
    services: Vec<u32>,
    /// The numbers of Services for which to measure nftables rules like kube-proxy's; an empty list skips
    /// them.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,5000")]
    nft: Vec<u32>,
    /// The numbers of Services for which to measure iptables rules like kube-proxy's; an empty list skips
    /// them.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,10000")]
    iptables: Vec<u32>,
    /// The duration of one measurement, in milliseconds.
    #[arg(long, default_value_t = 150)]
    slot_millis: u64,
}

/// A client, and the addresses that it connects to.
struct Variant {
    name: String,
    client: Sandbox,
    first: SocketAddr,
    count: u32,
    apart: u32,
    /// The Culvert instance to measure, which runs until it is dropped; `None` if no targets apply to the
    /// variant.
    instance: Option<Instance>,
}

/// A variant's medians.
#[derive(Clone, Debug, Serialize)]
struct Medians {
    variant: String,
    /// True if targets apply to the variant.
    #[serde(skip)]
    has_targets: bool,
    connects_per_second: u64,
    /// The connection rate, in thousandths of the direct rate: the median of the ratios from all rounds.
    rate_to_direct: u64,
    p50_ns: u64,
    p99_ns: u64,
    /// The difference from the p50 of direct connections: the median of the differences from all rounds.
    p50_over_direct_ns: i64,
    /// The number of times the server went to sleep, per thousand connections.
    woken: u64,
    failures: u64,
}

#[derive(Serialize)]
struct Measurements {
    rounds: u32,
    lines: Vec<Medians>,
}

/// Runs the benchmark and prints the results. A failed connection is an error; with `check`, so is a missed
/// target.
pub(crate) fn run(options: &Options) -> Result<()> {
    let network = NodeNetwork::new()?;
    let prefix = real_time_prefix(network.host());
    let server = start_server(&network, &prefix)?;
    let endpoints = kube_proxy::endpoints(&network, &*network.pod("backend")?)?;
    let mut variants = vec![direct(&network, "direct")?, direct(&network, CONTROL)?];
    for (index, count) in options.services.iter().enumerate() {
        let start = Instant::now();
        let variant = through_culvert(&network, options, (index, *count), &endpoints)
            .with_context(|| format!("with {count} Services"))?;
        let (name, took) = (&variant.name, start.elapsed().as_millis());
        if !options.common.json {
            println!("{name}: ready after {took} ms");
        }
        variants.push(variant);
    }
    variants.extend(uncached_variant(&variants, &options.services));
    let through_rules =
        |kind, count: &u32| kube_proxy::through_rules(&network, kind, *count, &endpoints);
    for count in &options.nft {
        variants.push(through_rules(Rules::Nft, count)?);
    }
    for count in &options.iptables {
        variants.push(through_rules(Rules::Iptables, count)?);
    }

    let rounds = run_rounds(options.rounds.max(1), &variants, |variant| {
        measure(variant, options.slot_millis, &prefix, &server)
            .with_context(|| variant.name.clone())
    })?;
    let named = variants.iter().enumerate();
    let lines: Vec<Medians> = named
        .map(|(at, variant)| medians(&variant.name, variant.instance.is_some(), at, &rounds))
        .collect();
    let failures: u64 = lines.iter().map(|line| line.failures).sum();
    let (text, verdicts) = (text(options.rounds, &lines), verdicts(&lines));
    let measured = Measurements {
        rounds: options.rounds,
        lines,
    };
    let judged = options.common.report(&measured, &text, &verdicts);
    ensure!(failures == 0, "{failures} connects failed");
    judged
}

/// Returns a command prefix that gives a process real-time priority, or an empty one if the system doesn't
/// permit that.
pub(crate) fn real_time_prefix(sandbox: &Sandbox) -> Vec<String> {
    let command_line = ["chrt", "--fifo", "50"];
    match sandbox.run(&[&command_line[..], &["true"]].concat()) {
        Ok(_) => command_line.map(str::to_owned).to_vec(),
        Err(_) => Vec::new(),
    }
}

fn start_server(network: &NodeNetwork, prefix: &[String]) -> Result<Server> {
    let backend = network.pod("backend")?;
    let server = backend.serve_on(
        &[Listener::new(ServerKind::Sink, TARGET_PORT)],
        Some(CPUS[1]),
    )?;
    if !prefix.is_empty() {
        let pid = server.process().pid().to_string();
        backend.run(&["chrt", "--all-tasks", "--fifo", "--pid", "50", &pid])?;
    }
    Ok(server)
}

fn direct(network: &NodeNetwork, name: &str) -> Result<Variant> {
    let client = network.pod("client")?;
    let backend = network.pod("backend")?;
    let client = network.share_namespace(&client, &format!("outside/{name}"), None)?;
    Ok(Variant {
        name: name.to_owned(),
        client,
        first: backend.addr_v4(TARGET_PORT),
        count: 1,
        apart: 1,
        instance: None,
    })
}

fn through_culvert(
    network: &NodeNetwork,
    options: &Options,
    (index, count): (usize, u32),
    endpoints: &[SocketAddr],
) -> Result<Variant> {
    let group = format!("services-{count}");
    let directory = network.lab().directory().join(&group);
    let bpffs = Some(directory.join("bpffs"));
    let host = network.share_namespace(network.host(), &format!("{group}/host"), bpffs)?;
    let client =
        network.share_namespace(&*network.pod("client")?, &format!("{group}/client"), None)?;

    let port = FIRST_ADMIN_PORT + 2 * u16::try_from(index)?;
    let capacity = count.saturating_add(count / 4).max(1024);
    let settings = InstanceSettings {
        maps: MapSizes {
            frontends: capacity,
            slots: capacity.saturating_mul(u32::try_from(2 * endpoints.len())?),
            backends: capacity.saturating_mul(u32::try_from(endpoints.len())?),
            ..MapSizes::default()
        },
        admin: ([127, 0, 0, 1], port).into(),
        healthz: ([127, 0, 0, 1], port + 1).into(),
        ..options.common.settings()?
    };
    let cgroup = network.lab().cgroup().join(&group);
    let instance = Instance::new(host, directory, &cgroup, settings)?;
    let backends = |_| endpoints.iter().map(SocketAddr::ip);
    for file in service_files(count, Protocol::TCP, [PORT, TARGET_PORT], backends) {
        instance.apply(file)?;
    }
    instance.start()?;
    Ok(Variant {
        name: format!("{count} services"),
        client,
        first: SocketAddr::new(FIRST_CLUSTER_IP, PORT),
        count: count.min(USED_SERVICES),
        apart: (count / USED_SERVICES).max(1),
        instance: Some(instance),
    })
}

/// Creates a variant that connects to every Service of the largest instance in turn, so that the map entries
/// for the next connection are not in any CPU cache. No targets apply to it.
fn uncached_variant(variants: &[Variant], services: &[u32]) -> Option<Variant> {
    let largest = services
        .iter()
        .max()
        .filter(|count| **count > USED_SERVICES)?;
    let index = services.iter().position(|count| count == largest)?;
    let variant = variants.get(DIRECT_VARIANTS + index)?;
    Some(Variant {
        name: format!("{largest}{UNCACHED_SUFFIX}"),
        client: variant.client.clone(),
        first: variant.first,
        count: *largest,
        apart: 1,
        instance: None,
    })
}

/// The result of one measurement.
struct Sample {
    report: Report,
    /// The number of times the server went to sleep during the measurement.
    sleeps: u64,
}

fn measure(variant: &Variant, millis: u64, prefix: &[String], server: &Server) -> Result<Sample> {
    let server = server.process().pid();
    let before = process_usage::voluntary_switches(server)?;
    let program = pod::path_to_string(&environment::culvert_lab()?)?;
    let command_line = [prefix, &[program], &["load", "connect"].map(str::to_owned)].concat();
    let output = variant
        .client
        .command(&command_line)
        .option("--to", variant.first)
        .option("--count", variant.count)
        .option("--apart", variant.apart)
        .option("--millis", millis)
        .cpu(CPUS[0])
        .start()?
        .finish(COMMAND_TIMEOUT)?;
    Ok(Sample {
        report: output.parse_report()?,
        sleeps: process_usage::voluntary_switches(server)? - before,
    })
}

/// Computes the medians for the variant at index `at`.
fn medians(name: &str, has_targets: bool, at: usize, rounds: &[Vec<Sample>]) -> Medians {
    let own = || rounds.iter().map(|samples| &samples[at].report);
    let with_direct = || {
        own()
            .zip(rounds)
            .map(|(own, samples)| (&samples[0].report, own))
    };
    let woken = |sample: &Sample| ratio(sample.sleeps, sample.report.made);
    let rate_ratio = |(direct, own): (&Report, &Report)| ratio(own.rate, direct.rate);
    let p50_difference = |(direct, own): (&Report, &Report)| p50_ns(own) - p50_ns(direct);
    Medians {
        variant: name.to_owned(),
        has_targets,
        connects_per_second: median(own().map(|report| report.rate)),
        rate_to_direct: median(with_direct().map(rate_ratio)),
        p50_ns: median(own().map(|report| report.connect.p50_ns)),
        p99_ns: median(own().map(|report| report.connect.p99_ns)),
        p50_over_direct_ns: median(with_direct().map(p50_difference)),
        woken: median(rounds.iter().map(|samples| woken(&samples[at]))),
        failures: own().flat_map(|report| report.failures.values()).sum(),
    }
}

fn p50_ns(report: &Report) -> i64 {
    i64::try_from(report.connect.p50_ns).unwrap_or(i64::MAX)
}

fn verdicts(lines: &[Medians]) -> Vec<Verdict> {
    let through_culvert: Vec<&Medians> = lines.iter().filter(|line| line.has_targets).collect();
    let woken = lines.iter().map(|line| line.woken).min().unwrap_or(0);
    let target = "the server sleeps before at least 0.950 of the connects of each variant";
    let mut verdicts = vec![Verdict::new(target, thousandths(woken), woken >= 950)];
    for line in &through_culvert {
        let (rate, p50_difference) = (line.rate_to_direct, line.p50_over_direct_ns);
        let target = format!("{}: rate at least 0.950 of direct", line.variant);
        verdicts.push(Verdict::new(target, thousandths(rate), rate >= 950));
        let target = format!("{}: p50 at most 3.0 µs above direct", line.variant);
        verdicts.push(Verdict::new(
            target,
            difference(p50_difference),
            p50_difference <= 3000,
        ));
    }
    if let [few, .., largest] = through_culvert.as_slice() {
        let p50_difference = largest.p50_over_direct_ns - few.p50_over_direct_ns;
        let target = format!(
            "{}: p50 at most 1.0 µs above {}",
            largest.variant, few.variant
        );
        verdicts.push(Verdict::new(
            target,
            difference(p50_difference),
            p50_difference <= 1000,
        ));
    }
    verdicts
}

fn text(rounds: u32, lines: &[Medians]) -> String {
    let table = format_table(
        lines,
        &[
            ("", |line| line.variant.clone()),
            ("connects/s", |line| line.connects_per_second.to_string()),
            ("to direct", |line| thousandths(line.rate_to_direct)),
            ("p50", |line| microseconds(line.p50_ns)),
            ("over direct", |line| difference(line.p50_over_direct_ns)),
            ("p99", |line| microseconds(line.p99_ns)),
            ("", |_| String::new()),
        ],
    );
    format!(
        "medians of {rounds} rounds; connects go to {USED_SERVICES} Services spread over all, or to each in turn; four \
         endpoints each; nft and iptables: rules of kube-proxy's shape\n{table}"
    )
}

fn difference(nanoseconds: i64) -> String {
    let sign = if nanoseconds < 0 { '-' } else { '+' };
    format!("{sign}{}", microseconds(nanoseconds.unsigned_abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample(rate: u64, p50_ns: u64) -> Sample {
        let mut report = Report::default();
        (report.made, report.rate, report.connect.p50_ns) = (1000, rate, p50_ns);
        let sleeps = 960;
        Sample { report, sleeps }
    }

    #[test]
    fn variants_are_compared_with_direct_connects_of_the_same_round() {
        // The second round was disturbed: both variants reached only half their usual rate.
        let rounds = [
            vec![sample(10_000, 20_000), sample(9_900, 21_000)],
            vec![sample(5_000, 40_000), sample(4_900, 41_500)],
            vec![sample(10_000, 20_000), sample(9_700, 21_200)],
        ];

        let line = medians("100 services", true, 1, &rounds);

        assert_eq!((line.rate_to_direct, line.p50_over_direct_ns), (980, 1_200));
    }

    #[test]
    fn missed_targets_are_found() {
        let rounds = [vec![
            sample(10_000, 20_000),
            sample(9_990, 20_000),
            sample(9_000, 22_000),
            sample(9_600, 23_500),
            sample(100, 900_000),
        ]];
        let ours = [false, false, true, true, false].into_iter().enumerate();
        let mut lines: Vec<_> = ours
            .map(|(at, has_targets)| medians("any", has_targets, at, &rounds))
            .collect();

        let met = |lines: &[Medians]| -> Vec<_> {
            let verdicts = verdicts(lines);
            verdicts.iter().map(|verdict| verdict.met).collect()
        };

        assert_eq!(met(&lines), [true, false, true, true, false, false]);
        // In the second variant, the server didn't go to sleep often enough.
        lines[1].woken = 940;
        assert!(!met(&lines)[0]);
    }
}
