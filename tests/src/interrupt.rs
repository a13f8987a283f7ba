//! Leaving in order: an interrupt takes the laboratories of this process down first.

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

/// Whether a signal is ending this process.
static ENDING: AtomicBool = AtomicBool::new(false);

/// From now on SIGINT, SIGTERM and SIGHUP remove the laboratories of this process before they end
/// it. To be called before any thread is started.
pub fn clean_up_first() -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    thread::spawn(move || {
        let signal = signals.wait().unwrap_or(Signal::SIGKILL);
        ENDING.store(true, Ordering::Relaxed);
        // What can't be removed is swept at the next start.
        drop(lab::remove_own());
        let ended = signals
            .thread_unblock()
            .and_then(|()| kill(Pid::this(), signal));
        match ended {
            // Whoever started this process may have had it ignore the signal.
            Ok(()) | Err(_) => process::abort(),
        }
    });
    Ok(())
}

/// Leaves what is to be removed to the signal that is ending this process, if one is: two who remove
/// the same are in each other's way.
pub fn leave_to_signal() {
    while ENDING.load(Ordering::Relaxed) {
        thread::park();
    }
}

/// Waits for a line, or the end, of standard input.
pub fn wait_for_enter() -> Result<()> {
    io::stdin()
        .read_line(&mut String::new())
        .context("cannot read standard input")?;
    Ok(())
}
