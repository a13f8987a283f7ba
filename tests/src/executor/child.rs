//! Steps between fork and exec of a child process: the kernel kills it when its parent ends, and it may be
//! pinned to a CPU.
#![expect(
    unsafe_code,
    reason = "a closure between fork and exec needs an unsafe call"
)]

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

/// Adds these steps to a command.
pub(crate) fn add_pre_exec_steps(command: &mut Command, cpu: Option<u32>) -> Result<()> {
    let cpus = cpu.map(single_cpu).transpose()?;
    let parent = Pid::this();
    let start = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        if getppid() != parent {
            // The parent ended before the call, so the kernel sends no signal.
            return Err(Errno::ESRCH.into());
        }
        if let Some(cpus) = &cpus {
            sched_setaffinity(Pid::from_raw(0), cpus)?;
        }
        // The parent may block signals to wait for them, and a child inherits the signal mask.
        Ok(SigSet::all().thread_unblock()?)
    };
    // SAFETY: the closure only makes system calls: it allocates no memory and takes no lock.
    unsafe {
        command.pre_exec(start);
    }
    Ok(())
}

fn single_cpu(cpu: u32) -> Result<CpuSet> {
    let mut cpus = CpuSet::new();
    cpus.set(usize::try_from(cpu)?)?;
    Ok(cpus)
}
