//! The service maps in the kernel, and the counters.

use std::{
    io,
    os::fd::AsFd as _,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use aya::{
    Pod,
    maps::{Array, HashMap, IterableMap as _, MapData, MapError, PerCpuArray},
};
use tunnel_common::{
    reason::Reason,
    service::{Backend, Front, FrontKey, Membership, Slot, Source, Tally},
    steering::{Steered, SteeringKey},
    table,
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    conns::Conns,
    held::{Entries, Held},
    shapes::open,
    sys,
};
use crate::reconcile::{Counts, MapReader, MapWriter, ReadError, SteeringMaps, WriteError};

/// The service maps in the kernel.
pub struct KernelMaps {
    pub(super) svc: HashMap<MapData, FrontKey, u32>,
    pub(super) front: Array<MapData, Front>,
    pub(super) slot: Array<MapData, Slot>,
    pub(super) source: Array<MapData, Source>,
    pub(super) be: Array<MapData, Backend>,
    pub(super) conns: Arc<Conns>,
    pub(super) tally: Array<MapData, Tally>,
    /// What waits, while it may.
    pub(super) held: Option<Held>,
    /// Whether they were made for this, as there were none.
    pub(super) is_new: bool,
}

impl KernelMaps {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path) -> Result<Self, ReadError> {
        Self::open_with(folder, Arc::new(Conns::open(folder, &[])?))
    }

    /// The same with counts of open connections that are open already.
    pub(super) fn open_with(folder: &Path, conns: Arc<Conns>) -> Result<Self, ReadError> {
        Ok(Self {
            svc: open(folder, &table::SVC)?,
            front: open(folder, &table::FRONT)?,
            slot: open(folder, &table::SLOT)?,
            source: open(folder, &table::SOURCE)?,
            be: open(folder, &table::BE)?,
            conns,
            tally: open(folder, &table::TALLY)?,
            held: None,
            is_new: false,
        })
    }
}

impl KernelSteering {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path) -> Result<Self, ReadError> {
        Ok(Self {
            steer: open(folder, &table::STEER)?,
            steered: open(folder, &table::STEERED)?,
            host: open(folder, &table::HOST)?,
        })
    }
}

pub(super) fn to_io(error: MapError) -> io::Error {
    if let MapError::SyscallError(error) = error {
        error.io_error
    } else {
        io::Error::other(error)
    }
}

fn write<V: Pod>(
    array: &mut Array<MapData, V>,
    map: &'static str,
    index: u32,
    value: V,
) -> Result<(), WriteError> {
    array.set(index, value, 0).map_err(|error| WriteError {
        map,
        source: to_io(error),
    })
}

/// Writes values, each at its index, with one call; says how many were written, and what ended it if not
/// all.
fn write_many<V: Pod + IntoBytes + Immutable>(
    array: &Array<MapData, V>,
    map: &'static str,
    entries: impl IntoIterator<Item = (u32, V)>,
) -> (usize, Result<(), WriteError>) {
    let mut all = Entries::default();
    all.extend(entries);
    all.write(array.map().fd().as_fd(), map)
}

fn read<V: Pod>(array: &Array<MapData, V>, map: &'static str, index: u32) -> Result<V, ReadError> {
    array.get(&index, 0).map_err(|error| ReadError {
        map,
        source: to_io(error),
    })
}

fn read_all<V: Pod + FromBytes>(
    array: &Array<MapData, V>,
    map: &'static str,
    entries: u32,
) -> Result<Vec<V>, ReadError> {
    sys::array_values(array.map().fd().as_fd(), entries).map_err(|source| ReadError { map, source })
}

fn insert<K: Pod>(
    hash: &mut HashMap<MapData, K, u32>,
    map: &'static str,
    key: &K,
    index: u32,
) -> Result<(), WriteError> {
    hash.insert(key, index, 0).map_err(|error| WriteError {
        map,
        source: to_io(error),
    })
}

/// Removes a key; that it is absent is no error.
fn remove<K: Pod>(
    hash: &mut HashMap<MapData, K, u32>,
    map: &'static str,
    key: &K,
) -> Result<(), WriteError> {
    match hash.remove(key).map_err(to_io) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => Err(WriteError { map, source }),
        Ok(()) | Err(_) => Ok(()),
    }
}

fn entries<K: Pod>(
    hash: &HashMap<MapData, K, u32>,
    map: &'static str,
) -> Result<Vec<(K, u32)>, ReadError> {
    let failed = |error| ReadError {
        map,
        source: to_io(error),
    };
    hash.iter().map(|entry| entry.map_err(failed)).collect()
}

impl MapWriter for KernelMaps {
    fn write_svc(&mut self, key: &FrontKey, index: u32) -> Result<(), WriteError> {
        let Some(held) = &mut self.held else {
            return insert(&mut self.svc, table::SVC.name, key, index);
        };
        held.batch.keys.extend([(*key, index)]);
        if held.batch.is_full() {
            self.hand_over();
        }
        Ok(())
    }

    fn delete_svc(&mut self, key: &FrontKey) -> Result<(), WriteError> {
        if !self.write_held() {
            return Ok(());
        }
        remove(&mut self.svc, table::SVC.name, key)
    }

    fn write_front(&mut self, index: u32, front: &Front) -> Result<(), WriteError> {
        if let Some(held) = &mut self.held {
            held.batch.fronts.extend([(index, *front)]);
            return Ok(());
        }
        write(&mut self.front, table::FRONT.name, index, *front)
    }

    fn write_slot(&mut self, index: u32, slot: Slot) -> Result<(), WriteError> {
        write(&mut self.slot, table::SLOT.name, index, slot)
    }

    fn write_source(&mut self, index: u32, source: &Source) -> Result<(), WriteError> {
        write(&mut self.source, table::SOURCE.name, index, *source)
    }

    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError> {
        let slots = (first..).zip(slots.iter().copied());
        if let Some(held) = &mut self.held {
            held.batch.slots.extend(slots);
            return Ok(());
        }
        let (_, written) = write_many(&self.slot, table::SLOT.name, slots);
        written
    }

    fn write_backend(&mut self, index: u32, backend: &Backend) -> Result<(), WriteError> {
        write(&mut self.be, table::BE.name, index, *backend)
    }

    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>) {
        if let Some(held) = &mut self.held {
            held.batch.backends.extend(backends.iter().copied());
            return (backends.len(), Ok(()));
        }
        write_many(&self.be, table::BE.name, backends.iter().copied())
    }

    fn move_backend(&mut self, index: u32, sets: Membership) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.sets = sets)
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.state = backend.state.gone())
    }

    fn reset_tally(&mut self, service: u32) -> Result<(), WriteError> {
        write(
            &mut self.tally,
            table::TALLY.name,
            service,
            Tally::default(),
        )
    }

    fn hold(&mut self) {
        self.held.get_or_insert_default();
    }

    fn flush(&mut self) -> Result<(), WriteError> {
        self.write_held();
        let held = self.held.take();
        held.and_then(|held| held.refused).map_or(Ok(()), Err)
    }
}

impl KernelMaps {
    /// Changes a word of a backend. The rest is written as it is.
    fn change_backend(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Backend),
    ) -> Result<(), WriteError> {
        if !self.write_held() {
            return Ok(());
        }
        let read = read(&self.be, table::BE.name, index);
        let mut backend = read.map_err(|ReadError { map, source }| WriteError { map, source })?;
        change(&mut backend);
        write(&mut self.be, table::BE.name, index, backend)
    }
}

impl MapReader for KernelMaps {
    fn is_new(&self) -> bool {
        self.is_new
    }

    fn fronts(&self) -> Result<Vec<(FrontKey, u32)>, ReadError> {
        entries(&self.svc, table::SVC.name)
    }

    fn front(&self, index: u32) -> Result<Front, ReadError> {
        read(&self.front, table::FRONT.name, index)
    }

    fn slot(&self, index: u32) -> Result<Slot, ReadError> {
        read(&self.slot, table::SLOT.name, index)
    }

    fn source(&self, index: u32) -> Result<Source, ReadError> {
        read(&self.source, table::SOURCE.name, index)
    }

    fn backend(&self, index: u32) -> Result<Backend, ReadError> {
        read(&self.be, table::BE.name, index)
    }

    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError> {
        read_all(&self.be, table::BE.name, entries)
    }

    fn tallies(&self, entries: u32) -> Result<Vec<Tally>, ReadError> {
        read_all(&self.tally, table::TALLY.name, entries)
    }
}

impl Counts for KernelMaps {
    fn open_at(&self, index: u32) -> Result<u64, ReadError> {
        self.conns.of(index)
    }

    fn tally(&self, service: u32) -> Result<Tally, ReadError> {
        read(&self.tally, table::TALLY.name, service)
    }
}

impl Counts for Counters {
    fn open_at(&self, index: u32) -> Result<u64, ReadError> {
        self.conns.of(index)
    }

    fn tally(&self, service: u32) -> Result<Tally, ReadError> {
        read(&self.tally, table::TALLY.name, service)
    }
}

/// The steering maps in the kernel.
pub struct KernelSteering {
    steer: HashMap<MapData, SteeringKey, u32>,
    steered: Array<MapData, Steered>,
    host: Array<MapData, u64>,
}

impl SteeringMaps for KernelSteering {
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError> {
        entries(&self.steer, table::STEER.name)
    }

    fn record(&self, index: u32) -> Result<Steered, ReadError> {
        read(&self.steered, table::STEERED.name, index)
    }

    fn records(&self, entries: u32) -> Result<Vec<Steered>, ReadError> {
        read_all(&self.steered, table::STEERED.name, entries)
    }

    fn host(&self) -> Result<u64, ReadError> {
        read(&self.host, table::HOST.name, 0)
    }

    fn forget_host(&mut self) -> Result<(), WriteError> {
        write(&mut self.host, table::HOST.name, 0, 0)
    }

    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError> {
        insert(&mut self.steer, table::STEER.name, key, index)
    }

    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError> {
        remove(&mut self.steer, table::STEER.name, key)
    }

    fn write_record(&mut self, index: u32, record: &Steered) -> Result<(), WriteError> {
        write(&mut self.steered, table::STEERED.name, index, *record)
    }
}

/// The kernel's counters, by reason, service port and backend: for readers beside the owner of the maps.
pub struct Counters {
    count: Mutex<PerCpuArray<MapData, u64>>,
    conns: Arc<Conns>,
    tally: Array<MapData, Tally>,
}

impl Counters {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path, conns: Arc<Conns>) -> Result<Self, ReadError> {
        let count: PerCpuArray<_, _> = open(folder, &table::COUNT)?;
        Ok(Self {
            count: count.into(),
            conns,
            tally: open(folder, &table::TALLY)?,
        })
    }

    /// How many open sockets remember a backend.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.conns.sum()
    }

    /// How often the programs met each reason that they count, since the maps were made, on all
    /// CPUs together.
    ///
    /// # Errors
    ///
    /// The map can't be read.
    pub fn read(&self) -> Result<Vec<(Reason, u64)>, ReadError> {
        let count = self.count.lock().unwrap_or_else(PoisonError::into_inner);
        Reason::OF_KERNEL
            .into_iter()
            .map(|reason| {
                let values = count.get(&reason.index(), 0).map_err(|error| ReadError {
                    map: table::COUNT.name,
                    source: to_io(error),
                })?;
                Ok((reason, values.iter().sum()))
            })
            .collect()
    }
}
