//! Writes to the service maps that wait, so that many of them go with one call, and in a thread of their
//! own: the owner of the maps goes on with the next meanwhile.

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

/// How many of them go together at most, but for those of the last port.
const MOST: usize = 16_384;

/// How many batches the owner may be ahead of the thread.
const AHEAD: usize = 1;

/// What waits.
#[derive(Debug, Default)]
pub(super) struct Pending {
    pub(super) batch: Batch,
    writer: Option<Writer>,
    /// What the kernel said first of those that it refused.
    pub(super) refused: Option<WriteError>,
}

/// Writes that go together, in the order in which they are made: what nothing leads to before what leads
/// there.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) backends: Vec<(u32, Backend)>,
    pub(super) slots: Vec<(u32, Slot)>,
    pub(super) fronts: Vec<(u32, Front)>,
    pub(super) keys: Vec<(FrontKey, u32)>,
}

impl Batch {
    /// Whether no more is to wait.
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

/// The thread that writes, until a write is refused.
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

    /// Waits until everything is written; what was refused, if something was.
    fn end(self) -> Result<(), WriteError> {
        drop(self.batches);
        let ended = self.thread.join();
        ended.unwrap_or_else(|panic| resume_unwind(panic))
    }
}

impl KernelMaps {
    /// Hands what waits to the thread that writes it.
    pub(super) fn hand_over(&mut self) {
        let Some(pending) = &mut self.pending else {
            return;
        };
        let batch = std::mem::take(&mut pending.batch);
        // What is refused is found by reading everything again: nothing is written after it.
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
            // A thread that has ended says why in the end.
            drop(writer.batches.send(batch));
        }
    }

    /// Waits until everything that waits is written; whether other writes may follow. What was refused
    /// is told by the end of the waiting.
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
