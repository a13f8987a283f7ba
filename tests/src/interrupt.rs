//! Orderly exit: an interrupt first removes the laboratories of this process.

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

/// True while a signal is ending this process.
static ENDING: AtomicBool = AtomicBool::new(false);

/// Makes SIGINT, SIGTERM and SIGHUP remove the laboratories of this process before they end it. Must be
/// called before any thread is started.
pub fn clean_up_first() -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    thread::spawn(move || {
        let signal = signals.wait().unwrap_or(Signal::SIGKILL);
        ENDING.store(true, Ordering::Relaxed);
        // Remains are swept by the next laboratory.
        drop(lab::remove_own());
        let ended = signals
            .thread_unblock()
            .and_then(|()| kill(Pid::this(), signal));
        match ended {
            // The signal may be ignored, as the parent process set it.
            Ok(()) | Err(_) => process::abort(),
        }
    });
    Ok(())
}

/// Blocks for ever if a signal is ending this process, whose handler removes everything: two concurrent
/// removals would disturb each other.
pub fn leave_to_signal() {
    while ENDING.load(Ordering::Relaxed) {
        thread::park();
    }
}

/// Waits for a line or the end of standard input.
pub fn wait_for_enter() -> Result<()> {
    io::stdin()
        .read_line(&mut String::new())
        .context("cannot read standard input")?;
    Ok(())
}
