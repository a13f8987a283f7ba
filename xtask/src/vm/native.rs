//! The same tests on this machine's own kernel.

use std::{
    fs::{self, File},
    time::Duration,
};

use anyhow::{Context as _, Result};
use serde_json::json;

use super::{
    cache, machine,
    report::{self, Report},
    suite::{self, Plan, Programs},
};
use crate::progress::Clock;

/// The maximum run time of one program.
const LIMIT: Duration = Duration::from_secs(suite::LIMIT);

/// Returns the release of this machine's kernel.
pub(super) fn release() -> String {
    let release = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
    release.trim().to_owned()
}

/// Runs a plan's programs.
pub(super) fn run(programs: &Programs, plan: &Plan) -> Result<Report> {
    let folder = cache::place("machines").join("native");
    fs::create_dir_all(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let skips = folder.join("skips");
    fs::write(&skips, "")?;
    let mut text = String::new();
    let mut broken = Vec::new();
    for (name, mut command) in plan.commands(programs)? {
        text.push_str(&format!("{}\n", json!({ "event": "begin", "entry": name })));
        command.env("CULVERT_SKIPS", &skips);
        let log = folder.join("output.log");
        let file = File::create(&log)?;
        command.stdout(file.try_clone()?).stderr(file);
        let child = command.spawn();
        let child = child.with_context(|| format!("cannot start {command:?}"))?;
        let clock = Clock::start();
        let ended = machine::ended(child, || Ok((clock.elapsed() >= LIMIT).then_some(())))?;
        for line in String::from_utf8_lossy(&fs::read(&log)?).lines() {
            text.push_str("| ");
            text.push_str(line);
            text.push('\n');
        }
        let program = || command.get_program().to_string_lossy().into_owned();
        match ended {
            Ok(status) if status.success() => {}
            Ok(status) => broken.push(format!("{}: {status}", program())),
            Err(()) => broken.push(format!("{}: it took too long, and was ended", program())),
        }
    }
    let mut report = Report::read(&text);
    report.is_good = broken.is_empty() && report.failed.is_empty();
    report.broken = broken;
    let noted = fs::read_to_string(&skips)?;
    report.skips = noted.lines().filter_map(report::skip).collect();
    Ok(report)
}
