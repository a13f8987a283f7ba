//! The kernel tests on every kernel that Culvert supports: in virtual machines, and here.

mod archive;
mod budget;
mod cache;
mod control;
mod cpio;
mod fetch;
mod initramfs;
mod kernels;
mod machine;
mod modules;
mod native;
mod page;
mod qemu;
mod report;
mod skips;
mod sources;
mod suite;

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};

use self::{
    budget::Budget,
    fetch::Kernel,
    machine::{Machine, Outcome},
    qemu::Qemu,
    report::{Report, Skip},
    suite::{Plan, Programs},
};
use crate::{progress::Clock, setup};

/// How many machines with one CPU run at a time.
const LANES: usize = 2;
/// The name of this machine's own kernel.
const NATIVE: &str = "native";

/// What to run.
#[derive(Debug, Default)]
pub(crate) struct Options {
    /// The kernels; all and this machine's if there is none.
    pub(crate) kernels: Vec<String>,
    /// Whether to use only what was fetched before.
    pub(crate) offline: bool,
    /// Whether to open a shell in a machine instead.
    pub(crate) shell: bool,
    /// Whether to leave out what takes long.
    pub(crate) quick: bool,
    /// Whether to write down what the verifier needs, instead of comparing it.
    pub(crate) update: bool,
    /// Names of tests.
    pub(crate) filter: Vec<String>,
}

/// One line of the table.
#[derive(Debug)]
struct Row {
    kernel: &'static str,
    release: String,
    report: Report,
    took: Duration,
    /// What is wrong.
    problems: Vec<String>,
}

/// Runs the tests and prints what came of it.
pub(crate) fn run(options: &Options) -> Result<()> {
    let clock = Clock::start();
    let lines = kernels::chosen(&options.kernels)?;
    let is_native = options.kernels.is_empty() || options.kernels.iter().any(|it| it == NATIVE);
    setup::ensure(setup::Scope {
        network: true,
        ..setup::Scope::default()
    })?;
    println!("building static test programs ...");
    let programs = Programs::build()?;
    println!("built in {:.0} s", clock.elapsed().as_secs_f32());
    let qemu = qemu::ready(options.offline)?;
    println!("{}", qemu.version());
    let kernels = lines
        .iter()
        .map(|line| fetch::ready(line, options.offline))
        .collect::<Result<Vec<_>>>()?;
    for kernel in &kernels {
        println!("{}", kernel.describe());
    }
    let overlay = Parts::write(&programs)?;
    if options.shell {
        return shell(&qemu, &kernels, &overlay);
    }
    let begun = Clock::start();
    let suite = Plan::suite(&options.filter, options.quick);
    let mut rows = Vec::new();
    if is_native {
        rows.push(here(&programs, &suite));
    }
    rows.extend(machines(&qemu, &kernels, &overlay, &suite)?);
    if !options.quick {
        races(&qemu, &kernels, &overlay, (&options.filter, &mut rows))?;
    }
    judge(&mut rows, options)?;
    let is_good = print(&rows, begun.elapsed());
    ensure!(is_good, "the kernel matrix failed");
    Ok(())
}

/// The parts of an initramfs that all machines share.
struct Parts {
    overlay: PathBuf,
}

impl Parts {
    fn write(programs: &Programs) -> Result<Self> {
        let overlay = cache::place("machines").join("overlay.cpio");
        programs.overlay()?.write(&overlay)?;
        Ok(Self { overlay })
    }

    /// The whole of it for a kernel and a plan.
    fn join(&self, kernel: &Kernel, plan: &Plan, folder: &std::path::Path) -> Result<PathBuf> {
        let (own, whole) = (folder.join("plan.cpio"), folder.join("initramfs.cpio"));
        let mut overlay = initramfs::Overlay::default();
        overlay.add_bytes(plan.json().to_string(), "/etc/plan.json", 0o644);
        overlay.write(&own)?;
        initramfs::join(&[&kernel.base, &self.overlay, &own], &whole)?;
        Ok(whole)
    }
}

fn machine<'a>(
    qemu: &'a Qemu,
    kernel: &'a Kernel,
    parts: &Parts,
    plan: &Plan,
) -> Result<Machine<'a>> {
    let folder = cache::place("machines").join(format!("{}-{}", kernel.line, plan.name));
    std::fs::create_dir_all(&folder)
        .with_context(|| format!("cannot make {}", folder.display()))?;
    let initramfs = parts.join(kernel, plan, &folder)?;
    Ok(Machine {
        qemu,
        kernel,
        initramfs,
        cpus: plan.cpus,
        folder,
    })
}

fn shell(qemu: &Qemu, kernels: &[Kernel], parts: &Parts) -> Result<()> {
    let [kernel] = kernels else {
        bail!("name one kernel for a shell, with --kernel");
    };
    println!("a shell on Linux {}; leave it with `exit`", kernel.release);
    machine(qemu, kernel, parts, &Plan::shell())?.show()
}

/// Runs what needs one CPU on every kernel, side by side.
fn machines(qemu: &Qemu, kernels: &[Kernel], parts: &Parts, suite: &Plan) -> Result<Vec<Row>> {
    side_by_side(kernels, |kernel| {
        let mut row = Row::new(kernel.line, kernel.release.clone());
        row.add(suite, run_plan(qemu, kernel, parts, suite)?);
        Ok(row)
    })
}

/// Runs what needs both CPUs, one kernel after the other.
fn races(
    qemu: &Qemu,
    kernels: &[Kernel],
    parts: &Parts,
    (filter, rows): (&[String], &mut [Row]),
) -> Result<()> {
    if !filter.is_empty() && !filter.iter().any(|name| name.starts_with("race")) {
        return Ok(());
    }
    let race = Plan::race(filter);
    for kernel in kernels {
        let outcome = run_plan(qemu, kernel, parts, &race)?;
        if let Some(row) = rows.iter_mut().find(|row| row.kernel == kernel.line) {
            row.add(&race, outcome);
        }
    }
    Ok(())
}

/// Does something for each kernel, a few at a time; in the order of the kernels.
fn side_by_side(
    kernels: &[Kernel],
    work: impl Fn(&Kernel) -> Result<Row> + Sync,
) -> Result<Vec<Row>> {
    let next = Mutex::new(kernels.iter().enumerate());
    let done = Mutex::new(Vec::new());
    let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
    let lane = || {
        while let Some((index, kernel)) = take() {
            let row = work(kernel);
            let mut done = done.lock().unwrap_or_else(PoisonError::into_inner);
            done.push((index, row));
        }
    };
    thread::scope(|scope| {
        for _ in 0..LANES {
            scope.spawn(lane);
        }
    });
    let mut done = done.into_inner().unwrap_or_else(PoisonError::into_inner);
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, row)| row).collect()
}

/// Runs a plan in a machine. One that hangs is the emulator's fault as often as not, and gets a second
/// try; a test that fails never does.
fn run_plan(qemu: &Qemu, kernel: &Kernel, parts: &Parts, plan: &Plan) -> Result<Outcome> {
    let machine = machine(qemu, kernel, parts, plan)?;
    let outcome = machine.run()?;
    if !outcome.is_hung() {
        return Ok(outcome);
    }
    println!(
        "{} ({}): {}; once more. It ended with\n{}",
        kernel.line,
        plan.name,
        outcome.why(),
        outcome.console
    );
    machine.run()
}

impl Row {
    fn new(kernel: &'static str, release: String) -> Self {
        Self {
            kernel,
            release,
            report: Report::default(),
            took: Duration::ZERO,
            problems: Vec::new(),
        }
    }

    fn verdict(&self) -> &'static str {
        if self.problems.is_empty() {
            "ok"
        } else if kernels::is_binding(self.kernel) {
            "FAILED"
        } else {
            "failed, not pinned"
        }
    }

    fn add(&mut self, plan: &Plan, outcome: Outcome) {
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
        for refused in &outcome.report.refused {
            self.problems.push(format!("module {refused}"));
        }
        self.took += outcome.took;
        self.report.merge(outcome.report);
    }
}

/// The same programs on this machine.
fn here(programs: &Programs, suite: &Plan) -> Row {
    let clock = Clock::start();
    let mut row = Row::new(NATIVE, native::release());
    match native::run(programs, suite) {
        Ok(report) => {
            if !report.is_good {
                row.problems.push(report.broken.join("; "));
                for line in &report.lines {
                    println!("    {line}");
                }
            }
            row.report = report;
        }
        Err(error) => row.problems.push(format!("{error:#}")),
    }
    row.took = clock.elapsed();
    println!(
        "this machine, Linux {}: {} passed, {} failed, {} skipped in {:.0} s",
        row.release,
        row.report.passed(),
        row.report.failed.len(),
        row.report.skips.len(),
        row.took.as_secs_f32(),
    );
    row
}

/// Holds what came of it against what was expected: skips, and what the verifier needs.
fn judge(rows: &mut [Row], options: &Options) -> Result<()> {
    let is_whole = options.filter.is_empty();
    let expected = skips::read()?;
    let mut budget = Budget::read()?;
    for row in rows {
        let seen: Vec<Skip> = row.report.skips.clone();
        let is_machine = row.kernel != NATIVE;
        row.problems.extend(expected.problems(
            row.kernel,
            &seen,
            is_whole && is_machine && !options.quick,
        ));
        if !is_whole || !is_machine {
            continue;
        }
        if row.report.passed() == 0 {
            row.problems.push("no test passed".to_owned());
        }
        if options.update {
            budget.take(row.kernel, &row.release, &row.report);
        } else {
            row.problems
                .extend(budget.problems(row.kernel, &row.report.verifier));
        }
    }
    if options.update && is_whole {
        budget.write()?;
    }
    Ok(())
}

/// Prints the tables and says whether nothing is wrong.
fn print(rows: &[Row], took: Duration) -> bool {
    let measured = rows
        .iter()
        .map(|row| (row.kernel, row.report.verifier.as_slice()));
    println!("\n{}", budget::table(measured));
    println!(
        "{:<8} {:<32} {:>8} {:>6} {:>6} {:>7} {:>8}  result",
        "kernel", "release", "programs", "passed", "failed", "skipped", "seconds"
    );
    for row in rows {
        println!(
            "{:<8} {:<32} {:>8} {:>6} {:>6} {:>7} {:>8.1}  {}",
            row.kernel,
            row.release,
            row.report.verifier.len(),
            row.report.passed(),
            row.report.failed.len(),
            row.report.skips.len(),
            row.took.as_secs_f32(),
            row.verdict(),
        );
    }
    for row in rows {
        for Skip { test, feature } in &row.report.skips {
            println!("  {}: {test} skipped, no {feature}", row.kernel);
        }
        for test in &row.report.failed {
            println!("  {}: {test} FAILED", row.kernel);
        }
        for problem in &row.problems {
            println!("  {}: {problem}", row.kernel);
        }
    }
    println!("whole matrix: {:.0} s", took.as_secs_f32());
    let count = |pick: fn(&Row) -> usize| rows.iter().map(pick).sum::<usize>();
    println!(
        "vm: {} passed, {} failed, {} skipped",
        count(|row| row.report.passed()),
        count(|row| row.report.failed.len() + row.problems.len()),
        count(|row| row.report.skips.len()),
    );
    rows.iter()
        .all(|row| row.problems.is_empty() || !kernels::is_binding(row.kernel))
}
