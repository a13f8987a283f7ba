//! Removed map entries that are waiting for an RCU grace period to end. Until it has ended, a program may
//! still be reading them.

use std::{io, sync::Arc};

use tunnel_common::service::IndexRange;

use super::background_job::BackgroundJob;

/// Waits until every BPF program that is running now has finished.
pub trait GracePeriod: Send + Sync {
    /// Waits for an RCU grace period in the kernel.
    ///
    /// # Errors
    ///
    /// Returns an error if the wait fails, in which case nothing may be freed.
    fn wait(&self) -> io::Result<()>;
}

/// A map entry that no other entry refers to any more.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(crate) enum RetiredEntry {
    Frontend(u32),
    Slots(IndexRange),
    SourceRanges(IndexRange),
    Backend(u32),
    /// The id of a service port.
    PortId(u32),
}

/// Map entries that no other entry refers to any more.
#[derive(Debug, Default, Eq, PartialEq)]
pub struct RetiredEntries(pub(crate) Vec<RetiredEntry>);

/// A queue of retired entries. One batch of them at a time waits for a grace period in the background, while
/// newly retired entries collect in the next batch.
pub(super) struct RetiredQueue<G> {
    pub(super) grace_period: Arc<G>,
    running: BackgroundJob<io::Result<RetiredEntries>>,
    /// The next batch: the entries retired since the running batch was started.
    next: RetiredEntries,
}

impl<G: GracePeriod + 'static> RetiredQueue<G> {
    pub(super) fn new(grace: G) -> Self {
        Self {
            grace_period: Arc::new(grace),
            running: BackgroundJob::idle(),
            next: RetiredEntries::default(),
        }
    }

    /// Adds retired entries to the next batch. Starts that batch if it has any entries and no other batch is
    /// running.
    pub(super) fn add(&mut self, mut retired: RetiredEntries) {
        self.next.0.append(&mut retired.0);
        if !self.running.is_running() && self.has_next() {
            let (batch, grace) = (
                std::mem::take(&mut self.next),
                Arc::clone(&self.grace_period),
            );
            self.running.start(move || grace.wait().map(|()| batch));
        }
    }

    /// Returns true if a batch is waiting for its grace period.
    pub(super) const fn is_running(&self) -> bool {
        self.running.is_running()
    }

    /// Returns true if the next batch has entries.
    pub(super) const fn has_next(&self) -> bool {
        !self.next.0.is_empty()
    }

    /// Waits for the running batch's grace period and returns the batch, which may then be freed. Returns
    /// `None` if the wait failed or its thread panicked, in which case the batch's entries stay allocated
    /// until the daemon restarts and reads the maps again. Waits forever if no batch is running.
    pub(super) async fn wait_for_batch(&mut self) -> Option<RetiredEntries> {
        let freed = self.running.wait().await?;
        let log = |error: &_| tracing::error!(%error, "cannot wait for an RCU grace period, so removed map entries are not freed");
        freed.inspect_err(log).ok()
    }
}
