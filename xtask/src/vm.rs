//! `cargo xtask vm`: runs tests on every supported kernel in virtual machines, and on this machine's own
//! kernel.

mod accel;
mod apt_sources;
mod cpio;
pub(crate) mod debian_archive;
mod debian_control;
pub(crate) mod download_cache;
mod expected_skips;
mod generated_table;
pub(crate) mod guest_binaries;
mod initramfs;
mod kernel_download;
mod kernel_results;
mod kernels;
mod machine;
mod modules;
mod native;
mod qemu;
mod report;
mod result_cache;
mod test_durations;
pub(crate) mod test_plan;
mod verifier_costs;

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
    thread,
};

use anyhow::{Context as _, Result, bail, ensure};

use self::{
    accel::Accel,
    guest_binaries::MachinePrograms,
    kernel_download::Kernel,
    kernel_results::KernelResult,
    kernels::Series,
    machine::{Machine, MachineResult},
    qemu::Qemu,
    result_cache::Key,
    test_plan::{Plan, TestSelection},
    verifier_costs::VerifierCosts,
};
use crate::{progress::Clock, setup};

/// Number of single-CPU virtual machines that run concurrently.
const CONCURRENT_MACHINES: usize = 2;
/// Number of tests that run concurrently on this machine.
const CONCURRENT_NATIVE_TESTS: u32 = 4;
/// Command-line name for this machine's own kernel.
const NATIVE: &str = "native";

/// Options for `cargo xtask vm`.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct Options {
    /// Run all kernel-dependent tests on all kernels, including the newest and this machine's own.
    #[arg(long, conflicts_with = "filter")]
    pub(crate) whole: bool,
    /// Run only on this kernel, or on this machine's own (`native`); may be repeated.
    #[arg(long = "kernel", value_name = "KERNEL")]
    pub(crate) kernels: Vec<String>,
    /// Download nothing; use only cached kernels.
    #[arg(long)]
    pub(crate) offline: bool,
    /// Open a shell in a virtual machine with the kernel that --kernel names.
    #[arg(long)]
    pub(crate) shell: bool,
    /// Run even if an identical run has already succeeded.
    #[arg(long)]
    pub(crate) force: bool,
    /// Record the verifier's costs instead of comparing them; with --whole or --kernel, also record the results of
    /// kernels without problems in the documentation.
    #[arg(long)]
    pub(crate) update: bool,
    /// Run only the tests whose names contain one of these strings.
    pub(crate) filter: Vec<String>,
}

/// Runs the tests and prints the results.
pub(crate) fn run(options: &Options) -> Result<()> {
    options.check()?;
    let clock = Clock::start();
    let all_series = kernels::select(&options.kernels, options.whole)?;
    let include_native = if options.kernels.is_empty() {
        options.whole
    } else {
        options.kernels.iter().any(|name| name == NATIVE)
    };
    setup::ensure(setup::Scope {
        network: true,
        ..setup::Scope::default()
    })?;
    println!("building static test programs ...");
    let programs = MachinePrograms::build()?;
    println!("built in {:.0} s", clock.elapsed().as_secs_f32());
    // Another process would write to the same files.
    let _lock = download_cache::lock("machines")?;
    if options.shell {
        return shell(&programs, &all_series, options.offline);
    }
    let tests = TestSelection::new(&programs, &options.filter)?;
    let empty = |series: &&Series| empty_result(series, options);
    let mut results: Vec<KernelResult> = all_series.iter().map(empty).collect();
    let kernels = find_kernels(&all_series, options.offline, &mut results);
    let machines = match kernels.first() {
        Some(kernel) => Some(Machines::prepare(&programs, kernel, options.offline)?),
        None => None,
    };
    let of_kernels: Vec<(&Kernel, TestSelection)> = kernels
        .iter()
        .map(|kernel| Ok((kernel, tests_on(kernel, &tests, options)?)))
        .collect::<Result<_>>()?;
    let jobs = |plans: fn(&TestSelection) -> Vec<Plan>| -> Vec<(&Kernel, Plan)> {
        let plans = of_kernels
            .iter()
            .map(|(kernel, tests)| (*kernel, plans(tests)));
        plans
            .flat_map(|(kernel, plans)| plans.into_iter().map(move |plan| (kernel, plan)))
            .collect()
    };
    let single_cpu = jobs(TestSelection::single_cpu_plans);
    let race = jobs(|tests| tests.race_plan().into_iter().collect());
    let key = match &machines {
        Some(machines) => {
            let plans: Vec<&Plan> = single_cpu.iter().chain(&race).map(|(_, it)| it).collect();
            Key::of(options, machines, &kernels, &plans)?
        }
        None => None,
    };
    if let Some(key) = &key
        && !options.force
        && let Some(tables) = key.read_tables()
    {
        println!("== not run again: an equal run has succeeded");
        println!("{tables}\n(tables of that run; --force repeats it)");
        return Ok(());
    }

    let clock = Clock::start();
    if include_native && let Some(plan) = tests.plan("tests", CONCURRENT_NATIVE_TESTS) {
        results.insert(0, run_natively(&programs, &plan));
    }
    if let Some(machines) = machines {
        machines.run(&single_cpu, CONCURRENT_MACHINES, &mut results);
        machines.run(&race, 1, &mut results);
    }
    check_results(&mut results, options)?;
    let tables = kernel_results::tables(&results, clock.elapsed())?;
    print!("{tables}");
    ensure!(
        kernel_results::is_good(&results),
        "tests failed on a kernel; the problems are listed below the table"
    );
    key.map_or(Ok(()), |key| key.store_tables(&tables))
}

impl Options {
    /// Returns true if the parsers should be fuzzed after the tests, which is part of a complete run.
    pub(crate) const fn is_fuzzed(&self) -> bool {
        self.whole && !self.shell && self.kernels.is_empty() && self.filter.is_empty()
    }

    /// Returns true for the run that `.ci/run` makes for every change.
    const fn is_for_every_change(&self) -> bool {
        !self.whole && self.kernels.is_empty() && self.filter.is_empty()
    }

    fn check(&self) -> Result<()> {
        ensure!(
            !self.update || self.filter.is_empty(),
            "--update needs all tests: remove {} from the command line",
            self.filter.join(" ")
        );
        Ok(())
    }
}

/// Returns the tests for a kernel. The run for every change leaves tests out on some kernels.
fn tests_on(kernel: &Kernel, tests: &TestSelection, options: &Options) -> Result<TestSelection> {
    if options.is_for_every_change() {
        tests.in_modules(kernels::modules(kernel.series))
    } else {
        Ok(tests.clone())
    }
}

/// Returns the initial, empty result for a series. A kernel that is named on the command line is required, as
/// a pinned one is.
fn empty_result(series: &Series, options: &Options) -> KernelResult {
    let is_named = options.kernels.iter().any(|name| name == series.name);
    KernelResult::new(series.name, is_named || series.is_required())
}

/// Finds or downloads each series' kernel. A missing kernel is recorded as a problem in the series' result.
fn find_kernels(
    all_series: &[&'static Series],
    offline: bool,
    results: &mut [KernelResult],
) -> Vec<Kernel> {
    let mut kernels = Vec::new();
    for (series, result) in all_series.iter().zip(results) {
        match kernel_download::find_or_download(series, offline) {
            Ok(kernel) => {
                println!("{}", kernel.describe());
                result.release.clone_from(&kernel.release);
                if series.is_required() && !kernel.is_pinned {
                    result.notes.push(format!(
                        "the pinned kernel is not available; {} {} was used instead",
                        kernel.release, kernel.version
                    ));
                }
                kernels.push(kernel);
            }
            Err(error) => {
                println!("kernel {}: {error:#}", series.name);
                result.problems.push(format!("{error:#}"));
            }
        }
    }
    kernels
}

/// The configuration that all virtual machines share.
struct Machines {
    qemu: Qemu,
    accel: Accel,
    /// Path of the initramfs part that contains the programs.
    overlay: PathBuf,
}

/// The result of running a plan on a kernel.
struct PlanResult {
    result: MachineResult,
    /// A description of the first attempt, if that attempt failed.
    first_attempt: Option<String>,
}

impl Machines {
    /// Prepares QEMU and the programs, and uses the kernel to probe KVM.
    fn prepare(programs: &MachinePrograms, kernel: &Kernel, offline: bool) -> Result<Self> {
        let qemu = qemu::find_or_download(offline)?;
        println!("{}", qemu.version());
        let overlay = download_cache::path("machines").join("overlay.cpio");
        programs.overlay()?.write(&overlay)?;
        let mut machines = Self {
            qemu,
            accel: Accel::Emulated,
            overlay,
        };
        machines.accel = accel::detect(&machines, kernel)?;
        Ok(machines)
    }

    /// Writes the initramfs for a plan on a kernel, and returns the virtual machine that will run the plan.
    fn machine<'a>(&'a self, kernel: &'a Kernel, plan: &Plan) -> Result<Machine<'a>> {
        let directory =
            download_cache::path("machines").join(format!("{}-{}", kernel.series, plan.name));
        std::fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        let (plan_part, initramfs) = (
            directory.join("plan.cpio"),
            directory.join("initramfs.cpio"),
        );
        let mut overlay = initramfs::Overlay::default();
        overlay.add_bytes(plan.json().to_string(), "/etc/plan.json", 0o644);
        overlay.write(&plan_part)?;
        initramfs::concatenate(&[&kernel.base, &self.overlay, &plan_part], &initramfs)?;
        Ok(Machine {
            qemu: &self.qemu,
            kernel,
            initramfs,
            cpus: plan.cpus,
            accel: self.accel,
            limit: machine::MAX_RUN_TIME,
            directory,
        })
    }

    /// Runs each plan on its kernel, with at most `concurrent` virtual machines at the same time. The newest
    /// kernel comes first, since it takes longest.
    fn run(&self, jobs: &[(&Kernel, Plan)], concurrent: usize, results: &mut [KernelResult]) {
        let jobs = jobs.iter().rev();
        let (jobs, results) = (Mutex::new(jobs), Mutex::new(results));
        let next_job = || jobs.lock().unwrap_or_else(PoisonError::into_inner).next();
        let work = || {
            while let Some((kernel, plan)) = next_job() {
                let plan_result = self.run_on(kernel, plan);
                let mut results = results.lock().unwrap_or_else(PoisonError::into_inner);
                let mut all = results.iter_mut();
                let Some(of_kernel) = all.find(|result| result.kernel == kernel.series) else {
                    continue;
                };
                match plan_result {
                    Ok(PlanResult {
                        result,
                        first_attempt,
                    }) => {
                        of_kernel.notes.extend(first_attempt);
                        of_kernel.add(plan, result);
                    }
                    Err(error) => of_kernel.problems.push(format!("{}: {error:#}", plan.name)),
                }
            }
        };
        thread::scope(|scope| {
            for _ in 0..concurrent {
                scope.spawn(work);
            }
        });
    }

    /// Runs a plan on a kernel. If the virtual machine hangs or does not boot, it gets a second attempt. If
    /// it boots and exits, it does not, even if tests failed.
    fn run_on(&self, kernel: &Kernel, plan: &Plan) -> Result<PlanResult> {
        let machine = self.machine(kernel, plan)?;
        let result = machine.run()?;
        if !result.should_retry() {
            return Ok(PlanResult {
                result,
                first_attempt: None,
            });
        }
        let first_attempt = format!("{}: {}; it ran a second time", plan.name, result.cause());
        println!(
            "{}: {first_attempt}. Output of the first run:",
            kernel.series
        );
        for line in &result.report.lines {
            println!("    {line}");
        }
        println!("  last lines of its console:\n{}", result.console);
        machine.rename_logs()?;
        Ok(PlanResult {
            result: machine.run()?,
            first_attempt: Some(first_attempt),
        })
    }
}

/// Opens a shell in a virtual machine with the kernel of the given series, of which there must be exactly
/// one.
fn shell(programs: &MachinePrograms, all_series: &[&'static Series], offline: bool) -> Result<()> {
    let [series] = all_series else {
        bail!("--shell needs exactly one kernel: name it with --kernel");
    };
    let kernel = kernel_download::find_or_download(series, offline)?;
    let machines = Machines::prepare(programs, &kernel, offline)?;
    println!("a shell on Linux {}; leave it with `exit`", kernel.release);
    machines.machine(&kernel, &Plan::shell())?.run_on_terminal()
}

/// Runs a plan on this machine's own kernel.
fn run_natively(programs: &MachinePrograms, plan: &Plan) -> KernelResult {
    let clock = Clock::start();
    let mut result = KernelResult::new(NATIVE, true);
    result.release = native::release();
    match native::run(programs, plan) {
        Ok(report) => {
            if !report.is_good {
                result.problems.push(report.failed_programs.join("; "));
                for line in &report.lines {
                    println!("    {line}");
                }
            }
            result.report = report;
        }
        Err(error) => result.problems.push(format!("{error:#}")),
    }
    result.took = clock.elapsed();
    println!(
        "this machine, Linux {}: {} passed, {} failed, {} skipped in {:.0} s",
        result.release,
        result.report.passed(),
        result.report.failed.len(),
        result.report.skips.len(),
        result.took.as_secs_f32(),
    );
    result
}

/// Compares the results with the expected skips and the recorded verifier costs, and adds the problems that
/// it finds. With `--update`, it records the costs instead.
fn check_results(results: &mut [KernelResult], options: &Options) -> Result<()> {
    let has_all_tests = options.filter.is_empty();
    let expected_skips = expected_skips::read()?;
    let mut recorded_costs = VerifierCosts::read()?;
    for result in &mut *results {
        let is_complete = has_all_tests && result.kernel != NATIVE;
        let runs_all = is_complete && !options.is_for_every_change();
        let skips = &result.report.skips;
        let skips = expected_skips.problems(result.kernel, skips, runs_all);
        result.problems.extend(skips);
        if result.report.finished() == 0 {
            result.problems.push("no test ran".to_owned());
        }
        if !is_complete {
            continue;
        }
        let (differences, too_large) =
            recorded_costs.problems(result.kernel, &result.release, &result.report);
        result.problems.extend(too_large);
        if !options.update {
            result.problems.extend(differences);
        } else if result.problems.is_empty() {
            recorded_costs.record(result.kernel, &result.release, &result.report);
        }
    }
    if options.update && !options.is_for_every_change() {
        kernel_results::write(results, &result_cache::time_and_commit()?)?;
    }
    let is_good = results.iter().all(|result| result.problems.is_empty());
    if options.update && is_good {
        recorded_costs.write()?;
    } else if options.update {
        println!("--update recorded no costs, since there are problems");
    }
    Ok(())
}
