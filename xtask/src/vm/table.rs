//! The results of each kernel, and their tables.

use std::{
    fmt::{self, Write as _},
    time::Duration,
};

use anyhow::Result;

use super::{
    budget, costs,
    machine::Outcome,
    page,
    report::{Report, Skip},
    suite::Plan,
};

/// One line of the table.
#[derive(Debug)]
pub(super) struct Row {
    pub(super) kernel: &'static str,
    pub(super) release: String,
    pub(super) report: Report,
    pub(super) took: Duration,
    /// True if its problems fail the complete run.
    pub(super) is_binding: bool,
    /// The problems that fail the kernel.
    pub(super) problems: Vec<String>,
    /// Notes that are no failures.
    pub(super) notes: Vec<String>,
}

impl Row {
    pub(super) fn new(kernel: &'static str, is_binding: bool) -> Self {
        Self {
            kernel,
            release: "-".to_owned(),
            report: Report::default(),
            took: Duration::ZERO,
            is_binding,
            problems: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn verdict(&self) -> &'static str {
        if self.problems.is_empty() {
            "ok"
        } else if self.is_binding {
            "FAILED"
        } else {
            "failed, not pinned"
        }
    }

    pub(super) fn add(&mut self, plan: &Plan, outcome: Outcome) {
        if !outcome.is_good() {
            self.problems
                .push(format!("{}: {}", plan.name, outcome.why()));
            println!(
                "== Linux {} ({}): {}",
                self.release,
                plan.name,
                outcome.why()
            );
            for line in &outcome.report.lines {
                println!("    {line}");
            }
            println!("  its console ended with\n{}", outcome.console);
        }
        let boot = outcome.report.booted.unwrap_or_default();
        println!(
            "Linux {} ({}): {} passed, {} failed, {} skipped in {:.0} s, booted in {boot:.1} s",
            self.release,
            plan.name,
            outcome.report.passed(),
            outcome.report.failed.len(),
            outcome.report.skips.len(),
            outcome.took.as_secs_f32(),
        );
        if !outcome.is_good() && !outcome.report.wanted.is_empty() {
            println!(
                "  modules that it had not: {}",
                outcome.report.wanted.join(" ")
            );
        }
        if outcome.report.lost() > 0 {
            let lost = outcome.report.lost();
            self.problems
                .push(format!("{}: {lost} tests have no outcome", plan.name));
        }
        for alarm in &outcome.alarms {
            self.problems
                .push(format!("{}: the kernel says {alarm}", plan.name));
        }
        for refused in &outcome.report.refused {
            self.problems.push(format!("module {refused}"));
        }
        self.took += outcome.took;
        self.report.merge(outcome.report);
    }
}

/// The table in the documents.
const PAGE: page::Table = page::Table {
    page: "docs/kernel-support.md",
    mark: "<!-- matrix, written by cargo xtask vm --whole --update -->\n",
};

/// Returns true if no binding row has a problem.
pub(super) fn is_good(rows: &[Row]) -> bool {
    rows.iter()
        .all(|row| row.problems.is_empty() || !row.is_binding)
}

/// Writes the result of each kernel and the time of the run into the documents.
pub(super) fn write(rows: &[Row], moment: &str) -> Result<()> {
    let mut text = format!("Run on {moment}:\n\n");
    text +=
        "| kernel | release | passed | failed | skipped | seconds |\n|---|---|---|---|---|---|\n";
    for row in rows {
        let Row {
            kernel, release, ..
        } = row;
        let (passed, failed) = (row.report.passed(), row.report.failed.len());
        let (skipped, seconds) = (row.report.skips.len(), row.took.as_secs());
        writeln!(
            text,
            "| {kernel} | {release} | {passed} | {failed} | {skipped} | {seconds} |"
        )?;
    }
    PAGE.write(&text)
}

/// Renders all tables.
pub(super) fn text(rows: &[Row], took: Duration) -> Result<String, fmt::Error> {
    let mut text = String::new();
    let measured = rows
        .iter()
        .map(|row| (row.kernel, row.report.verifier.as_slice()));
    writeln!(text, "\n{}", budget::table(measured))?;
    writeln!(text, "{}", costs::tables(rows))?;
    matrix(&mut text, rows)?;
    writeln!(text, "whole matrix: {:.0} s", took.as_secs_f32())?;
    let count = |pick: fn(&Row) -> usize| rows.iter().map(pick).sum::<usize>();
    writeln!(
        text,
        "vm: {} passed, {} failed, {} skipped; {} problems, {} of them not of a pinned kernel",
        count(|row| row.report.passed()),
        count(|row| row.report.failed.len()),
        count(|row| row.report.skips.len()),
        count(|row| row.problems.len()),
        count(|row| if row.is_binding {
            0
        } else {
            row.problems.len()
        }),
    )?;
    Ok(text)
}

/// Renders the result of each kernel, and its problems and notes below the table.
fn matrix(text: &mut String, rows: &[Row]) -> fmt::Result {
    writeln!(
        text,
        "{:<8} {:<32} {:>8} {:>6} {:>6} {:>7} {:>8}  result",
        "kernel", "release", "programs", "passed", "failed", "skipped", "seconds"
    )?;
    for row in rows {
        writeln!(
            text,
            "{:<8} {:<32} {:>8} {:>6} {:>6} {:>7} {:>8.1}  {}",
            row.kernel,
            row.release,
            row.report.verifier.len(),
            row.report.passed(),
            row.report.failed.len(),
            row.report.skips.len(),
            row.took.as_secs_f32(),
            row.verdict(),
        )?;
    }
    for row in rows {
        for Skip { test, feature } in &row.report.skips {
            writeln!(text, "  {}: {test} skipped, no {feature}", row.kernel)?;
        }
        for test in &row.report.failed {
            writeln!(text, "  {}: {test} FAILED", row.kernel)?;
            for line in row.report.said(test) {
                writeln!(text, "      {line}")?;
            }
        }
        for note in &row.notes {
            writeln!(text, "  {}: {note}", row.kernel)?;
        }
        for problem in &row.problems {
            writeln!(text, "  {}: {problem}", row.kernel)?;
        }
    }
    Ok(())
}
