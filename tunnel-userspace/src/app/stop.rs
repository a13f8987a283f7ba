//! SIGTERM or SIGINT.

use std::io;

use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGTERM or SIGINT.
pub(super) struct Stop {
    term: Signal,
    int: Signal,
}

impl Stop {
    pub(super) fn new() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    pub(super) async fn wait(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}
