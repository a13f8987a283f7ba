//! What was taken out of the maps' reach, until no program can still be reading it.

use std::{io, sync::Arc};

use tunnel_common::service::Set;

use super::background::Background;

/// Waits until every program that runs now has ended.
pub trait Grace: Send + Sync {
    /// Waits for one grace period of the kernel's RCU.
    ///
    /// # Errors
    ///
    /// The kernel refused; nothing may be freed.
    fn wait(&self) -> io::Result<()>;
}

/// An entry that nothing leads to any more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum Entry {
    Front(u32),
    Slots(Set),
    Sources(Set),
    Backend(u32),
    /// The id of a service port.
    Id(u32),
}

/// Entries that nothing leads to any more.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct Retired(pub(crate) Vec<Entry>);

/// The wait of what was retired, beside the owner of the maps: one batch after the other.
pub(super) struct Waiting<G> {
    pub(super) grace: Arc<G>,
    batch: Background<io::Result<Retired>>,
    /// Retired while an earlier batch waits.
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

    /// Lets what was retired wait. While an earlier batch does, it is held, and goes as one batch.
    pub(super) fn add(&mut self, mut retired: Retired) {
        self.held.0.append(&mut retired.0);
        if !self.batch.is_running() && self.has_more() {
            let (batch, grace) = (std::mem::take(&mut self.held), Arc::clone(&self.grace));
            self.batch.start(move || grace.wait().map(|()| batch));
        }
    }

    /// Whether a batch waits.
    pub(super) const fn is_running(&self) -> bool {
        self.batch.is_running()
    }

    /// Whether another batch is to follow.
    pub(super) const fn has_more(&self) -> bool {
        !self.held.0.is_empty()
    }

    /// The batch that waited, once no program reaches it any more. Nothing where no grace period is to be
    /// had: the next start reads the maps and finds what is free.
    pub(super) async fn freed(&mut self) -> Option<Retired> {
        let freed = self.batch.ended().await?;
        let log = |error: &_| tracing::error!(%error, "no grace period to be had");
        freed.inspect_err(log).ok()
    }
}
