//! SIGTERM, SIGINT or SIGHUP. SIGHUP, from a closing terminal or a supervisor, ends a role in order,
//! too; it does not reload the config.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// The signals that end a role in order.
pub(super) struct Stop {
    term: Signal,
    int: Signal,
    hangup: Signal,
}

impl Stop {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
            hangup: signal(SignalKind::hangup())?,
        })
    }

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

    /// An unhandled signal would end the process of the test.
    #[tokio::test]
    async fn each_signal_that_ends_a_process_is_an_orderly_stop() {
        for sent in [Signal::SIGTERM, Signal::SIGINT, Signal::SIGHUP] {
            let mut stop = Stop::new().expect("signals");
            signal::raise(sent).expect("sent");
            let heard = timeout(Duration::from_secs(10), stop.wait()).await;
            heard.expect("the signal was not heard");
        }
    }
}
