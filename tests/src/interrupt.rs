//! Cleanup on a signal: this process's labs are removed before it exits.

use std::{
    io, process,
    sync::atomic::{AtomicBool, Ordering},
    thread,
};

use anyhow::{Context as _, Result};
use nix::{
    sys::signal::{SigSet, Signal, kill},
    unistd::Pid,
};

use crate::lab;

/// True while this process is exiting because of a signal.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT, SIGTERM and SIGHUP remove this process's labs before they end it. Must be called before any
/// other thread is created, since threads inherit the signal mask.
pub fn remove_labs_on_signal() -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    thread::spawn(move || {
        let signal = signals.wait().unwrap_or(Signal::SIGKILL);
        IS_ENDING.store(true, Ordering::Relaxed);
        // If this fails, the next lab removes what is left.
        drop(lab::remove_own_labs());
        let ended = signals
            .thread_unblock()
            .and_then(|()| kill(Pid::this(), signal));
        match ended {
            // The parent process may have started this one with the signal ignored.
            Ok(()) | Err(_) => process::abort(),
        }
    });
    Ok(())
}

/// Blocks forever if a signal is ending this process: the signal handler removes everything, and two
/// concurrent removals would get in each other's way.
pub fn block_if_ending() {
    while IS_ENDING.load(Ordering::Relaxed) {
        thread::park();
    }
}

/// Waits for a line of input or the end of standard input.
pub fn wait_for_enter() -> Result<()> {
    io::stdin()
        .read_line(&mut String::new())
        .context("cannot read standard input")?;
    Ok(())
}
