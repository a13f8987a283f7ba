//! The options of every benchmark, and its report.

use std::path::PathBuf;

use anyhow::{Result, ensure};
use clap::Args;
use serde::Serialize;
use tunnel_tests::{environment, instance::Settings, table::in_columns};

/// The options of every benchmark.
#[derive(Args, Clone, Debug, Default)]
pub(crate) struct Common {
    /// The program to measure; by default the one beside this program.
    #[arg(long)]
    culvert: Option<PathBuf>,
    /// Print JSON instead of a table.
    #[arg(long)]
    pub(crate) json: bool,
    /// Fail when a target is missed.
    #[arg(long)]
    check: bool,
}

impl Common {
    /// The program to measure.
    pub(crate) fn program(&self) -> Result<PathBuf> {
        let given = self.culvert.as_ref();
        given.map_or_else(environment::culvert, |path| Ok(path.canonicalize()?))
    }

    /// The settings of an instance of it.
    pub(crate) fn settings(&self) -> Result<Settings> {
        Ok(Settings::of(self.program()?))
    }

    /// Prints the measurements and the verdicts; with `check`, a missed target is an error.
    pub(crate) fn report(
        &self,
        measured: &impl Serialize,
        text: &str,
        verdicts: &[Verdict],
    ) -> Result<()> {
        if self.json {
            let outcome = Outcome { measured, verdicts };
            println!("{}", serde_json::to_string_pretty(&outcome)?);
        } else {
            print!("{text}");
            for Verdict {
                target,
                measured,
                met,
            } in verdicts
            {
                let word = if *met { "ok    " } else { "missed" };
                println!("  {word}  {target}: {measured}");
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

/// A target and whether it was met.
#[derive(Clone, Debug, Serialize)]
pub(crate) struct Verdict {
    /// The target in words.
    pub(crate) target: String,
    /// The measured value in words.
    pub(crate) measured: String,
    /// True if the value meets the target.
    pub(crate) met: bool,
}

/// Makes verdicts that aren't met an error if asked to.
fn judge(verdicts: &[Verdict], check: bool) -> Result<()> {
    let missed = verdicts.iter().filter(|verdict| !verdict.met).count();
    let all = verdicts.len();
    ensure!(
        !check || missed == 0,
        "{missed} of {all} targets are missed"
    );
    Ok(())
}

/// A table with a head, whose last column is empty: numbers to the right.
pub(crate) fn table<const N: usize>(
    head: [&str; N],
    lines: impl IntoIterator<Item = [String; N]>,
) -> String {
    let head = std::iter::once(head.map(str::to_owned));
    in_columns(&head.chain(lines).collect::<Vec<_>>())
}

/// The middle of some values; of an even number of them, the lower one; 0 of none.
pub(crate) fn median<T: Copy + Default + Ord>(values: impl IntoIterator<Item = T>) -> T {
    let mut values: Vec<T> = values.into_iter().collect();
    values.sort_unstable();
    let middle = values.get(values.len().saturating_sub(1) / 2);
    middle.copied().unwrap_or_default()
}

/// The numbers below `count`, shuffled: the order of the measurements in a round.
pub(crate) fn shuffled(count: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..count).collect();
    fastrand::shuffle(&mut order);
    order
}

/// A number of thousandths, as a decimal.
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
    fn a_missed_target_is_an_error_only_where_it_is_asked() {
        let verdicts = [true, false].map(|met| Verdict {
            target: "fast".to_owned(),
            measured: "slow".to_owned(),
            met,
        });

        judge(&verdicts, false).unwrap();
        judge(&verdicts[..1], true).unwrap();
        let error = judge(&verdicts, true).unwrap_err();
        assert_eq!(error.to_string(), "1 of 2 targets are missed");
    }
}
