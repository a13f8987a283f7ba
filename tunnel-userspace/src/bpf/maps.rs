//! The service maps in the kernel, and the counters.

use std::{
    io,
    os::fd::AsFd as _,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use aya::{
    Pod,
    maps::{Array, HashMap, IterableMap as _, Map, MapData, MapError, PerCpuArray},
};
use tunnel_common::{
    names,
    reason::Reason,
    service::{Backend, Front, FrontKey, Membership, Slot, Source, Tally},
    steering::{Steered, SteeringKey},
};
use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{
    conns::Conns,
    held::{Entries, Held},
    sys,
};
use crate::reconcile::{MapReader, MapWriter, ReadError, SteeringMaps, WriteError};

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

/// Opens a pinned map.
pub(super) fn open<M: TryFrom<Map, Error = MapError>>(
    folder: &Path,
    map: &'static str,
    kind: fn(MapData) -> Map,
) -> Result<M, ReadError> {
    let data = MapData::from_pin(folder.join(map));
    let opened = data.and_then(|data| M::try_from(kind(data)));
    opened.map_err(|error| ReadError {
        map,
        source: to_io(error),
    })
}

impl KernelMaps {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path) -> Result<Self, ReadError> {
        Ok(Self {
            svc: open(folder, names::SVC, Map::HashMap)?,
            front: open(folder, names::FRONT, Map::Array)?,
            slot: open(folder, names::SLOT, Map::Array)?,
            source: open(folder, names::SOURCE, Map::Array)?,
            be: open(folder, names::BE, Map::Array)?,
            conns: Arc::new(Conns::open(folder, &[])?),
            tally: open(folder, names::TALLY, Map::Array)?,
            held: None,
            is_new: false,
        })
    }
}

impl KernelSteering {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path) -> Result<Self, ReadError> {
        Ok(Self {
            steer: open(folder, names::STEER, Map::HashMap)?,
            steered: open(folder, names::STEERED, Map::Array)?,
            host: open(folder, names::HOST, Map::Array)?,
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
            return insert(&mut self.svc, names::SVC, key, index);
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
        remove(&mut self.svc, names::SVC, key)
    }

    fn write_front(&mut self, index: u32, front: &Front) -> Result<(), WriteError> {
        if let Some(held) = &mut self.held {
            held.batch.fronts.extend([(index, *front)]);
            return Ok(());
        }
        write(&mut self.front, names::FRONT, index, *front)
    }

    fn write_slot(&mut self, index: u32, slot: Slot) -> Result<(), WriteError> {
        write(&mut self.slot, names::SLOT, index, slot)
    }

    fn write_source(&mut self, index: u32, source: &Source) -> Result<(), WriteError> {
        write(&mut self.source, names::SOURCE, index, *source)
    }

    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError> {
        let slots = (first..).zip(slots.iter().copied());
        if let Some(held) = &mut self.held {
            held.batch.slots.extend(slots);
            return Ok(());
        }
        let (_, written) = write_many(&self.slot, names::SLOT, slots);
        written
    }

    fn write_backend(&mut self, index: u32, backend: &Backend) -> Result<(), WriteError> {
        write(&mut self.be, names::BE, index, *backend)
    }

    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>) {
        if let Some(held) = &mut self.held {
            held.batch.backends.extend(backends.iter().copied());
            return (backends.len(), Ok(()));
        }
        write_many(&self.be, names::BE, backends.iter().copied())
    }

    fn move_backend(&mut self, index: u32, sets: Membership) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.sets = sets)
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.state = backend.state.gone())
    }

    fn reset_tally(&mut self, service: u32) -> Result<(), WriteError> {
        write(&mut self.tally, names::TALLY, service, Tally::default())
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
        let read = read(&self.be, names::BE, index);
        let mut backend = read.map_err(|ReadError { map, source }| WriteError { map, source })?;
        change(&mut backend);
        write(&mut self.be, names::BE, index, backend)
    }
}

impl MapReader for KernelMaps {
    fn is_new(&self) -> bool {
        self.is_new
    }

    fn fronts(&self) -> Result<Vec<(FrontKey, u32)>, ReadError> {
        entries(&self.svc, names::SVC)
    }

    fn front(&self, index: u32) -> Result<Front, ReadError> {
        read(&self.front, names::FRONT, index)
    }

    fn slot(&self, index: u32) -> Result<Slot, ReadError> {
        read(&self.slot, names::SLOT, index)
    }

    fn source(&self, index: u32) -> Result<Source, ReadError> {
        read(&self.source, names::SOURCE, index)
    }

    fn backend(&self, index: u32) -> Result<Backend, ReadError> {
        read(&self.be, names::BE, index)
    }

    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError> {
        read_all(&self.be, names::BE, entries)
    }

    fn open_at(&self, index: u32) -> Result<u64, ReadError> {
        self.conns.of(index)
    }

    fn tallies(&self, entries: u32) -> Result<Vec<Tally>, ReadError> {
        read_all(&self.tally, names::TALLY, entries)
    }

    fn tally(&self, service: u32) -> Result<Tally, ReadError> {
        read(&self.tally, names::TALLY, service)
    }
}

/// The steering maps in the kernel.
pub struct KernelSteering {
    pub(super) steer: HashMap<MapData, SteeringKey, u32>,
    pub(super) steered: Array<MapData, Steered>,
    pub(super) host: Array<MapData, u64>,
}

impl SteeringMaps for KernelSteering {
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError> {
        entries(&self.steer, names::STEER)
    }

    fn record(&self, index: u32) -> Result<Steered, ReadError> {
        read(&self.steered, names::STEERED, index)
    }

    fn records(&self, entries: u32) -> Result<Vec<Steered>, ReadError> {
        read_all(&self.steered, names::STEERED, entries)
    }

    fn host(&self) -> Result<u64, ReadError> {
        read(&self.host, names::HOST, 0)
    }

    fn forget_host(&mut self) -> Result<(), WriteError> {
        write(&mut self.host, names::HOST, 0, 0)
    }

    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError> {
        insert(&mut self.steer, names::STEER, key, index)
    }

    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError> {
        remove(&mut self.steer, names::STEER, key)
    }

    fn write_record(&mut self, index: u32, record: &Steered) -> Result<(), WriteError> {
        write(&mut self.steered, names::STEERED, index, *record)
    }
}

/// The kernel's counters by reason.
pub struct Counters {
    pub(super) count: Mutex<PerCpuArray<MapData, u64>>,
    pub(super) conns: Arc<Conns>,
}

impl Counters {
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
        Reason::ALL
            .into_iter()
            .filter(|reason| reason.is_of_kernel())
            .map(|reason| {
                let values = count.get(&reason.index(), 0).map_err(|error| ReadError {
                    map: names::COUNT,
                    source: to_io(error),
                })?;
                Ok((reason, values.iter().sum()))
            })
            .collect()
    }
}
