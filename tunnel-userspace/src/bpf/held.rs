//! Writes to the service maps that wait, so that many of them go with one call.

use aya::maps::IterableMap as _;
use tunnel_common::{
    names,
    service::{Backend, Front, FrontKey, Slot},
};

use super::maps::{KernelMaps, write_many};
use crate::reconcile::WriteError;

/// How many of them wait at most, but for those of the last port.
const MOST: usize = 16_384;

/// What waits, in the order in which it is written: what nothing leads to before what leads there.
#[derive(Debug, Default)]
pub(super) struct Held {
    pub(super) backends: Vec<(u32, Backend)>,
    pub(super) slots: Vec<(u32, Slot)>,
    pub(super) fronts: Vec<(u32, Front)>,
    pub(super) keys: Vec<(FrontKey, u32)>,
    /// What the kernel said first of those that it refused.
    pub(super) refused: Option<WriteError>,
}

impl Held {
    /// Whether no more is to wait.
    pub(super) const fn is_full(&self) -> bool {
        let (records, keys) = (self.fronts.len(), self.keys.len());
        let sets = self.backends.len().saturating_add(self.slots.len());
        records.saturating_add(keys).saturating_add(sets) >= MOST
    }
}

impl KernelMaps {
    /// Writes what waits; whether other writes may follow. What is refused is told by the end of the
    /// waiting, and found by reading everything again: nothing is written after it.
    pub(super) fn write_held(&mut self) -> bool {
        let Some(held) = &mut self.held else {
            return true;
        };
        let Held {
            backends,
            slots,
            fronts,
            keys,
            refused,
        } = std::mem::take(held);
        held.refused = refused.or_else(|| {
            let written = write_many(self.be.map(), names::BE, backends)
                .1
                .and_then(|()| write_many(self.slot.map(), names::SLOT, slots).1)
                .and_then(|()| write_many(self.front.map(), names::FRONT, fronts).1)
                .and_then(|()| write_many(self.svc.map(), names::SVC, keys).1);
            written.err()
        });
        held.refused.is_none()
    }
}
