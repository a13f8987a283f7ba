//! What was taken out of the maps' reach, until no program can still be reading it.

use std::io;

use tunnel_common::service::Set;

use super::aside::Aside;

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
pub(super) type Waiter = Aside<Retired, Retired>;

/// Starts it. Where there is no grace period to be had it ends, and the loop with it: the next start
/// reads the maps and finds what is free.
pub(super) fn start(mut grace: impl Grace + 'static) -> io::Result<Waiter> {
    Aside::start("grace", move |batch| match grace.wait() {
        Ok(()) => Some(batch),
        Err(error) => {
            tracing::error!(%error, "no grace period to be had");
            None
        }
    })
}
