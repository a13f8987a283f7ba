//! Batched writes to the service maps. A separate thread writes each batch with one system call per map,
//! while the maps' owner prepares the next batch.

use std::{
    io,
    panic::resume_unwind,
    sync::mpsc::{SyncSender, sync_channel},
    thread::{Builder, JoinHandle},
};

use tunnel_common::{
    service::{Backend, Frontend, FrontendKey, Slot},
    table,
};

use super::maps::{KernelMaps, ServiceMaps};
use crate::reconcile::WriteError;

/// The number of writes at which a batch is submitted. A batch may be larger, since all writes for a service
/// port go into the same batch.
const BATCH_SIZE: usize = 16_384;

/// The maximum number of batches that may wait for the writer thread.
const QUEUED_BATCHES: usize = 1;

/// The pending writes: the batch that is being filled, and the thread that writes earlier batches.
#[derive(Debug, Default)]
pub(super) struct BatchedWrites {
    pub(super) batch: Batch,
    writer: Option<BatchWriter>,
    /// The first error from a write.
    pub(super) error: Option<WriteError>,
}

/// A batch of writes. They are made in the order of the fields, so that an entry is written before the
/// entries that refer to it.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) backends: Vec<(u32, Backend)>,
    pub(super) slots: Vec<(u32, Slot)>,
    pub(super) frontends: Vec<(u32, Frontend)>,
    pub(super) keys: Vec<(FrontendKey, u32)>,
}

impl Batch {
    /// Returns true if the batch is large enough to be submitted.
    pub(super) const fn is_full(&self) -> bool {
        self.len() >= BATCH_SIZE
    }

    const fn len(&self) -> usize {
        self.backends.len() + self.slots.len() + self.frontends.len() + self.keys.len()
    }

    fn write(&self, maps: &ServiceMaps) -> Result<(), WriteError> {
        maps.backends.write_batch(&self.backends).1?;
        maps.slots.write_batch(&self.slots).1?;
        maps.frontends.write_batch(&self.frontends).1?;
        maps.services.write_batch(&self.keys).1
    }
}

/// The thread that writes batches until a write fails.
#[derive(Debug)]
struct BatchWriter {
    batches: SyncSender<Batch>,
    thread: JoinHandle<Result<(), WriteError>>,
}

impl BatchWriter {
    fn spawn(maps: ServiceMaps) -> io::Result<Self> {
        let (batches, queue) = sync_channel::<Batch>(QUEUED_BATCHES);
        let builder = Builder::new().name("first writes".to_owned());
        let thread =
            builder.spawn(move || queue.iter().try_for_each(|batch| batch.write(&maps)))?;
        Ok(Self { batches, thread })
    }

    /// Waits until all batches are written; returns the first error.
    fn join(self) -> Result<(), WriteError> {
        drop(self.batches);
        let ended = self.thread.join();
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl KernelMaps {
    /// Submits the pending batch to the writer thread.
    pub(super) fn submit_batch(&mut self) {
        let Some(writes) = &mut self.batched_writes else {
            return;
        };
        let batch = std::mem::take(&mut writes.batch);
        // After an error, nothing more is written; reading the maps again shows which entries are missing.
        if writes.error.is_some() || batch.len() == 0 {
            return;
        }
        if writes.writer.is_none() {
            match BatchWriter::spawn(self.service_maps.clone()) {
                Ok(writer) => writes.writer = Some(writer),
                Err(source) => {
                    let map = table::BACKENDS.name;
                    writes.error = Some(WriteError { map, source });
                }
            }
        }
        if let Some(writer) = &writes.writer {
            // If the thread has ended, `join` returns its error.
            drop(writer.batches.send(batch));
        }
    }

    /// Waits until all pending writes are done. Returns false if one of them failed; in that case no further
    /// writes may follow, and [`MapWriter::flush_batch`] returns the error.
    ///
    /// [`MapWriter::flush_batch`]: crate::reconcile::MapWriter::flush_batch
    pub(super) fn finish_batches(&mut self) -> bool {
        self.submit_batch();
        let Some(writes) = &mut self.batched_writes else {
            return true;
        };
        if let Some(writer) = writes.writer.take()
            && let Err(error) = writer.join()
        {
            writes.error.get_or_insert(error);
        }
        writes.error.is_none()
    }
}
