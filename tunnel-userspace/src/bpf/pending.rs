//! Batched writes to the service maps, one call per batch, in a thread of their own: the owner of the
//! maps concurrently prepares the next batch.

use std::{
    io,
    panic::resume_unwind,
    sync::mpsc::{SyncSender, sync_channel},
    thread::{Builder, JoinHandle},
};

use tunnel_common::{
    service::{Backend, Front, FrontKey, Slot},
    table,
};

use super::maps::{KernelMaps, Services};
use crate::reconcile::WriteError;

/// The number of writes at which a batch is full; the writes of one port stay in one batch.
const MOST: usize = 16_384;

/// The number of batches that may wait for the thread.
const AHEAD: usize = 1;

/// The pending writes.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) batch: Batch,
    writer: Option<Writer>,
    /// The kernel's first refusal.
    pub(super) refused: Option<WriteError>,
}

/// A batch of writes, in the order in which they are made: an entry precedes those that lead to it.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) backends: Vec<(u32, Backend)>,
    pub(super) slots: Vec<(u32, Slot)>,
    pub(super) fronts: Vec<(u32, Front)>,
    pub(super) keys: Vec<(FrontKey, u32)>,
}

impl Batch {
    /// Returns true if the batch is to be written.
    pub(super) const fn is_full(&self) -> bool {
        self.len() >= MOST
    }

    const fn len(&self) -> usize {
        self.backends.len() + self.slots.len() + self.fronts.len() + self.keys.len()
    }

    fn write(&self, maps: &Services) -> Result<(), WriteError> {
        maps.be.put_many(&self.backends).1?;
        maps.slot.put_many(&self.slots).1?;
        maps.front.put_many(&self.fronts).1?;
        maps.svc.put_many(&self.keys).1
    }
}

/// The thread that writes batches, until a write is refused.
#[derive(Debug)]
struct Writer {
    batches: SyncSender<Batch>,
    thread: JoinHandle<Result<(), WriteError>>,
}

impl Writer {
    fn begin(maps: Services) -> io::Result<Self> {
        let (batches, coming) = sync_channel::<Batch>(AHEAD);
        let builder = Builder::new().name("first writes".to_owned());
        let thread =
            builder.spawn(move || coming.iter().try_for_each(|batch| batch.write(&maps)))?;
        Ok(Self { batches, thread })
    }

    /// Waits until everything is written; returns the first refusal.
    fn end(self) -> Result<(), WriteError> {
        drop(self.batches);
        let ended = self.thread.join();
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl KernelMaps {
    /// Sends the pending batch to the thread.
    pub(super) fn hand_over(&mut self) {
        let Some(pending) = &mut self.pending else {
            return;
        };
        let batch = std::mem::take(&mut pending.batch);
        // After a refusal nothing more is written: reading everything again shows the loss.
        if pending.refused.is_some() || batch.len() == 0 {
            return;
        }
        if pending.writer.is_none() {
            match Writer::begin(self.services.clone()) {
                Ok(writer) => pending.writer = Some(writer),
                Err(source) => {
                    let map = table::BE.name;
                    pending.refused = Some(WriteError { map, source });
                }
            }
        }
        if let Some(writer) = &pending.writer {
            // A thread that has ended returns its error in `end`.
            drop(writer.batches.send(batch));
        }
    }

    /// Waits until all pending writes are done; returns false if no further writes may follow, since one
    /// was refused. The end of batching returns the error.
    pub(super) fn write_held(&mut self) -> bool {
        self.hand_over();
        let Some(pending) = &mut self.pending else {
            return true;
        };
        if let Some(writer) = pending.writer.take()
            && let Err(error) = writer.end()
        {
            pending.refused.get_or_insert(error);
        }
        pending.refused.is_none()
    }
}
