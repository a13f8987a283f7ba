//! Leaving in order: an interrupt takes the laboratories of this process down first.

use std::{io, process, thread};

use anyhow::{Context as _, Result};
use nix::{
    sys::signal::{SigSet, Signal, kill},
    unistd::Pid,
};

use crate::lab;

/// From now on SIGINT, SIGTERM and SIGHUP remove the laboratories of this process before they end
/// it. To be called before any thread is started.
///
/// # Errors
///
/// When the kernel refuses.
pub fn clean_up_first() -> Result<()> {
    let mut signals = SigSet::empty();
    for signal in [Signal::SIGINT, Signal::SIGTERM, Signal::SIGHUP] {
        signals.add(signal);
    }
    signals.thread_block().context("cannot block signals")?;
    thread::spawn(move || {
        let signal = signals.wait().unwrap_or(Signal::SIGKILL);
        // What can't be removed is swept at the next start.
        drop(lab::remove_own());
        if signals
            .thread_unblock()
            .and_then(|()| kill(Pid::this(), signal))
            .is_err()
        {
            process::abort();
        }
    });
    Ok(())
}

/// Waits for a line, or the end, of standard input.
///
/// # Errors
///
/// When it can't be read.
pub fn wait_for_enter() -> Result<()> {
    io::stdin()
        .read_line(&mut String::new())
        .context("cannot read standard input")?;
    Ok(())
}
