//! Batched writes to the service maps. A separate thread writes each batch with one system call per map,
//! while the owner of the maps prepares the next batch.

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

/// The number of writes at which a batch is submitted. A batch may be larger, since it has all writes of a
/// service port.
const MOST: usize = 16_384;

/// The maximum number of batches that wait for the thread.
const AHEAD: usize = 1;

/// The pending writes: the batch that is being filled, and the thread that writes earlier batches.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) batch: Batch,
    writer: Option<Writer>,
    /// The first error of a write.
    pub(super) refused: Option<WriteError>,
}

/// A batch of writes. They are made in the order of the fields, so that an entry is written before the
/// entries that refer to it.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) backends: Vec<(u32, Backend)>,
    pub(super) slots: Vec<(u32, Slot)>,
    pub(super) fronts: Vec<(u32, Front)>,
    pub(super) keys: Vec<(FrontKey, u32)>,
}

impl Batch {
    /// Returns true if the batch is large enough to be submitted.
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

/// The thread that writes batches, until a write fails.
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

    /// Waits until all batches are written; returns the first error.
    fn end(self) -> Result<(), WriteError> {
        drop(self.batches);
        let ended = self.thread.join();
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl KernelMaps {
    /// Submits the pending batch to the thread.
    pub(super) fn hand_over(&mut self) {
        let Some(pending) = &mut self.pending else {
            return;
        };
        let batch = std::mem::take(&mut pending.batch);
        // After an error nothing more is written; reading the maps again shows which entries are missing.
        if pending.refused.is_some() || batch.len() == 0 {
            return;
        }
        if pending.writer.is_none() {
            match Writer::begin(self.services.clone()) {
                Ok(writer) => pending.writer = Some(writer),
                Err(source) => {
                    let map = table::BACKENDS.name;
                    pending.refused = Some(WriteError { map, source });
                }
            }
        }
        if let Some(writer) = &pending.writer {
            // If the thread has ended, `end` returns its error.
            drop(writer.batches.send(batch));
        }
    }

    /// Waits until all pending writes are done. Returns false if one of them failed, and no further writes
    /// may follow; [`MapWriter::flush`] returns the error.
    ///
    /// [`MapWriter::flush`]: crate::reconcile::MapWriter::flush
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
