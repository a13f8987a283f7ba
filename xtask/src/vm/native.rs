//! Runs the tests on this machine's own kernel.

use std::{
    fs::{self, File},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{
    download_cache,
    guest_binaries::MachinePrograms,
    machine,
    report::{self, Report},
    test_plan::{self, Plan},
};
use crate::progress::Clock;

/// Maximum run time of each program.
const MAX_RUN_TIME: Duration = Duration::from_secs(test_plan::PROGRAM_SECONDS);

/// Returns the release of this machine's kernel.
pub(super) fn release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// Runs a plan's programs.
pub(super) fn run(programs: &MachinePrograms, plan: &Plan) -> Result<Report> {
    let directory = download_cache::path("machines").join("native");
    fs::create_dir_all(&directory)
        .with_context(|| format!("cannot create {}", directory.display()))?;
    let skips = directory.join("skips");
    fs::write(&skips, "")?;
    let mut text = String::new();
    let mut failed_programs = Vec::new();
    for (name, mut command) in plan.native_commands(programs)? {
        text.push_str(&format!("{}\n", json!({ "event": "begin", "entry": name })));
        command.env("CULVERT_SKIPS", &skips);
        let log = directory.join("output.log");
        let file = File::create(&log)?;
        command.stdout(file.try_clone()?).stderr(file);
        let child = command.spawn();
        let child = child.with_context(|| format!("cannot start {command:?}"))?;
        let clock = Clock::start();
        let timed_out = || Ok((clock.elapsed() >= MAX_RUN_TIME).then_some(()));
        let result = machine::wait_or_kill(child, timed_out)?;
        for line in String::from_utf8_lossy(&fs::read(&log)?).lines() {
            text.push_str("| ");
            text.push_str(line);
            text.push('\n');
        }
        let program = command.get_program().to_string_lossy();
        match result {
            Ok(status) if status.success() => {}
            Ok(status) => failed_programs.push(format!("{program}: {status}")),
            Err(()) => failed_programs.push(format!(
                "{program}: killed after {} s",
                MAX_RUN_TIME.as_secs()
            )),
        }
    }
    let mut report = Report::parse(&text);
    report.is_good = failed_programs.is_empty() && report.failed.is_empty();
    report.failed_programs = failed_programs;
    let skips = fs::read_to_string(&skips)?;
    report.skips = skips.lines().filter_map(report::parse_skip).collect();
    Ok(report)
}
