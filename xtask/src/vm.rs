//! The kernel tests on every kernel that Culvert supports: in virtual machines, and here.

mod accel;
pub(crate) mod archive;
mod budget;
pub(crate) mod cache;
mod control;
mod costs;
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
mod results;
mod skips;
mod sources;
pub(crate) mod suite;
mod table;

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context as _, Result, bail, ensure};

use self::{
    accel::Accel,
    budget::Budget,
    fetch::Kernel,
    kernels::Line,
    machine::{Machine, Outcome},
    qemu::Qemu,
    results::Key,
    suite::{Plan, Programs, Wanted},
    table::Row,
};
use crate::{progress::Clock, setup};

/// The number of concurrent machines with one CPU.
const LANES: usize = 2;
/// The number of concurrent tests on this machine.
const NATIVE_TESTS: u32 = 4;
/// The name of this machine's own kernel.
const NATIVE: &str = "native";

/// The kernels and tests to run.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Run every test on every kernel, including the newest and this machine's own.
    #[arg(long, conflicts_with = "filter")]
    pub(crate) whole: bool,
    /// Only this kernel, or `native`; may be repeated.
    #[arg(long = "kernel", value_name = "KERNEL")]
    pub(crate) kernels: Vec<String>,
    /// Use only cached downloads.
    #[arg(long)]
    pub(crate) offline: bool,
    /// Open a shell in a machine with the kernel of --kernel.
    #[arg(long)]
    pub(crate) shell: bool,
    /// Run even if an identical run succeeded before.
    #[arg(long)]
    pub(crate) force: bool,
    /// Record the verifier's costs instead of comparing them, and the results of a complete run.
    #[arg(long)]
    pub(crate) update: bool,
    /// Only tests whose names contain one of these.
    pub(crate) filter: Vec<String>,
}

/// Runs the tests and prints the results.
pub(crate) fn run(options: &Options) -> Result<()> {
    options.check()?;
    let clock = Clock::start();
    let lines = kernels::chosen(&options.kernels, options.whole)?;
    let is_native = if options.kernels.is_empty() {
        options.whole
    } else {
        options.kernels.iter().any(|it| it == NATIVE)
    };
    setup::ensure(setup::Scope {
        network: true,
        ..setup::Scope::default()
    })?;
    println!("building static test programs ...");
    let programs = Programs::build()?;
    println!("built in {:.0} s", clock.elapsed().as_secs_f32());
    // Machines of the same names write the same files.
    let _lock = cache::lock("machines")?;
    if options.shell {
        return shell(&programs, &lines, options.offline);
    }
    let wanted = Wanted::of(&programs, &options.filter, options.whole)?;
    let mut rows: Vec<Row> = lines.iter().map(|line| row(line, options)).collect();
    let kernels = fetched(&lines, options.offline, &mut rows);
    let machines = match kernels.first() {
        Some(kernel) => Some(Machines::ready(&programs, kernel, options.offline)?),
        None => None,
    };
    let (side_by_side, alone) = (wanted.dealt(), wanted.race());
    let key = match &machines {
        Some(machines) => {
            let plans: Vec<&Plan> = side_by_side.iter().chain(&alone).collect();
            Key::of(options, machines, &kernels, &plans)?
        }
        None => None,
    };
    if let Some(key) = &key
        && !options.force
        && let Some(tables) = key.known()
    {
        println!("== not run again: nothing that decides the result has changed since it was");
        println!("{tables}\n(of that run; --force runs it again)");
        return Ok(());
    }

    let begun = Clock::start();
    if is_native && let Some(plan) = wanted.suite("tests", NATIVE_TESTS) {
        rows.insert(0, here(&programs, &plan));
    }
    if let Some(machines) = machines {
        machines.run(&kernels, &side_by_side, LANES, &mut rows);
        machines.run(&kernels, alone.as_slice(), 1, &mut rows);
    }
    judge(&mut rows, options)?;
    let tables = table::text(&rows, begun.elapsed())?;
    print!("{tables}");
    ensure!(table::is_good(&rows), "the kernel matrix failed");
    key.map_or(Ok(()), |key| key.keep(&tables))
}

impl Options {
    /// Returns true if parsers are fuzzed, too: after a complete run, on every kernel.
    pub(crate) const fn is_fuzzed(&self) -> bool {
        self.whole && !self.shell && self.kernels.is_empty() && self.filter.is_empty()
    }

    fn check(&self) -> Result<()> {
        ensure!(
            !self.update || self.filter.is_empty(),
            "--update needs all tests: name none"
        );
        Ok(())
    }
}

/// Returns the row of a line. A kernel that was requested by name is as binding as a pinned one.
fn row(line: &Line, options: &Options) -> Row {
    let is_named = options.kernels.iter().any(|name| name == line.name);
    Row::new(line.name, is_named || line.is_binding())
}

/// Finds or fetches the kernels. A missing kernel is reported in its own row.
fn fetched(lines: &[&'static Line], offline: bool, rows: &mut [Row]) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for (line, row) in lines.iter().zip(rows) {
        match fetch::ready(line, offline) {
            Ok(kernel) => {
                println!("{}", kernel.describe());
                row.release.clone_from(&kernel.release);
                if line.is_binding() && !kernel.pinned {
                    row.notes.push(format!(
                        "the pinned kernel can't be had: {} {} was in its place",
                        kernel.release, kernel.version
                    ));
                }
                kernels.push(kernel);
            }
            Err(error) => {
                println!("kernel {}: {error:#}", line.name);
                row.problems.push(format!("{error:#}"));
            }
        }
    }
    kernels
}

/// The common parts of all machines.
struct Machines {
    qemu: Qemu,
    accel: Accel,
    /// The common part of the initramfs.
    overlay: PathBuf,
}

/// The outcome of a plan, and the end of a failed first attempt.
struct Ran {
    outcome: Outcome,
    before: Option<String>,
}

impl Machines {
    /// Finds the common parts; the kernel is used to probe KVM.
    fn ready(programs: &Programs, kernel: &Kernel, offline: bool) -> Result<Self> {
        let qemu = qemu::ready(offline)?;
        println!("{}", qemu.version());
        let overlay = cache::place("machines").join("overlay.cpio");
        programs.overlay()?.write(&overlay)?;
        let mut machines = Self {
            qemu,
            accel: Accel::Emulated,
            overlay,
        };
        machines.accel = accel::chosen(&machines, kernel)?;
        Ok(machines)
    }

    fn machine<'a>(&'a self, kernel: &'a Kernel, plan: &Plan) -> Result<Machine<'a>> {
        let folder = cache::place("machines").join(format!("{}-{}", kernel.line, plan.name));
        std::fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make {}", folder.display()))?;
        let (own, whole) = (folder.join("plan.cpio"), folder.join("initramfs.cpio"));
        let mut overlay = initramfs::Overlay::default();
        overlay.add_bytes(plan.json().to_string(), "/etc/plan.json", 0o644);
        overlay.write(&own)?;
        initramfs::join(&[&kernel.base, &self.overlay, &own], &whole)?;
        Ok(Machine {
            qemu: &self.qemu,
            kernel,
            initramfs: whole,
            cpus: plan.cpus,
            accel: self.accel,
            limit: machine::LIMIT,
            folder,
        })
    }

    /// Runs each plan on each kernel, `lanes` at a time, the newest kernel first, which takes longest.
    fn run(&self, kernels: &[Kernel], plans: &[Plan], lanes: usize, rows: &mut [Row]) {
        let kernels = kernels.iter().rev();
        let each = kernels.flat_map(|kernel| plans.iter().map(move |plan| (kernel, plan)));
        let (next, rows) = (Mutex::new(each), Mutex::new(rows));
        let take = || next.lock().unwrap_or_else(PoisonError::into_inner).next();
        let lane = || {
            while let Some((kernel, plan)) = take() {
                let ran = self.run_on(kernel, plan);
                let mut rows = rows.lock().unwrap_or_else(PoisonError::into_inner);
                let Some(row) = rows.iter_mut().find(|row| row.kernel == kernel.line) else {
                    continue;
                };
                match ran {
                    Ok(Ran { outcome, before }) => {
                        row.notes.extend(before);
                        row.add(plan, outcome);
                    }
                    Err(error) => row.problems.push(format!("{}: {error:#}", plan.name)),
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..lanes {
                scope.spawn(lane);
            }
        });
    }

    /// Runs a plan in a machine. A machine that hangs or doesn't boot gets a second attempt; one that
    /// boots and ends gets none, even if tests failed.
    fn run_on(&self, kernel: &Kernel, plan: &Plan) -> Result<Ran> {
        let machine = self.machine(kernel, plan)?;
        let outcome = machine.run()?;
        if !outcome.is_to_be_repeated() {
            return Ok(Ran {
                outcome,
                before: None,
            });
        }
        let before = format!("{}: {}; it ran a second time", plan.name, outcome.why());
        println!("{}: {before}. The first time it said", kernel.line);
        for line in &outcome.report.lines {
            println!("    {line}");
        }
        println!("  and its console ended with\n{}", outcome.console);
        machine.keep_report()?;
        Ok(Ran {
            outcome: machine.run()?,
            before: Some(before),
        })
    }
}

fn shell(programs: &Programs, lines: &[&'static Line], offline: bool) -> Result<()> {
    let [line] = lines else {
        bail!("name one kernel for a shell, with --kernel");
    };
    let kernel = fetch::ready(line, offline)?;
    let machines = Machines::ready(programs, &kernel, offline)?;
    println!("a shell on Linux {}; leave it with `exit`", kernel.release);
    machines.machine(&kernel, &Plan::shell())?.show()
}

/// Runs the same programs on this machine.
fn here(programs: &Programs, suite: &Plan) -> Row {
    let clock = Clock::start();
    let mut row = Row::new(NATIVE, true);
    row.release = native::release();
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

/// Compares the results with the expected skips and the recorded costs of the verifier.
fn judge(rows: &mut [Row], options: &Options) -> Result<()> {
    let is_whole = options.filter.is_empty();
    let expected = skips::read()?;
    let mut budget = Budget::read()?;
    for row in &mut *rows {
        let is_machine = row.kernel != NATIVE;
        let skips = expected.problems(row.kernel, &row.report.skips, is_whole && is_machine);
        row.problems.extend(skips);
        if row.report.ran() == 0 {
            row.problems.push("no test ran".to_owned());
        }
        if !is_whole || !is_machine {
            continue;
        }
        let (old, limits) = budget.problems(row.kernel, &row.release, &row.report);
        row.problems.extend(limits);
        if !options.update {
            row.problems.extend(old);
        } else if row.problems.is_empty() {
            budget.take(row.kernel, &row.release, &row.report);
        }
    }
    let is_good = rows.iter().all(|row| row.problems.is_empty());
    if options.update && is_good {
        budget.write()?;
        if options.whole && options.kernels.is_empty() {
            table::write(rows, &results::moment()?)?;
            costs::write(rows)?;
        }
    } else if options.update {
        println!("something is wrong, so nothing was written");
    }
    Ok(())
}
