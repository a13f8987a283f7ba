//! Measures the delay from a change of a manifest until connects use it, as observed by `connect` and not as
//! reported by the daemon. For comparison, it measures the time that `nft -f` takes to load rules like
//! kube-proxy's, without kube-proxy's own work before that.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use tunnel_tests::{
    load::{nanoseconds, percentile},
    table::{in_columns, microseconds},
};

use self::{
    few::Few,
    probe::Change,
    very_many::{OF_EACH, Sample, Way},
};
use crate::report::{Common, Verdict, median, ratio, thousandths};

mod beside;
mod few;
mod probe;
mod very_many;

/// Targets for the small case: the times of a start and of a change, and bytes of memory.
const PROGRAMMED: Duration = Duration::from_millis(500);
const CHANGED: Duration = Duration::from_millis(50);
const IDLE: u64 = 30_000_000;
const MAPS: u64 = 16_000_000;

/// Targets for the large case.
const FROM_JSON: Duration = Duration::from_secs(1);
const FROM_YAML: Duration = Duration::from_secs(3);
const WRITTEN: Duration = Duration::from_millis(300);
const PEAK: u64 = 300_000_000;
const WORK: Duration = Duration::from_millis(5);

/// The options of the benchmark.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: Common,
    /// The number of Services in the small case.
    #[arg(long, default_value_t = 1000)]
    services: u32,
    /// The number of cold starts in the small case.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The number of endpoint changes.
    #[arg(long, default_value_t = 50)]
    changes: u32,
    /// The number of Services in the large case, of four endpoints each.
    #[arg(long, default_value_t = 30_000)]
    many: u32,
    /// The number of rounds of the large case; 0 skips it.
    #[arg(long, default_value_t = 5)]
    starts: u32,
    /// The numbers of Services to load nftables rules like kube-proxy's for; an empty list skips them.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,5000")]
    rules: Vec<u32>,
}

/// Statistics of measured times, in nanoseconds.
#[derive(Clone, Debug, Serialize)]
struct Times {
    what: String,
    count: usize,
    median_ns: u64,
    p99_ns: u64,
    max_ns: u64,
}

impl Times {
    fn of(what: String, times: &[Duration]) -> Self {
        let mut sorted: Vec<u64> = times.iter().map(|time| nanoseconds(*time)).collect();
        sorted.sort_unstable();
        Self {
            what,
            count: sorted.len(),
            median_ns: median(sorted.iter().copied()),
            p99_ns: percentile(&sorted, 99),
            max_ns: sorted.last().copied().unwrap_or(0),
        }
    }

    fn verdict(&self, target: Duration) -> Verdict {
        under(&self.what, self.median_ns, target)
    }
}

/// The medians of one variant of the large case.
#[derive(Clone, Debug, Serialize)]
struct Line {
    way: &'static str,
    services: u32,
    whole_ns: u64,
    /// `whole_ns` in thousandths of the first line's: the median of the ratios of all rounds.
    whole_to_first: u64,
    /// The time from parsed objects to complete maps; 0 for rules.
    write_ns: u64,
    change_ns: u64,
    change_to_first: u64,
    /// The daemon's CPU time per change; 0 for rules.
    work_ns: u64,
    /// The daemon's peak resident memory; 0 for rules.
    peak_bytes: u64,
}

#[derive(Serialize)]
struct Measured {
    times: Vec<Times>,
    /// The resident memory of an idle daemon, and the kernel memory of its maps.
    resident_bytes: u64,
    maps_bytes: u64,
    lines: Vec<Line>,
}

/// Runs the benchmark and prints the results. With `check`, a missed target is an error.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut ways = vec![Way::Json, Way::Yaml];
    ways.extend(options.rules.iter().copied().map(Way::Rules));
    let few = few::measure(options)?;
    let beside = beside::measure(options)?;
    let rounds = very_many::measure(options, &ways)?;
    let ways = ways.iter().enumerate().filter(|_| !rounds.is_empty());
    let lines = ways.map(|(at, way)| line(options.many, *way, at, &rounds));
    let (measured, verdicts) = conclude(options, &few, beside, lines.collect());
    let text = text(&measured, options);
    options.common.report(&measured, &text, &verdicts)
}

fn conclude(
    options: &Options,
    few: &Few,
    beside: [Times; 4],
    lines: Vec<Line>,
) -> (Measured, Vec<Verdict>) {
    let all = format!("{} services", options.services);
    let change = |of: fn(&Change) -> Duration| few.changes.iter().map(of).collect::<Vec<_>>();
    let (mut times, mut verdicts) = (Vec::new(), Vec::new());
    let mut judge = |what: &str, measured: &[Duration], target| {
        let measured = Times::of(what.to_owned(), measured);
        verdicts.push(measured.verdict(target));
        times.push(measured);
    };
    let appear = format!("{all} × 3 endpoints, from the");
    let from_rename = format!("{appear} rename of their file");
    judge(&from_rename, &few.from_rename, PROGRAMMED);
    let from_start = format!("{appear} start of the daemon");
    judge(&from_start, &few.from_start, PROGRAMMED);
    let (reached, work) = (change(|it| it.reached), change(|it| it.work));
    let one = "one endpoint, from the rename of its slice";
    judge(one, &reached, CHANGED);
    judge("one endpoint, how long the daemon runs for it", &work, WORK);
    verdicts.extend(beside::verdicts(&beside));
    times.extend(beside);
    let resident_bytes = median(few.resident.iter().copied());
    let maps_bytes = median(few.maps.iter().copied());
    let resident = format!("{all}, resident at rest");
    verdicts.push(at_most(&resident, resident_bytes, IDLE));
    let maps = format!("{all}, memory of the maps");
    verdicts.push(at_most(&maps, maps_bytes, MAPS));
    verdicts.extend(lines.iter().flat_map(of_very_many));
    let measured = Measured {
        times,
        resident_bytes,
        maps_bytes,
        lines,
    };
    (measured, verdicts)
}

/// Returns the verdicts on a variant of the large case; empty for rules, which have no target.
fn of_very_many(line: &Line) -> Vec<Verdict> {
    let whole = match line.way {
        JSON => FROM_JSON,
        YAML => FROM_YAML,
        _ => return Vec::new(),
    };
    let (way, services) = (line.way, line.services);
    let all = format!("{services} services × {OF_EACH} endpoints, {way}");
    let write = format!("{all}, from objects to maps");
    vec![
        under(&format!("{all}, start"), line.whole_ns, whole),
        under(&write, line.write_ns, WRITTEN),
        under(&format!("{all}, work for a change"), line.work_ns, WORK),
        at_most(&format!("{all}, most memory"), line.peak_bytes, PEAK),
    ]
}

const JSON: &str = "from JSON";
const YAML: &str = "from YAML";

fn line(many: u32, way: Way, at: usize, rounds: &[Vec<Sample>]) -> Line {
    let own = || rounds.iter().map(|samples| &samples[at]);
    let pairs = || rounds.iter().map(|samples| (&samples[0], &samples[at]));
    let middle = |sample: &Sample, of: fn(&Change) -> Duration| {
        median(sample.changes.iter().map(|change| nanoseconds(of(change))))
    };
    let whole = |sample: &Sample| nanoseconds(sample.whole);
    let change = |sample: &Sample| middle(sample, |change| change.reached);
    let work = |sample: &Sample| middle(sample, |change| change.work);
    let (way, services, is_ours) = match way {
        Way::Json => (JSON, many, true),
        Way::Yaml => (YAML, many, true),
        Way::Rules(services) => ("nft -f", services, false),
    };
    let ours = |value: u64| if is_ours { value } else { 0 };
    Line {
        way,
        services,
        whole_ns: median(own().map(whole)),
        whole_to_first: median(pairs().map(|(first, own)| ratio(whole(own), whole(first)))),
        write_ns: ours(median(own().map(|sample| nanoseconds(sample.write)))),
        change_ns: median(own().map(change)),
        change_to_first: median(pairs().map(|(first, own)| ratio(change(own), change(first)))),
        work_ns: ours(median(own().map(work))),
        peak_bytes: ours(median(own().map(|sample| sample.peak))),
    }
}

fn under(what: &str, median_ns: u64, target: Duration) -> Verdict {
    Verdict::new(
        format!("{what}: median under {} ms", target.as_millis()),
        milliseconds(median_ns),
        median_ns < nanoseconds(target),
    )
}

fn at_most(what: &str, bytes: u64, target: u64) -> Verdict {
    let what = format!("{what}: at most {} MB", target / 1_000_000);
    Verdict::new(what, megabytes(bytes), bytes <= target)
}

fn text(measured: &Measured, options: &Options) -> String {
    let times = measured.times.iter().map(|times| {
        format!(
            "{}: median {}, p99 {}, longest {} of {}\n",
            times.what,
            milliseconds(times.median_ns),
            milliseconds(times.p99_ns),
            milliseconds(times.max_ns),
            times.count
        )
    });
    let memory = format!(
        "{} services: {} resident at rest, {} in maps\n",
        options.services,
        megabytes(measured.resident_bytes),
        megabytes(measured.maps_bytes)
    );
    let many = (!measured.lines.is_empty()).then(|| very_many(&measured.lines, options.starts));
    times.chain([memory]).chain(many).collect()
}

fn very_many(lines: &[Line], starts: u32) -> String {
    let table = in_columns(
        lines,
        &[
            ("", |line| line.way.to_owned()),
            ("services", |line| line.services.to_string()),
            ("whole", |line| milliseconds(line.whole_ns)),
            ("to JSON", |line| thousandths(line.whole_to_first)),
            ("to maps", |line| some(line.write_ns, milliseconds)),
            ("change", |line| milliseconds(line.change_ns)),
            ("to JSON", |line| thousandths(line.change_to_first)),
            ("work", |line| some(line.work_ns, milliseconds)),
            ("memory", |line| some(line.peak_bytes, megabytes)),
            ("", |_| String::new()),
        ],
    );
    format!(
        "medians of {starts} rounds, {OF_EACH} endpoints for each service; the daemon from its start until connects \
         show everything, nft from its start to its end\n{table}"
    )
}

/// Formats a value; returns an empty string for 0.
fn some(value: u64, text: fn(u64) -> String) -> String {
    match value {
        0 => String::new(),
        value => text(value),
    }
}

/// Formats nanoseconds as milliseconds with one decimal.
fn milliseconds(nanoseconds: u64) -> String {
    microseconds(nanoseconds / 1000).replace("µs", "ms")
}

/// Formats bytes as megabytes with one decimal.
fn megabytes(bytes: u64) -> String {
    format!("{}.{} MB", bytes / 1_000_000, bytes % 1_000_000 / 100_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_at_the_target_misses_it() {
        let sooner = CHANGED - Duration::from_millis(1);
        let times = Times::of("one".to_owned(), &[CHANGED, sooner, CHANGED]);

        let verdict = times.verdict(CHANGED);

        assert!(!verdict.met);
        assert_eq!(verdict.measured, "50.0 ms");
    }

    fn sample(whole: u64, change: u64) -> Sample {
        let (reached, work) = (Duration::from_millis(change), Duration::from_millis(change));
        Sample {
            whole: Duration::from_millis(whole),
            write: Duration::from_millis(400),
            peak: PEAK,
            changes: vec![Change { reached, work }],
        }
    }

    #[test]
    fn rules_are_compared_with_json_of_their_own_round_and_judged_by_nothing() {
        // The second round was disturbed: the times of both variants are more than doubled.
        let rounds = [
            vec![sample(900, 1), sample(1800, 50)],
            vec![sample(2000, 4), sample(4200, 200)],
            vec![sample(950, 1), sample(1900, 40)],
        ];

        let json = line(30_000, Way::Json, 0, &rounds);
        let rules = line(30_000, Way::Rules(100), 1, &rounds);

        let to_first = [rules.whole_to_first, rules.change_to_first];
        assert_eq!(to_first, [2000, 50_000]);
        assert_eq!((rules.work_ns, rules.peak_bytes), (0, 0));
        let verdicts = of_very_many(&json).into_iter();
        let met = verdicts.map(|verdict| verdict.met);
        assert!(met.eq([true, false, true, true]));
        assert!(of_very_many(&rules).is_empty());
    }
}
