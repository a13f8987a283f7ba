//! Measures the cost of a request from outside a node through a node port, compared with a request that goes to the
//! backend directly.
//!
//! Every variant has a node of its own, with equivalent links, and the same servers: one in a pod of the node, one on
//! another node. The client, the node's kernel and the server share one CPU, so that the rate of requests is the
//! inverse of the CPU time that one of them costs on the whole path. Each round measures every variant once, in shuffled
//! order, and compares it with the direct requests of the same round.

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde::Serialize;
use tunnel_tests::{
    clock::Instant,
    environment,
    load::connect::Report,
    pod,
    sandbox::COMMAND_TIMEOUT,
    table::{Column, format_table, microseconds},
};

use self::{
    nodes::{Nodes, Translator},
    program_times::ProgramTimes,
    refusals::Refusals,
    rows::{Path, Row, Rows},
    streams::{Streams, Translation},
};
use crate::{
    connect::real_time_prefix,
    report::{CommonOptions, Verdict, median, median_ratio, run_rounds, thousandths},
};

mod nodes;
mod program_times;
mod refusals;
mod rows;
mod streams;

/// The CPU that everything on the path of a request shares.
const CPU: u32 = 0;

/// The benchmark's options.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: CommonOptions,
    /// The number of times to measure each variant.
    #[arg(long, default_value_t = 61)]
    rounds: u32,
    /// The numbers of Services with which to measure Culvert; an empty list skips Culvert.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "10,10000,100000")]
    services: Vec<u32>,
    /// The numbers of Services for which to measure nftables rules like kube-proxy's; an empty list skips
    /// them.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "10,10000")]
    nft: Vec<u32>,
    /// The numbers of Services for which to measure iptables rules like kube-proxy's; an empty list skips
    /// them.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "10,10000")]
    iptables: Vec<u32>,
    /// The numbers of Services with which to measure Culvert with `service.packets.delivery: redirect`; an empty list skips it.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "10,10000")]
    redirect: Vec<u32>,
    /// The duration of one measurement, in milliseconds.
    #[arg(long, default_value_t = 100)]
    slot_millis: u64,
}

/// A row's medians.
#[derive(Clone, Debug, Serialize)]
struct Medians {
    variant: String,
    path: Path,
    #[serde(skip)]
    culvert: Option<u32>,
    /// The name of the row in charts.
    label: String,
    requests_per_second: u64,
    /// The rate, in thousandths of that of direct requests to the same backend: the median of the ratios from all
    /// rounds.
    rate_to_direct: u64,
    p50_ns: u64,
    p99_ns: u64,
    failures: u64,
}

#[derive(Serialize)]
struct Measurements {
    rounds: u32,
    lines: Vec<Medians>,
    streams: Streams,
    #[serde(flatten)]
    times: Times,
}

/// The times that are measured apart from requests.
#[derive(Serialize)]
struct Times {
    programs: ProgramTimes,
    refusals: Vec<Refusals>,
}

/// Runs the benchmark and prints the results. A failed request is an error; with `check`, so is a missed target.
pub(crate) fn run(options: &Options) -> Result<()> {
    let programs = ProgramTimes::measure().context("cannot run the programs alone")?;
    let mut nodes = Nodes::default();
    let mut rows = Rows::default();
    for name in ["direct", "direct-again"] {
        rows.add_direct(&mut nodes, name, (Translator::None, Translation::None))?;
    }
    let empty = (Translator::EmptyPrograms, Translation::EmptyPrograms);
    rows.add_direct(&mut nodes, "empty programs", empty)?;
    for count in &options.services {
        let start = Instant::now();
        rows.add_culvert(&mut nodes, *count, options)?;
        if !options.common.json {
            println!(
                "{count} services: ready after {} ms",
                start.elapsed().as_millis()
            );
        }
    }
    if let Some(count) = options.services.first() {
        rows.add_all_links(&mut nodes, *count, options)?;
    }
    for count in &options.redirect {
        rows.add_redirect(&mut nodes, *count, options)?;
    }
    for count in &options.nft {
        let translator = (Translator::Nft(*count), Translation::Nft);
        rows.add_node_ports(&mut nodes, *count, translator)?;
    }
    for count in &options.iptables {
        let translator = (Translator::Iptables(*count), Translation::Iptables);
        rows.add_node_ports(&mut nodes, *count, translator)?;
    }
    let Rows {
        requests: rows,
        streams,
    } = rows;

    let prefix = real_time_prefix(&rows[0].client);
    let rounds = run_rounds(options.rounds.max(1), &rows, |row| {
        measure(row, options.slot_millis, &prefix)
            .with_context(|| format!("{}, {}", row.variant, row.path.label()))
    })?;
    let streams = streams::measure(
        &streams,
        (options.rounds.max(1), options.slot_millis),
        &prefix,
    )?;
    let lines: Vec<Medians> = (0..rows.len())
        .map(|at| medians(&rows, at, &rounds))
        .collect();
    let failures: u64 = lines.iter().map(|line| line.failures).sum();
    let of_culvert = rows.iter().find(|row| row.culvert.is_some());
    let refusals = of_culvert.map_or(Ok(Vec::new()), |row| refusals::measure(&row.client))?;
    let times = Times { programs, refusals };
    let mut verdicts = verdicts(&lines, &rounds, &times);
    verdicts.extend(streams.verdicts());
    let text = text(options.rounds, &lines, &times) + &streams.to_string();
    let measured = Measurements {
        rounds: options.rounds,
        lines,
        streams,
        times,
    };
    let judged = options.common.report(&measured, &text, &verdicts);
    ensure!(failures == 0, "{failures} requests failed");
    judged
}

fn measure(row: &Row, millis: u64, prefix: &[String]) -> Result<Report> {
    let program = pod::path_to_string(&environment::culvert_lab()?)?;
    let load = ["load", "connect", "--request", "--ports"].map(str::to_owned);
    let command_line = [prefix, &[program], &load].concat();
    let output = row
        .client
        .command(&command_line)
        .option("--to", row.first)
        .option("--count", row.count)
        .option("--apart", row.apart)
        .option("--millis", millis)
        .cpu(CPU)
        .start()?
        .finish(COMMAND_TIMEOUT)?;
    output.parse_report()
}

/// Returns the index of the row with direct requests that a row is compared with.
fn direct_of(rows: &[Row], path: Path) -> usize {
    let is_same = |row: &Row| row.path == path.direct();
    rows.iter().position(is_same).unwrap_or(0)
}

fn medians(rows: &[Row], at: usize, rounds: &[Vec<Report>]) -> Medians {
    let row = &rows[at];
    let direct = direct_of(rows, row.path);
    let own = || rounds.iter().map(|reports| &reports[at]);
    Medians {
        variant: row.variant.clone(),
        path: row.path,
        culvert: row.culvert,
        label: format!("{}, {}", row.variant, row.path.label()),
        requests_per_second: median(own().map(|report| report.rate)),
        rate_to_direct: rate_ratio(rounds, at, direct),
        p50_ns: median(own().map(|report| report.connect.p50_ns)),
        p99_ns: median(own().map(|report| report.connect.p99_ns)),
        failures: own().flat_map(|report| report.failures.values()).sum(),
    }
}

/// Returns the median of the ratios of two rows' rates, in thousandths.
fn rate_ratio(rounds: &[Vec<Report>], at: usize, to: usize) -> u64 {
    median_ratio(rounds, |report| report.rate, at, to)
}

fn verdicts(lines: &[Medians], rounds: &[Vec<Report>], times: &Times) -> Vec<Verdict> {
    let find = |variant: &str, path| {
        let found = |line: &Medians| line.variant == variant && line.path == path;
        lines.iter().position(found)
    };
    let at_least = |target: String, value: u64, limit: u64| {
        Verdict::new(target, thousandths(value), value >= limit)
    };
    let mut verdicts = Vec::new();
    let mut smallest: Option<usize> = None;
    for (at, line) in lines
        .iter()
        .enumerate()
        .filter(|(_, line)| line.culvert.is_some())
    {
        let (name, to_direct) = (&line.label, line.rate_to_direct);
        match line.path {
            Path::Here => {
                let to_empty = find("empty programs", Path::Here)
                    .map_or(0, |empty| rate_ratio(rounds, at, empty));
                let target =
                    format!("{name}: at least 0.960 of direct, or 0.985 of empty programs");
                let measured = format!("{}, {}", thousandths(to_direct), thousandths(to_empty));
                let met = to_direct >= 960 || to_empty >= 985;
                verdicts.push(Verdict::new(target, measured, met));
                if let Some(smallest) = smallest {
                    let flat = rate_ratio(rounds, at, smallest);
                    let target = format!("{name}: at least 0.980 of {}", lines[smallest].label);
                    verdicts.push(at_least(target, flat, 980));
                }
                smallest = smallest.or(Some(at));
            }
            Path::Masqueraded => {
                let target = format!("{name}: at least 0.930 of direct");
                verdicts.push(at_least(target, to_direct, 930));
            }
            Path::Redirected => {
                let target = format!("{name}: at least 0.990 of direct");
                verdicts.push(at_least(target, to_direct, 990));
            }
            Path::Foreign => {
                let target = format!("{name}: at least 0.980 of direct");
                verdicts.push(at_least(target, to_direct, 980));
            }
            Path::PodToPod => {
                let target = format!("{name}: at least 0.970 of direct");
                verdicts.push(at_least(target, to_direct, 970));
            }
        }
    }
    for path in [Path::Here, Path::Masqueraded] {
        let of_path = |is_culvert: bool| {
            let lines = lines.iter().enumerate();
            lines.filter(move |(_, line)| line.path == path && line.culvert.is_some() == is_culvert)
        };
        let slowest = of_path(true).min_by_key(|(_, line)| line.rate_to_direct);
        let rules = of_path(false).filter(|(_, line)| Translator::is_rules(&line.variant));
        for ((at, own), (other, rules)) in slowest
            .into_iter()
            .flat_map(|it| rules.clone().map(move |rules| (it, rules)))
        {
            let target = format!("{}: faster than {}", own.label, rules.label);
            let value = rate_ratio(rounds, at, other);
            verdicts.push(Verdict::new(target, thousandths(value), value > 1000));
        }
    }
    verdicts.extend(times.programs.verdicts());
    verdicts.extend(times.refusals.iter().map(Refusals::verdict));
    verdicts
}

fn text(rounds: u32, lines: &[Medians], times: &Times) -> String {
    let columns: [Column<Medians>; 5] = [
        ("", |line| line.label.clone()),
        ("requests/s", |line| line.requests_per_second.to_string()),
        ("to direct", |line| thousandths(line.rate_to_direct)),
        ("p50", |line| microseconds(line.p50_ns)),
        ("p99", |line| microseconds(line.p99_ns)),
    ];
    let table = format_table(lines, &columns);
    let refusals = times.refusals.iter().map(Refusals::to_string);
    let (programs, refusals) = (times.programs, refusals.collect::<String>());
    format!(
        "medians of {rounds} rounds; a request is a connection, a byte there and a byte back; client, node and \
         server share a CPU; nft and iptables: rules of kube-proxy's shape, one endpoint each\n{table}{programs}{refusals}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(rate: u64) -> Report {
        Report {
            rate,
            ..Report::default()
        }
    }

    #[test]
    fn rates_are_compared_within_a_round() {
        // The second round was disturbed: both rows reached only half their usual rate.
        let rounds = [
            vec![report(10_000), report(9_700)],
            vec![report(5_000), report(4_900)],
            vec![report(10_000), report(9_900)],
        ];

        assert_eq!(rate_ratio(&rounds, 1, 0), 980);
    }
}
