//! Entries that were removed from the maps, until no program can still be reading them.

use std::{io, sync::Arc};

use tunnel_common::service::Set;

use super::background::Background;

/// Waits until every running program has ended.
pub trait Grace: Send + Sync {
    /// Waits for one grace period of the kernel's RCU.
    ///
    /// # Errors
    ///
    /// The kernel refused; nothing may be freed.
    fn wait(&self) -> io::Result<()>;
}

/// An entry to which no other entry leads any more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Entry {
    Front(u32),
    Slots(Set),
    Sources(Set),
    Backend(u32),
    /// The id of a service port.
    Id(u32),
}

/// Entries to which no other entry leads any more.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct Retired(pub(crate) Vec<Entry>);

/// Retired entries that wait in the background, one batch after the other.
pub(super) struct Waiting<G> {
    pub(super) grace: Arc<G>,
    batch: Background<io::Result<Retired>>,
    /// Entries that were retired while an earlier batch waits.
    held: Retired,
}

impl<G: Grace + 'static> Waiting<G> {
    pub(super) fn new(grace: G) -> Self {
        Self {
            grace: Arc::new(grace),
            batch: Background::none(),
            held: Retired::default(),
        }
    }

    /// Adds retired entries. While a batch waits, they are collected into the next batch.
    pub(super) fn add(&mut self, mut retired: Retired) {
        self.held.0.append(&mut retired.0);
        if !self.batch.is_running() && self.has_more() {
            let (batch, grace) = (std::mem::take(&mut self.held), Arc::clone(&self.grace));
            self.batch.start(move || grace.wait().map(|()| batch));
        }
    }

    /// Returns true if a batch waits.
    pub(super) const fn is_running(&self) -> bool {
        self.batch.is_running()
    }

    /// Returns true if another batch follows.
    pub(super) const fn has_more(&self) -> bool {
        !self.held.0.is_empty()
    }

    /// Waits for the grace period of the present batch, and returns the batch, which may be freed.
    /// Returns none on an error: the next start reads the maps and finds the free entries.
    pub(super) async fn freed(&mut self) -> Option<Retired> {
        let freed = self.batch.ended().await?;
        let log = |error: &_| tracing::error!(%error, "no grace period to be had");
        freed.inspect_err(log).ok()
    }
}
