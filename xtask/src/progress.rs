//! Long steps report their start, their duration and, if they fail, the cause.
#![expect(
    clippy::disallowed_types,
    reason = "there is no tokio and no paused clock here"
)]

use std::{
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::ValueEnum;

/// The number of last lines of a failed step that are shown.
const TAIL: usize = 40;

/// A running clock.
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

/// Runs a step whose output is shown only if it fails.
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

/// Runs a step whose output is shown to the user.
pub(crate) fn visible(command: &mut Command) -> Result<bool> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {command:?}"))?;
    Ok(status.success())
}

/// Returns true if a program runs and succeeds; its output is dropped.
pub(crate) fn succeeds(command: &mut Command) -> bool {
    command.output().is_ok_and(|output| output.status.success())
}

/// The result of a part of `test` or `lint`.
#[derive(Debug)]
pub(crate) enum Outcome {
    Passed,
    Failed,
    LeftOut(&'static str),
}

impl From<bool> for Outcome {
    fn from(is_good: bool) -> Self {
        if is_good { Self::Passed } else { Self::Failed }
    }
}

/// One line of the table at the end.
#[derive(Debug)]
pub(crate) struct Row {
    pub(crate) name: String,
    pub(crate) outcome: Outcome,
    pub(crate) took: Duration,
}

/// Returns the word for a value on the command line.
pub(crate) fn word(value: &impl ValueEnum) -> String {
    let value = value.to_possible_value();
    value.map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Runs a part: prints a line at its start, and returns its row of the table. An error fails this part
/// alone.
pub(crate) fn part(name: &str, run: impl FnOnce() -> Result<Outcome>) -> Row {
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

/// Prints the table; returns true if nothing failed.
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
    lines[lines.len().saturating_sub(TAIL)..].join("\n")
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
    fn a_step_that_cannot_start_names_its_program() {
        let error = step("run", &mut Command::new("/no/such/program")).expect_err("no program");

        assert!(format!("{error:#}").contains("/no/such/program"));
    }

    #[test]
    fn an_error_fails_its_part_and_the_table() {
        let rows = [
            part("good", || Ok(Outcome::Passed)),
            part("absent", || Ok(Outcome::LeftOut("needs root"))),
        ];
        assert!(summarise("part", &rows));

        let bad = [part("bad", || bail!("broken"))];
        assert!(!summarise("part", &bad));
    }
}
