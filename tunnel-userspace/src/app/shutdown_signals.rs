//! The signals that start a graceful shutdown: SIGTERM, SIGINT and SIGHUP. SIGHUP does not reload the config,
//! because a terminal also sends it when it closes.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Receives the signals that start a graceful shutdown.
pub(super) struct ShutdownSignals {
    term: Signal,
    int: Signal,
    hangup: Signal,
}

impl ShutdownSignals {
    /// Installs the signal handlers.
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

    /// Waits for any of the signals.
    pub(super) async fn wait(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
            _ = self.hangup.recv() => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use nix::sys::signal::{self, Signal};
    use tokio::time::timeout;

    use super::*;

    /// Without a handler, the first signal would kill the test process.
    #[tokio::test]
    async fn sigterm_sigint_and_sighup_each_start_a_graceful_shutdown() {
        for sent in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
            let mut stop = ShutdownSignals::new().expect("signals");
            signal::raise(sent).expect("sent");
            let received = timeout(Duration::from_secs(10), stop.wait()).await;
            received.expect("the signal was not received");
        }
    }
}
