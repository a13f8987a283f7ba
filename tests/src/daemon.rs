//! A daemon under test, which can be started and stopped repeatedly. All its processes append to the same log
//! file.

use std::{
    path::PathBuf,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;

use crate::{
    executor::wire::Exit,
    log,
    sandbox::{Process, Sandbox},
};

/// The time limit for a daemon to exit.
const STOP_LIMIT: Duration = Duration::from_secs(10);

/// A daemon, running or not. It is killed on drop.
#[derive(Debug)]
pub struct Daemon {
    process: Mutex<Option<Process>>,
    log: PathBuf,
}

impl Daemon {
    /// Creates a daemon that writes to the given log file, but does not start it.
    #[must_use]
    pub fn new(log: PathBuf) -> Self {
        Self {
            process: Mutex::default(),
            log,
        }
    }

    fn process(&self) -> MutexGuard<'_, Option<Process>> {
        self.process.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts the daemon in a sandbox, but does not wait until it is ready.
    pub fn start(&self, sandbox: &Sandbox, argv: &[String]) -> Result<()> {
        let mut process = self.process();
        ensure!(process.is_none(), "the daemon is already running");
        *process = Some(sandbox.command(argv).log(log::append(&self.log)?).start()?);
        Ok(())
    }

    /// Returns the daemon's process ID, or `None` if the daemon has not been started or has been stopped.
    #[must_use]
    pub fn pid(&self) -> Option<i32> {
        self.process().as_ref().map(Process::pid)
    }

    pub fn signal(&self, signal: Signal) -> Result<()> {
        let process = self.process();
        let process = process.as_ref().context("the daemon isn't running")?;
        process.signal(signal)
    }

    /// Returns the daemon's exit status if the daemon has exited without being stopped.
    pub fn try_wait(&self) -> Result<Option<Exit>> {
        let process = self.process();
        let process = process.as_ref().context("the daemon isn't running")?;
        process.try_wait()
    }

    /// Stops the daemon with a signal. It must exit successfully, unless the signal is SIGKILL.
    pub fn stop(&self, signal: Signal) -> Result<()> {
        let process = self.process().take().context("the daemon isn't running")?;
        process.signal(signal)?;
        let exit = process.wait(STOP_LIMIT)?;
        ensure!(
            signal == Signal::SIGKILL || exit.is_success(),
            "the daemon ended with {exit:?}; the end of its log:\n{}",
            self.log_tail()
        );
        Ok(())
    }

    /// Returns the entire log.
    #[must_use]
    pub fn logs(&self) -> String {
        log::read(&self.log)
    }

    /// Returns the last lines of the log.
    pub(crate) fn log_tail(&self) -> String {
        let logs = self.logs();
        let lines: Vec<_> = logs.lines().collect();
        let last = &lines[lines.len().saturating_sub(20)..];
        last.iter().map(|line| format!("    {line}\n")).collect()
    }
}
