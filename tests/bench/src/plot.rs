//! SVG bar charts of each benchmark's last run, for `docs/benchmarks.md`.

use std::{
    fmt::Write as _,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde_json::Value;

/// The options for drawing charts.
#[derive(Args, Clone, Debug)]
pub(crate) struct Options {
    /// The directory that holds each benchmark's last run, as `<bench>.json`.
    #[arg(long, value_name = "DIRECTORY")]
    runs: PathBuf,
    /// The directory to write the charts to, as `bench-<bench>.svg`.
    #[arg(long, value_name = "DIRECTORY")]
    to: PathBuf,
}

/// A bar chart, with one bar for each row of a run.
struct Chart {
    title: &'static str,
    /// The JSON pointer to the array of rows.
    rows: &'static str,
    /// The fields whose values, joined by commas, make up a row's label.
    label: &'static [&'static str],
    /// The field that holds the value.
    value: &'static str,
    unit: &'static str,
    /// The number that values are divided by.
    divisor: u32,
}

/// The charts to draw for each benchmark.
const CHARTS: [(&str, &[Chart]); 5] = [
    (
        "connect",
        &[Chart {
            title: "Connect through a Service: median time above a direct connect",
            rows: "/lines",
            label: &["variant"],
            value: "p50_over_direct_ns",
            unit: "µs",
            divisor: 1_000,
        }],
    ),
    (
        "program",
        &[
            Chart {
                title: "From the start until all Services are in effect",
                rows: "/lines",
                label: &["way", "services"],
                value: "whole_ns",
                unit: "ms",
                divisor: 1_000_000,
            },
            Chart {
                title: "From the change of one endpoint until it is in effect",
                rows: "/lines",
                label: &["way", "services"],
                value: "change_ns",
                unit: "ms",
                divisor: 1_000_000,
            },
        ],
    ),
    (
        "packet",
        &[Chart {
            title: "Time of a request from outside, median",
            rows: "/lines",
            label: &["label"],
            value: "p50_ns",
            unit: "µs",
            divisor: 1_000,
        }],
    ),
    (
        "api",
        &[
            Chart {
                title: "From the start until all Services of the API server are in effect",
                rows: "/measured",
                label: &["name"],
                value: "start_ns",
                unit: "ms",
                divisor: 1_000_000,
            },
            Chart {
                title: "From the answer to a PATCH until it is in effect, median",
                rows: "/measured",
                label: &["name"],
                value: "change_p50_ns",
                unit: "ms",
                divisor: 1_000_000,
            },
            Chart {
                title: "Resident memory",
                rows: "/measured",
                label: &["name"],
                value: "resident_bytes",
                unit: "MiB",
                divisor: 1 << 20,
            },
        ],
    ),
    (
        "tunnel",
        &[
            Chart {
                title: "Throughput of one stream",
                rows: "/lines",
                label: &["variant"],
                value: "megabytes_per_second_1",
                unit: "MB/s",
                divisor: 1,
            },
            Chart {
                title: "Round trip of 64 bytes alongside 200 stalled streams, 99th percentile",
                rows: "/lines",
                label: &["variant"],
                value: "beside_200_stalled_p99_ns",
                unit: "µs",
                divisor: 1_000,
            },
        ],
    ),
];

/// Draws the charts for every benchmark that has a saved run.
pub(crate) fn run(options: &Options) -> Result<()> {
    let mut drawn = 0;
    for (bench, charts) in CHARTS {
        let path = options.runs.join(format!("{bench}.json"));
        let run = match fs::read(&path) {
            Ok(run) => run,
            Err(error) if error.kind() == ErrorKind::NotFound => continue,
            Err(error) => return Err(error).with_context(|| format!("cannot read {path:?}")),
        };
        let run = serde_json::from_slice(&run).with_context(|| format!("{path:?} is no JSON"))?;
        let svg = draw(charts, &run).with_context(|| format!("{path:?}"))?;
        write(&options.to.join(format!("bench-{bench}.svg")), &svg)?;
        drawn += 1;
    }
    ensure!(
        drawn > 0,
        "no saved run in {:?}; type: cargo xtask bench connect",
        options.runs
    );
    Ok(())
}

fn write(path: &Path, svg: &str) -> Result<()> {
    fs::write(path, svg).with_context(|| format!("cannot write {path:?}"))?;
    println!("wrote {}", path.display());
    Ok(())
}

/// Substrings that mark a row as something that Culvert is compared with. Rows whose label contains one have
/// grey bars.
const COMPARISONS: [&str; 7] = [
    "bare",
    "direct",
    "empty",
    "iptables",
    "kube-proxy",
    "nft",
    "plain",
];

/// The widths, in pixels, of a chart, its labels and its longest bar.
const WIDTH: f64 = 760.0;
const LABELS: f64 = 190.0;
const LONGEST: f64 = 450.0;
/// The heights, in pixels, of a title and of a bar with the gap below it.
const TITLE: f64 = 34.0;
const BAR: f64 = 24.0;

/// Draws several charts, one below the other.
fn draw(charts: &[Chart], run: &Value) -> Result<String> {
    let (mut body, mut top) = (String::new(), 0.0);
    for chart in charts {
        let bars = chart.bars(run)?;
        let longest = bars.iter().map(|(_, value)| *value).fold(0.0, f64::max);
        writeln!(
            body,
            r#"<text x="4" y="{}" font-weight="bold">{} ({})</text>"#,
            top + 22.0,
            chart.title,
            chart.unit
        )?;
        top += TITLE;
        for (label, value) in &bars {
            // A measured difference can be negative; its bar then has the minimum length.
            let length = (value.max(0.0) / longest.max(f64::MIN_POSITIVE) * LONGEST).max(1.0);
            let is_comparison = COMPARISONS.iter().any(|word| label.contains(word));
            let color = if is_comparison { "#9aa4b2" } else { "#3b7dd8" };
            let middle = top + 14.0;
            writeln!(
                body,
                r#"<text x="{}" y="{middle}" text-anchor="end">{label}</text><rect x="{LABELS}" y="{top}" width="{length:.1}" height="18" fill="{color}"/><text x="{:.1}" y="{middle}">{}</text>"#,
                LABELS - 8.0,
                LABELS + length + 6.0,
                figure(*value)
            )?;
            top += BAR;
        }
    }
    let height = top + 8.0;
    Ok(format!(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {WIDTH} {height}\" \
         width=\"{WIDTH}\" height=\"{height}\" font-family=\"sans-serif\" font-size=\"13\">\n\
         <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n{body}</svg>\n"
    ))
}

impl Chart {
    /// Returns the label and value of each row of a run.
    fn bars(&self, run: &Value) -> Result<Vec<(String, f64)>> {
        let rows = run.pointer(self.rows).and_then(Value::as_array);
        let rows = rows.with_context(|| format!("no rows at {}", self.rows))?;
        let bars = rows.iter().map(|row| {
            let words = self.label.iter().map(|field| {
                let text = row[field].as_str();
                text.map_or_else(|| row[field].to_string(), str::to_owned)
            });
            let value = row[self.value].as_f64();
            let value = value.with_context(|| format!("no number {} in {row}", self.value))?;
            let label = words.collect::<Vec<_>>().join(", ");
            Ok((label, value / f64::from(self.divisor)))
        });
        bars.collect()
    }
}

/// Formats a value with at least three digits.
fn figure(value: f64) -> String {
    match value.abs() {
        100.0.. => format!("{value:.0}"),
        10.0.. => format!("{value:.1}"),
        _ => format!("{value:.2}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CHART: Chart = Chart {
        title: "Time",
        rows: "/lines",
        label: &["way", "services"],
        value: "ns",
        unit: "µs",
        divisor: 1_000,
    };

    #[test]
    fn the_longest_bar_has_the_largest_value_and_the_others_are_in_proportion() {
        let run = serde_json::json!({ "lines": [
            { "way": "nft", "services": 100, "ns": 250_000 },
            { "way": "ours", "services": 100, "ns": 25_000 },
        ]});

        let svg = draw(&[CHART], &run).unwrap();

        for part in [
            "Time (µs)",
            "nft, 100",
            r#"width="450.0""#,
            ">250<",
            "ours, 100",
            r#"width="45.0""#,
            ">25.0<",
        ] {
            assert!(svg.contains(part), "no {part} in {svg}");
        }
    }

    #[test]
    fn a_run_without_the_value_is_an_error_that_names_it() {
        let run = serde_json::json!({ "lines": [{ "way": "nft" }] });

        let error = draw(&[CHART], &run).unwrap_err();

        assert!(error.to_string().contains("no number ns"), "{error}");
    }
}
