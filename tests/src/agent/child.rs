//! The start of a program: it is killed with its parent, and may be pinned to one CPU.
#![expect(unsafe_code, reason = "work between fork and exec can't be checked")]

use std::{os::unix::process::CommandExt as _, process::Command};

use anyhow::Result;
use nix::{
    errno::Errno,
    sched::{CpuSet, sched_setaffinity},
    sys::{
        prctl::set_pdeathsig,
        signal::{SigSet, Signal},
    },
    unistd::{Pid, getppid},
};

/// Adds these steps to the start of a command.
pub(crate) fn prepare(command: &mut Command, cpu: Option<u32>) -> Result<()> {
    let cpus = cpu.map(one).transpose()?;
    let parent = Pid::this();
    let start = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        if getppid() != parent {
            // The parent ended before the call, so no signal will come.
            return Err(Errno::ESRCH.into());
        }
        if let Some(cpus) = &cpus {
            sched_setaffinity(Pid::from_raw(0), cpus)?;
        }
        // Signals that the laboratory waits for are blocked in it, and the mask is inherited.
        Ok(SigSet::all().thread_unblock()?)
    };
    // SAFETY: the closure makes system calls and nothing else: no memory is allocated and no lock
    // is taken.
    unsafe {
        command.pre_exec(start);
    }
    Ok(())
}

fn one(cpu: u32) -> Result<CpuSet> {
    let mut cpus = CpuSet::new();
    cpus.set(usize::try_from(cpu)?)?;
    Ok(cpus)
}
