//! Removes this process's labs when a signal ends the process.

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

/// True once a signal is ending this process.
static IS_ENDING: AtomicBool = AtomicBool::new(false);

/// Installs a handler for SIGINT, SIGTERM and SIGHUP that removes this process's labs before it ends the
/// process. Must be called before other threads are created, since threads inherit the signal mask.
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
            // This process survives the signal if its parent started it with the signal ignored.
            Ok(()) | Err(_) => process::abort(),
        }
    });
    Ok(())
}

/// Blocks forever if a signal is ending this process. The signal handler removes all labs, and a concurrent
/// removal would interfere with it.
pub fn block_if_ending() {
    while IS_ENDING.load(Ordering::Relaxed) {
        thread::park();
    }
}

/// Waits until a line of input arrives or standard input ends.
pub fn wait_for_enter() -> Result<()> {
    io::stdin()
        .read_line(&mut String::new())
        .context("cannot read standard input")?;
    Ok(())
}
