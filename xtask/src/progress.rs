//! Runs steps, and reports their starts, results and durations.
#![expect(
    clippy::disallowed_types,
    reason = "there is no tokio and no paused clock here"
)]

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use clap::ValueEnum;

/// Number of output lines that are shown when a step fails.
const TAIL_LINES: usize = 40;

/// A stopwatch.
#[derive(Debug)]
pub(crate) struct Clock(Instant);

impl Clock {
    pub(crate) fn start() -> Self {
        Self(Instant::now())
    }

    pub(crate) fn elapsed(&self) -> Duration {
        self.0.elapsed()
    }
}

/// Runs a command, and shows the end of its output only if it fails.
pub(crate) fn step(label: &str, command: &mut Command) -> Result<()> {
    println!("{label} ...");
    let clock = Clock::start();
    let output = command
        .output()
        .with_context(|| format!("{label}: cannot start {command:?}"))?;
    let seconds = clock.elapsed().as_secs_f32();
    if !output.status.success() {
        let mut text = String::from_utf8_lossy(&output.stdout).into_owned();
        text.push_str(&String::from_utf8_lossy(&output.stderr));
        bail!(
            "{label} failed after {seconds:.1} s ({})\n{}",
            output.status,
            tail(&text)
        );
    }
    println!("{label}: done in {seconds:.1} s");
    Ok(())
}

/// Runs a command that prints to the terminal; returns true if it succeeds.
pub(crate) fn run_visibly(command: &mut Command) -> Result<bool> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {command:?}"))?;
    Ok(status.success())
}

/// Runs a command and discards its output; returns true if it succeeds.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// Runs a command and returns its standard output. If the command fails, the error contains its standard
/// error.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    ensure!(
        output.status.success(),
        "{} failed ({}): {}",
        command.get_program().display(),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// The result of a test tier, check or fuzz target.
#[derive(Debug)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    /// Not run, for this reason.
    LeftOut(&'static str),
}

impl From<bool> for Outcome {
    fn from(is_good: bool) -> Self {
        if is_good { Self::Passed } else { Self::Failed }
    }
}

/// A row of the summary table.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
}

/// Returns a value's name on the command line.
pub(crate) fn value_name(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Prints a heading, runs `run`, and returns the row for the summary table. An error is printed, and the row
/// counts as a failure.
pub(crate) fn run_part(name: &str, run: impl FnOnce() -> Result<Outcome>) -> Row {
    println!("== {name}");
    let clock = Clock::start();
    let outcome = run().unwrap_or_else(|error| {
        println!("{error:#}");
        Outcome::Failed
    });
    Row {
        name: name.to_owned(),
        outcome,
        took: clock.elapsed(),
    }
}

/// Prints the summary table; returns true if no row is a failure.
pub(crate) fn summarise(kind: &str, rows: &[Row]) -> bool {
    println!("\n{kind:<12} {:<8} {:>8}", "result", "seconds");
    for row in rows {
        let (word, reason) = match row.outcome {
            Outcome::Passed => ("ok", ""),
            Outcome::Failed => ("FAILED", ""),
            Outcome::LeftOut(reason) => ("left out", reason),
        };
        let line = format!(
            "{:<12} {word:<8} {:>8.1}  {reason}",
            row.name,
            row.took.as_secs_f32()
        );
        println!("{}", line.trim_end());
    }
    !rows
        .iter()
        .any(|row| matches!(row.outcome, Outcome::Failed))
}

fn tail(text: &str) -> String {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(TAIL_LINES)..].join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_failed_step_shows_the_end_of_its_output() {
        let script = "seq 1 100; echo cause >&2; exit 3";

        let error = step("count", Command::new("sh").args(["-c", script])).expect_err("exit 3");

        let text = format!("{error:#}");
        assert!(text.starts_with("count failed after"), "{text}");
        assert!(text.contains("\n62\n"), "{text}");
        assert!(!text.contains("\n61\n"), "{text}");
        assert!(text.ends_with("\n100\ncause"), "{text}");
    }

    #[test]
    fn the_error_names_a_program_that_cannot_be_started() {
        let error = step("run", &mut Command::new("/no/such/program")).expect_err("no program");

        assert!(format!("{error:#}").contains("/no/such/program"));
    }

    #[test]
    fn an_error_in_one_row_fails_the_table() {
        let rows = [
            run_part("good", || Ok(Outcome::Passed)),
            run_part("absent", || Ok(Outcome::LeftOut("needs root"))),
        ];
        assert!(summarise("part", &rows));

        let bad = [run_part("bad", || bail!("broken"))];
        assert!(!summarise("part", &bad));
    }
}
