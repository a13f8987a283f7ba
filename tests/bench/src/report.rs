//! The options and the report that all benchmarks have in common.

use std::{collections::BTreeMap, fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use clap::Args;
use serde::Serialize;
use tunnel_tests::{culvert_instance::InstanceSettings, environment};

/// The options that all benchmarks have in common.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct CommonOptions {
    /// The `culvert` program to measure; by default, the one in the same directory as this program.
    #[arg(long)]
    culvert: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Also write the results as JSON to this file, from which `cargo xtask bench plot` draws charts.
    #[arg(long, value_name = "FILE")]
    output: Option<PathBuf>,
    /// Fail if a target is missed.
    #[arg(long)]
    check: bool,
}

impl CommonOptions {
    /// Returns the path of the program to measure.
    pub(crate) fn program(&self) -> Result<PathBuf> {
        let given = self.culvert.as_ref();
        given.map_or_else(environment::culvert, |path| Ok(path.canonicalize()?))
    }

    /// Returns the settings for an instance that runs the program to measure.
    pub(crate) fn settings(&self) -> Result<InstanceSettings> {
        // All Services are in one namespace.
        Ok(InstanceSettings {
            namespace_share: 100,
            ..InstanceSettings::for_program(self.program()?)
        })
    }

    /// Prints the measurements and the verdicts. With `check`, a missed target is an error.
    pub(crate) fn report(
        &self,
        measured: &impl Serialize,
        text: &str,
        verdicts: &[Verdict],
    ) -> Result<()> {
        let outcome = Outcome { measured, verdicts };
        let json = serde_json::to_string_pretty(&outcome)?;
        if let Some(path) = &self.output {
            fs::write(path, &json).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if self.json {
            println!("{json}");
        } else {
            print!("{text}");
            for verdict in verdicts {
                let word = if verdict.met { "ok    " } else { "missed" };
                println!("  {word}  {}: {}", verdict.target, verdict.measured);
            }
        }
        judge(verdicts, self.check)
    }
}

#[derive(Serialize)]
struct Outcome<'a, T> {
    #[serde(flatten)]
    measured: &'a T,
    verdicts: &'a [Verdict],
}

/// A target, and the result of checking it.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Verdict {
    /// The target's description.
    pub(crate) target: String,
    /// The measured value, formatted with its unit.
    pub(crate) measured: String,
    /// True if the value meets the target.
    pub(crate) met: bool,
}

impl Verdict {
    /// Creates a verdict on a target.
    pub(crate) fn new(target: impl Into<String>, measured: impl Into<String>, met: bool) -> Self {
        Self {
            target: target.into(),
            measured: measured.into(),
            met,
        }
    }
}

/// Returns an error if `check` is set and a target was missed.
fn judge(verdicts: &[Verdict], check: bool) -> Result<()> {
    let missed = verdicts.iter().filter(|verdict| !verdict.met).count();
    let (is_good, all) = (!check || missed == 0, verdicts.len());
    ensure!(is_good, "{missed} of {all} targets are missed");
    Ok(())
}

/// Returns the median of the values: the lower of the two middle ones if there is an even number of values,
/// and 0 if there are none.
pub(crate) fn median<T: Copy + Default + Ord>(values: impl IntoIterator<Item = T>) -> T {
    let mut values: Vec<T> = values.into_iter().collect();
    values.sort_unstable();
    let middle = values.get(values.len().saturating_sub(1) / 2);
    middle.copied().unwrap_or_default()
}

/// Measures each variant once per round, in shuffled order. Each round's results are returned in the order of
/// `variants`.
pub(crate) fn run_rounds<W, T>(
    count: u32,
    variants: &[W],
    mut measure: impl FnMut(&W) -> Result<T>,
) -> Result<Vec<Vec<T>>> {
    let round = |_| {
        let mut order: Vec<_> = variants.iter().enumerate().collect();
        fastrand::shuffle(&mut order);
        let measured = order
            .into_iter()
            .map(|(at, variant)| Ok((at, measure(variant)?)));
        let measured: BTreeMap<_, _> = measured.collect::<Result<_>>()?;
        Ok(measured.into_values().collect())
    };
    (0..count).map(round).collect()
}

/// Returns the ratio of one value to another, in thousandths.
pub(crate) fn ratio(value: u64, to: u64) -> u64 {
    value.saturating_mul(1000) / to.max(1)
}

/// Returns the median of the ratios of the values of two variants, each from the same round, in thousandths.
pub(crate) fn median_ratio<T>(
    rounds: &[Vec<T>],
    value: impl Fn(&T) -> u64,
    at: usize,
    to: usize,
) -> u64 {
    let ratios = rounds
        .iter()
        .map(|results| ratio(value(&results[at]), value(&results[to])));
    median(ratios)
}

/// Formats thousandths as a decimal.
pub(crate) fn thousandths(value: u64) -> String {
    format!("{}.{:03}", value / 1000, value % 1000)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_a_value_that_occurred() {
        assert_eq!(median([3, 1, 2]), 2);
        assert_eq!(median([4, 1, 2, 3]), 2);
        assert_eq!(median::<u64>([]), 0);
    }

    #[test]
    fn a_missed_target_is_an_error_only_with_check() {
        let verdicts = [true, false].map(|met| Verdict::new("fast", "slow", met));

        judge(&verdicts, false).unwrap();
        judge(&verdicts[..1], true).unwrap();
        let error = judge(&verdicts, true).unwrap_err();
        assert_eq!(error.to_string(), "1 of 2 targets are missed");
    }
}
