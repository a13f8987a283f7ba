//! The steps that a child process takes between fork and exec. It makes the kernel kill it when its parent
//! exits, and may pin itself to a CPU.
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

/// Makes processes started by `command` take these steps. They are pinned to `cpu` if it is given.
pub(crate) fn add_pre_exec_steps(command: &mut Command, cpu: Option<u32>) -> Result<()> {
    let cpus = cpu.map(single_cpu).transpose()?;
    let parent = Pid::this();
    let start = move || {
        set_pdeathsig(Signal::SIGKILL)?;
        if getppid() != parent {
            // The parent exited before the death signal was set up, so the kernel won't send that signal.
            return Err(Errno::ESRCH.into());
        }
        if let Some(cpus) = &cpus {
            sched_setaffinity(Pid::from_raw(0), cpus)?;
        }
        // A child inherits its parent's signal mask, and this parent may have blocked signals in order to
        // wait for them.
        Ok(SigSet::all().thread_unblock()?)
    };
    // SAFETY: the closure only makes system calls; it neither allocates memory nor takes locks.
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
