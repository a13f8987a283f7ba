//! Measures how long it takes until connections reflect a change to a manifest, as observed by connect()
//! rather than as reported by the daemon. For comparison, it measures how long `nft -f` takes to load rules
//! like kube-proxy's, not counting the work that kube-proxy itself does before that.

use std::time::Duration;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use tunnel_tests::{
    load::{nanoseconds, percentile},
    table::{format_table, microseconds},
};

use self::{
    large_case::{ENDPOINTS_PER_SERVICE, Sample, Variant},
    probe::Change,
    small_case::SmallCase,
};
use crate::report::{CommonOptions, Verdict, median, ratio, thousandths};

mod busy_daemon;
mod large_case;
mod probe;
mod small_case;

/// The targets for the small case: the times for a start and for a change, and memory in bytes.
const START_TARGET: Duration = Duration::from_millis(500);
const CHANGE_TARGET: Duration = Duration::from_millis(50);
const IDLE_MEMORY_TARGET: u64 = 30_000_000;
const MAP_MEMORY_TARGET: u64 = 16_000_000;

/// The targets for the large case.
const JSON_START_TARGET: Duration = Duration::from_secs(1);
const YAML_START_TARGET: Duration = Duration::from_secs(3);
const WRITE_TARGET: Duration = Duration::from_millis(300);
const PEAK_MEMORY_TARGET: u64 = 300_000_000;
const CPU_TIME_TARGET: Duration = Duration::from_millis(5);

/// The benchmark's options.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    #[command(flatten)]
    common: CommonOptions,
    /// The number of Services in the small case.
    #[arg(long, default_value_t = 1000)]
    services: u32,
    /// The number of cold starts in the small case.
    #[arg(long, default_value_t = 5)]
    rounds: u32,
    /// The number of endpoint changes to measure.
    #[arg(long, default_value_t = 50)]
    changes: u32,
    /// The number of Services in the large case, with four endpoints each.
    #[arg(long, default_value_t = 30_000)]
    many: u32,
    /// The number of rounds in the large case; 0 skips the case.
    #[arg(long, default_value_t = 5)]
    starts: u32,
    /// The numbers of Services for which to load nftables rules like kube-proxy's; an empty list skips the
    /// rules.
    #[arg(long, num_args = 0.., value_delimiter = ',', default_value = "100,5000")]
    rules: Vec<u32>,
}

/// Statistics on measured times, in nanoseconds.
#[derive(Clone, Debug, Serialize)]
struct TimeStats {
    what: String,
    count: usize,
    median_ns: u64,
    p99_ns: u64,
    max_ns: u64,
}

impl TimeStats {
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
        time_verdict(&self.what, self.median_ns, target)
    }
}

/// The medians for one variant of the large case.
#[derive(Clone, Debug, Serialize)]
struct Medians {
    #[serde(rename = "way")]
    variant: &'static str,
    services: u32,
    whole_ns: u64,
    /// The ratio of `whole_ns` to the first line's, in thousandths: the median of all rounds' ratios.
    whole_to_first: u64,
    /// The time from when the objects have been parsed until the maps are complete; 0 for nftables rules.
    write_ns: u64,
    change_ns: u64,
    change_to_first: u64,
    /// The daemon's CPU time per change; 0 for nftables rules.
    work_ns: u64,
    /// The daemon's peak resident memory; 0 for nftables rules.
    peak_bytes: u64,
}

#[derive(Serialize)]
struct Measurements {
    times: Vec<TimeStats>,
    /// An idle daemon's resident memory, and the kernel memory of its maps.
    resident_bytes: u64,
    maps_bytes: u64,
    lines: Vec<Medians>,
}

/// Runs the benchmark and prints the results. With `check`, a missed target is an error.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut variants = vec![Variant::Json, Variant::Yaml];
    variants.extend(options.rules.iter().copied().map(Variant::Rules));
    let small_case = small_case::measure(options)?;
    let busy_daemon = busy_daemon::measure(options)?;
    let rounds = large_case::measure(options, &variants)?;
    let variants = variants.iter().enumerate().filter(|_| !rounds.is_empty());
    let lines = variants.map(|(at, variant)| medians(options.many, *variant, at, &rounds));
    let (measured, verdicts) = summarise(options, &small_case, busy_daemon, lines.collect());
    let text = text(&measured, options);
    options.common.report(&measured, &text, &verdicts)
}

fn summarise(
    options: &Options,
    small_case: &SmallCase,
    busy_daemon: [TimeStats; 4],
    lines: Vec<Medians>,
) -> (Measurements, Vec<Verdict>) {
    let all = format!("{} services", options.services);
    let change =
        |of: fn(&Change) -> Duration| small_case.changes.iter().map(of).collect::<Vec<_>>();
    let (mut times, mut verdicts) = (Vec::new(), Vec::new());
    let mut judge = |what: &str, measured: &[Duration], target| {
        let measured = TimeStats::of(what.to_owned(), measured);
        verdicts.push(measured.verdict(target));
        times.push(measured);
    };
    let appear = format!("{all} × 3 endpoints, from the");
    let from_rename = format!("{appear} rename of their file");
    judge(&from_rename, &small_case.from_rename, START_TARGET);
    let from_start = format!("{appear} start of the daemon");
    judge(&from_start, &small_case.from_start, START_TARGET);
    let (delay, cpu_time) = (change(|it| it.delay), change(|it| it.cpu_time));
    let one = "one endpoint, from the rename of its slice";
    judge(one, &delay, CHANGE_TARGET);
    judge(
        "one endpoint, CPU time of the daemon",
        &cpu_time,
        CPU_TIME_TARGET,
    );
    verdicts.extend(busy_daemon::verdicts(&busy_daemon));
    times.extend(busy_daemon);
    let resident_bytes = median(small_case.resident.iter().copied());
    let maps_bytes = median(small_case.maps.iter().copied());
    let resident = format!("{all}, resident at rest");
    verdicts.push(memory_verdict(
        &resident,
        resident_bytes,
        IDLE_MEMORY_TARGET,
    ));
    let maps = format!("{all}, memory of the maps");
    verdicts.push(memory_verdict(&maps, maps_bytes, MAP_MEMORY_TARGET));
    verdicts.extend(lines.iter().flat_map(large_case_verdicts));
    let measured = Measurements {
        times,
        resident_bytes,
        maps_bytes,
        lines,
    };
    (measured, verdicts)
}

/// Returns the verdicts on a variant of the large case. There are none for nftables rules, which have no
/// targets.
fn large_case_verdicts(medians: &Medians) -> Vec<Verdict> {
    let total = match medians.variant {
        JSON => JSON_START_TARGET,
        YAML => YAML_START_TARGET,
        _ => return Vec::new(),
    };
    let (variant, services) = (medians.variant, medians.services);
    let all = format!("{services} services × {ENDPOINTS_PER_SERVICE} endpoints, {variant}");
    let write = format!("{all}, from objects to maps");
    vec![
        time_verdict(&format!("{all}, start"), medians.whole_ns, total),
        time_verdict(&write, medians.write_ns, WRITE_TARGET),
        time_verdict(
            &format!("{all}, CPU time of a change"),
            medians.work_ns,
            CPU_TIME_TARGET,
        ),
        memory_verdict(
            &format!("{all}, peak memory"),
            medians.peak_bytes,
            PEAK_MEMORY_TARGET,
        ),
    ]
}

const JSON: &str = "from JSON";
const YAML: &str = "from YAML";

fn medians(many: u32, variant: Variant, at: usize, rounds: &[Vec<Sample>]) -> Medians {
    let own = || rounds.iter().map(|samples| &samples[at]);
    let pairs = || rounds.iter().map(|samples| (&samples[0], &samples[at]));
    let median_of = |sample: &Sample, of: fn(&Change) -> Duration| {
        median(sample.changes.iter().map(|change| nanoseconds(of(change))))
    };
    let total = |sample: &Sample| nanoseconds(sample.total);
    let change = |sample: &Sample| median_of(sample, |change| change.delay);
    let cpu_time = |sample: &Sample| median_of(sample, |change| change.cpu_time);
    let (variant, services, is_ours) = match variant {
        Variant::Json => (JSON, many, true),
        Variant::Yaml => (YAML, many, true),
        Variant::Rules(services) => ("nft -f", services, false),
    };
    let ours = |value: u64| if is_ours { value } else { 0 };
    Medians {
        variant,
        services,
        whole_ns: median(own().map(total)),
        whole_to_first: median(pairs().map(|(first, own)| ratio(total(own), total(first)))),
        write_ns: ours(median(own().map(|sample| nanoseconds(sample.write)))),
        change_ns: median(own().map(change)),
        change_to_first: median(pairs().map(|(first, own)| ratio(change(own), change(first)))),
        work_ns: ours(median(own().map(cpu_time))),
        peak_bytes: ours(median(own().map(|sample| sample.peak))),
    }
}

fn time_verdict(what: &str, median_ns: u64, target: Duration) -> Verdict {
    Verdict::new(
        format!("{what}: median under {} ms", target.as_millis()),
        milliseconds(median_ns),
        median_ns < nanoseconds(target),
    )
}

fn memory_verdict(what: &str, bytes: u64, target: u64) -> Verdict {
    let what = format!("{what}: at most {} MB", target / 1_000_000);
    Verdict::new(what, megabytes(bytes), bytes <= target)
}

fn text(measured: &Measurements, options: &Options) -> String {
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
    let many =
        (!measured.lines.is_empty()).then(|| large_case_text(&measured.lines, options.starts));
    times.chain([memory]).chain(many).collect()
}

fn large_case_text(lines: &[Medians], starts: u32) -> String {
    let table = format_table(
        lines,
        &[
            ("", |medians| medians.variant.to_owned()),
            ("services", |medians| medians.services.to_string()),
            ("in effect", |medians| milliseconds(medians.whole_ns)),
            ("to JSON", |medians| thousandths(medians.whole_to_first)),
            ("to maps", |medians| {
                unless_zero(medians.write_ns, milliseconds)
            }),
            ("change", |medians| milliseconds(medians.change_ns)),
            ("to JSON", |medians| thousandths(medians.change_to_first)),
            ("CPU time", |medians| {
                unless_zero(medians.work_ns, milliseconds)
            }),
            ("peak memory", |medians| {
                unless_zero(medians.peak_bytes, megabytes)
            }),
            ("", |_| String::new()),
        ],
    );
    format!(
        "medians of {starts} rounds, {ENDPOINTS_PER_SERVICE} endpoints for each service; in effect: the daemon from its start until connects \
         show every Service, nft from its start to its end\n{table}"
    )
}

/// Formats a value; returns an empty string for 0.
fn unless_zero(value: u64, text: fn(u64) -> String) -> String {
    match value {
        0 => String::new(),
        value => text(value),
    }
}

/// Formats nanoseconds as milliseconds with one decimal place.
fn milliseconds(nanoseconds: u64) -> String {
    microseconds(nanoseconds / 1000).replace("µs", "ms")
}

/// Formats bytes as megabytes with one decimal place.
fn megabytes(bytes: u64) -> String {
    format!("{}.{} MB", bytes / 1_000_000, bytes % 1_000_000 / 100_000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_median_at_the_target_misses_it() {
        let sooner = CHANGE_TARGET - Duration::from_millis(1);
        let times = TimeStats::of("one".to_owned(), &[CHANGE_TARGET, sooner, CHANGE_TARGET]);

        let verdict = times.verdict(CHANGE_TARGET);

        assert!(!verdict.met);
        assert_eq!(verdict.measured, "50.0 ms");
    }

    fn sample(total: u64, change: u64) -> Sample {
        let (delay, cpu_time) = (Duration::from_millis(change), Duration::from_millis(change));
        Sample {
            total: Duration::from_millis(total),
            write: Duration::from_millis(400),
            peak: PEAK_MEMORY_TARGET,
            changes: vec![Change { delay, cpu_time }],
        }
    }

    #[test]
    fn rules_are_compared_with_json_of_the_same_round_and_have_no_targets() {
        // The second round was disturbed: the times of both variants more than doubled.
        let rounds = [
            vec![sample(900, 1), sample(1800, 50)],
            vec![sample(2000, 4), sample(4200, 200)],
            vec![sample(950, 1), sample(1900, 40)],
        ];

        let json = medians(30_000, Variant::Json, 0, &rounds);
        let rules = medians(30_000, Variant::Rules(100), 1, &rounds);

        let to_first = [rules.whole_to_first, rules.change_to_first];
        assert_eq!(to_first, [2000, 50_000]);
        assert_eq!((rules.work_ns, rules.peak_bytes), (0, 0));
        let verdicts = large_case_verdicts(&json).into_iter();
        let met = verdicts.map(|verdict| verdict.met);
        assert!(met.eq([true, false, true, true]));
        assert!(large_case_verdicts(&rules).is_empty());
    }
}
