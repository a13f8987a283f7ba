//! Writes to the service maps that wait, so that many of them go with one call.

use std::{io, os::fd::AsFd as _};

use aya::{
    Pod,
    maps::{Array, IterableMap as _, MapData},
};
use tunnel_common::{
    names,
    service::{Backend, Front, FrontKey, Slot},
};
use zerocopy::{Immutable, IntoBytes};

use super::{maps::KernelMaps, sys};
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
    /// Whether a write that waited was refused.
    pub(super) fn is_refused(&self) -> bool {
        self.held
            .as_ref()
            .is_some_and(|held| held.refused.is_some())
    }

    /// Writes what waits. What is refused is told by the end of the waiting.
    pub(super) fn write_held(&mut self) {
        let Some(held) = &mut self.held else {
            return;
        };
        if held.refused.is_some() {
            // What was refused is found by reading everything again.
            let refused = held.refused.take();
            *held = Held {
                refused,
                ..Held::default()
            };
            return;
        }
        let written = write(&self.be, names::BE, &mut held.backends)
            .and_then(|()| write(&self.slot, names::SLOT, &mut held.slots))
            .and_then(|()| write(&self.front, names::FRONT, &mut held.fronts))
            .and_then(|()| {
                let svc = self.svc.map().fd().as_fd();
                let (keys, indices) = held.keys.drain(..).unzip::<_, _, Vec<_>, Vec<_>>();
                let (_, written) = sys::write_many(svc, &keys, &indices);
                written.map_err(|source| refused(names::SVC, source))
            });
        held.refused = written.err();
    }
}

fn write<V: Pod + IntoBytes + Immutable>(
    array: &Array<MapData, V>,
    map: &'static str,
    values: &mut Vec<(u32, V)>,
) -> Result<(), WriteError> {
    let (indices, values) = values.drain(..).unzip::<_, _, Vec<_>, Vec<_>>();
    let (_, written) = sys::write_many(array.map().fd().as_fd(), &indices, &values);
    written.map_err(|source| refused(map, source))
}

const fn refused(map: &'static str, source: io::Error) -> WriteError {
    WriteError { map, source }
}
