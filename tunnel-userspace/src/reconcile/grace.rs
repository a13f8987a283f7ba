//! What was taken out of the maps' reach, until no program can still be reading it.

use std::{io, sync::mpsc, thread};

use tokio::sync::mpsc as async_mpsc;
use tunnel_common::service::Set;

/// Waits until every program that runs now has ended.
pub trait Grace: Send {
    /// Waits for one grace period of the kernel's RCU.
    ///
    /// # Errors
    ///
    /// The kernel refused; nothing may be freed.
    fn wait(&mut self) -> io::Result<()>;
}

/// Entries that nothing leads to any more.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct Retired {
    pub(crate) fronts: Vec<u32>,
    pub(crate) slots: Vec<Set>,
    pub(crate) sources: Vec<Set>,
    pub(crate) backends: Vec<u32>,
    pub(crate) ids: Vec<u32>,
}

impl Retired {
    pub(crate) const fn is_empty(&self) -> bool {
        self.fronts.is_empty()
            && self.slots.is_empty()
            && self.sources.is_empty()
            && self.backends.is_empty()
            && self.ids.is_empty()
    }

    /// Adds what another batch holds.
    pub(crate) fn merge(&mut self, mut other: Self) {
        self.fronts.append(&mut other.fronts);
        self.slots.append(&mut other.slots);
        self.sources.append(&mut other.sources);
        self.backends.append(&mut other.backends);
        self.ids.append(&mut other.ids);
    }
}

/// The thread that waits, beside the owner of the maps: batch in, the same batch out.
pub(crate) struct Waiter {
    pub(crate) send: mpsc::SyncSender<Retired>,
    pub(crate) freed: async_mpsc::Receiver<Retired>,
}

impl Waiter {
    /// Starts the thread. It ends when the waiter is dropped.
    pub(crate) fn start(mut grace: impl Grace + 'static) -> io::Result<Self> {
        let (send, batches) = mpsc::sync_channel::<Retired>(1);
        let (done, freed) = async_mpsc::channel(1);
        thread::Builder::new().name("grace".into()).spawn(move || {
            while let Ok(batch) = batches.recv() {
                match grace.wait() {
                    Ok(()) if done.blocking_send(batch).is_ok() => {}
                    Ok(()) => break,
                    // The loop ends with this thread. The next start reads the maps and finds what
                    // is free.
                    Err(error) => {
                        tracing::error!(%error, "no grace period to be had");
                        break;
                    }
                }
            }
        })?;
        Ok(Self { send, freed })
    }
}
