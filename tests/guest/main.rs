//! The init process of the virtual machines that `cargo xtask vm` starts. It sets up the system, runs the
//! programs in a plan, reports their output through an I/O port, and stops the virtual machine with an exit
//! status.

mod io_ports;
mod plan;
mod system;

use std::process::ExitCode;

use anyhow::{Context as _, Result};
use serde_json::json;
use tunnel_tests::clock::Instant;

use crate::io_ports::IoPorts;

fn main() -> ExitCode {
    // The kernel also runs `/init` in place of `modprobe` when it needs a module.
    if nix::unistd::Pid::this().as_raw() != 1 {
        return system::record_missing_module();
    }
    match IoPorts::open() {
        Ok(ports) => {
            let is_passed = run(&ports).unwrap_or_else(|error| {
                ports.event(&json!({ "event": "broken", "error": format!("{error:#}") }));
                false
            });
            ports.exit(is_passed)
        }
        // Without access to the ports, nothing can be reported. The kernel panics when its init process
        // exits, and the panic counts as a failure.
        Err(_error) => ExitCode::FAILURE,
    }
}

/// Runs the plan. Returns true if all of its programs succeed.
fn run(ports: &IoPorts) -> Result<bool> {
    let start = Instant::now();
    system::mount_all().context("cannot mount the file systems")?;
    ports.event(&json!({
        "event": "booted",
        "release": system::release()?,
        "seconds": system::uptime()?,
    }));
    let modules = system::load_modules().context("cannot load the modules")?;
    ports.event(&json!({
        "event": "modules",
        "loaded": modules.loaded,
        "refused": modules.refused,
        "seconds": start.elapsed().as_secs_f64(),
    }));
    let plan = plan::read()?;
    let mut failed = 0_u32;
    for entry in &plan.entries {
        if !plan::run(entry, &plan.environment, ports)? {
            failed += 1;
        }
    }
    ports.event(&json!({
        "event": "end",
        "failed": failed,
        "entries": plan.entries.len(),
        "wanted": system::missing_modules(),
        "skips": system::skips(),
        "seconds": start.elapsed().as_secs_f64(),
    }));
    Ok(failed == 0)
}
