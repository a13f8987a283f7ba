//! Collects each kernel's results, and renders them as tables.

use std::{
    fmt::{self, Write as _},
    time::Duration,
};

use anyhow::Result;

use super::{
    NATIVE,
    generated_table::GeneratedTable,
    kernels::ALL_SERIES,
    machine::MachineResult,
    report::{Report, Skip},
    test_durations,
    test_plan::Plan,
    verifier_costs,
};

/// The results for one kernel.
#[derive(Debug)]
pub(super) struct KernelResult {
    /// Name of the kernel's series, or `native`.
    pub(super) kernel: &'static str,
    pub(super) release: String,
    pub(super) report: Report,
    pub(super) took: Duration,
    /// True if this kernel's problems make the complete run fail.
    pub(super) is_required: bool,
    /// Problems that make the kernel fail.
    pub(super) problems: Vec<String>,
    /// Remarks that do not make anything fail.
    pub(super) notes: Vec<String>,
}

impl KernelResult {
    pub(super) fn new(kernel: &'static str, is_required: bool) -> Self {
        Self {
            kernel,
            release: "-".to_owned(),
            report: Report::default(),
            took: Duration::ZERO,
            is_required,
            problems: Vec::new(),
            notes: Vec::new(),
        }
    }

    fn verdict(&self) -> &'static str {
        if self.problems.is_empty() {
            "ok"
        } else if self.is_required {
            "FAILED"
        } else {
            "failed, not pinned"
        }
    }

    /// Adds and prints the result from a virtual machine that ran a plan on this kernel.
    pub(super) fn add(&mut self, plan: &Plan, result: MachineResult) {
        let name = plan.name;
        if !result.is_good() {
            let cause = result.cause();
            println!("== Linux {} ({name}): {cause}", self.release);
            self.problems.push(format!("{name}: {cause}"));
            for line in &result.report.lines {
                println!("    {line}");
            }
            println!("  last lines of its console:\n{}", result.console);
        }
        let boot = result.report.booted.unwrap_or_default();
        println!(
            "Linux {} ({name}): {} passed, {} failed, {} skipped in {:.0} s, booted in {boot:.1} s",
            self.release,
            result.report.passed(),
            result.report.failed.len(),
            result.report.skips.len(),
            result.took.as_secs_f32(),
        );
        if !result.is_good() && !result.report.missing_modules.is_empty() {
            println!(
                "  modules that the kernel requested but the machine lacks: {}",
                result.report.missing_modules.join(" ")
            );
        }
        let unfinished = result.report.unfinished();
        if unfinished > 0 {
            let problem = format!("{name}: {unfinished} tests did not finish");
            self.problems.push(problem);
        }
        for line in &result.faults {
            let problem = format!("{name}: the kernel reported a fault: {line}");
            self.problems.push(problem);
        }
        for module in &result.report.refused_modules {
            let problem = format!("the kernel refused the module {module}");
            self.problems.push(problem);
        }
        self.took += result.took;
        self.report.merge(result.report);
    }
}

/// The table of results in docs/kernel-support.md.
const TABLE: GeneratedTable = GeneratedTable {
    page: "docs/kernel-support.md",
    mark: "<!-- results, written by cargo xtask vm --kernel KERNEL --update -->\n",
};

/// The head of the table of results.
const HEAD: &str = "| kernel | release | passed | failed | skipped | seconds | run on |\n|---|---|---|---|---|---|---|\n";

/// Returns true if no required kernel has a problem.
pub(super) fn is_good(results: &[KernelResult]) -> bool {
    results
        .iter()
        .all(|result| result.problems.is_empty() || !result.is_required)
}

/// Writes the results of kernels without problems, and the time of the run, into the table in docs/kernel-support.md. The rows of
/// other kernels stay as they are.
pub(super) fn write(results: &[KernelResult], time: &str) -> Result<()> {
    TABLE.rewrite(|old| with_rows(old, results, time))
}

/// Returns a table of results in which the kernels without problems have new rows.
fn with_rows(old: &str, results: &[KernelResult], time: &str) -> String {
    let kernels = ALL_SERIES.iter().map(|series| series.name);
    let rows = [NATIVE].into_iter().chain(kernels).filter_map(|kernel| {
        let is_good = |it: &&KernelResult| it.kernel == kernel && it.problems.is_empty();
        let start = format!("| {kernel} |");
        let new = results.iter().find(is_good).map(|it| row(it, time));
        new.or_else(|| {
            let mut rows = old.lines();
            rows.find(|row| row.starts_with(&start)).map(str::to_owned)
        })
    });
    let rows = rows.map(|row| row + "\n");
    HEAD.to_owned() + &rows.collect::<String>()
}

fn row(result: &KernelResult, time: &str) -> String {
    let KernelResult {
        kernel,
        release,
        report,
        took,
        ..
    } = result;
    let (passed, failed) = (report.passed(), report.failed.len());
    let (skipped, seconds) = (report.skips.len(), took.as_secs());
    format!("| {kernel} | {release} | {passed} | {failed} | {skipped} | {seconds} | {time} |")
}

/// Renders all tables for the terminal.
pub(super) fn tables(results: &[KernelResult], took: Duration) -> Result<String, fmt::Error> {
    let mut text = String::new();
    let costs = results
        .iter()
        .map(|result| (result.kernel, result.report.verifier.as_slice()));
    writeln!(text, "\n{}", verifier_costs::table(costs))?;
    writeln!(text, "{}", test_durations::tables(results))?;
    write_matrix(&mut text, results)?;
    writeln!(text, "all kernels: {:.0} s", took.as_secs_f32())?;
    let sum = |count: fn(&KernelResult) -> usize| results.iter().map(count).sum::<usize>();
    writeln!(
        text,
        "vm: {} passed, {} failed, {} skipped; {} problems, {} of them on an unpinned kernel",
        sum(|result| result.report.passed()),
        sum(|result| result.report.failed.len()),
        sum(|result| result.report.skips.len()),
        sum(|result| result.problems.len()),
        sum(|result| if result.is_required {
            0
        } else {
            result.problems.len()
        }),
    )?;
    Ok(text)
}

/// Renders a table with one row per kernel; below the table follow skips, failed tests, notes and problems.
fn write_matrix(text: &mut String, results: &[KernelResult]) -> fmt::Result {
    writeln!(
        text,
        "{:<8} {:<32} {:>8} {:>6} {:>6} {:>7} {:>8}  result",
        "kernel", "release", "programs", "passed", "failed", "skipped", "seconds"
    )?;
    for result in results {
        writeln!(
            text,
            "{:<8} {:<32} {:>8} {:>6} {:>6} {:>7} {:>8.1}  {}",
            result.kernel,
            result.release,
            result.report.verifier.len(),
            result.report.passed(),
            result.report.failed.len(),
            result.report.skips.len(),
            result.took.as_secs_f32(),
            result.verdict(),
        )?;
    }
    for result in results {
        let kernel = result.kernel;
        for Skip { test, feature } in &result.report.skips {
            writeln!(text, "  {kernel}: {test} skipped, no {feature}")?;
        }
        for test in &result.report.failed {
            writeln!(text, "  {kernel}: {test} FAILED")?;
            for line in result.report.output_of(test) {
                writeln!(text, "      {line}")?;
            }
        }
        for note in &result.notes {
            writeln!(text, "  {kernel}: {note}")?;
        }
        for problem in &result.problems {
            writeln!(text, "  {kernel}: {problem}")?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_rows_of_kernels_without_problems_are_replaced() {
        let result = |kernel, problems: &[&str]| KernelResult {
            problems: problems.iter().map(|it| (*it).to_owned()).collect(),
            ..KernelResult::new(kernel, true)
        };
        let row = |kernel, time| row(&result(kernel, &[]), time) + "\n";
        let table = |rows: &[String]| HEAD.to_owned() + &rows.concat();
        let old = table(&[row("native", "monday"), row("6.1", "monday")]);
        let results = [
            result("5.10", &[]),
            result("6.1", &["a test failed"]),
            result("native", &[]),
        ];

        let new = with_rows(&old, &results, "tuesday");

        let rows = [
            ("native", "tuesday"),
            ("5.10", "tuesday"),
            ("6.1", "monday"),
        ];
        assert_eq!(new, table(&rows.map(|(kernel, time)| row(kernel, time))));
    }
}
