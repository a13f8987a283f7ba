//! The service maps in the kernel, and the counters.

use std::{
    io,
    sync::{Mutex, PoisonError},
};

use aya::{
    Pod,
    maps::{Array, HashMap, MapData, MapError, PerCpuArray},
};
use tunnel_common::{
    names,
    reason::Reason,
    service::{Backend, Front, FrontKey, Slot},
};

use crate::reconcile::{MapReader, MapWriter, ReadError, WriteError};

/// The service maps in the kernel.
pub struct KernelMaps {
    pub(super) svc: HashMap<MapData, FrontKey, u32>,
    pub(super) front: Array<MapData, Front>,
    pub(super) slot: Array<MapData, Slot>,
    pub(super) be: Array<MapData, Backend>,
}

fn to_io(error: MapError) -> io::Error {
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

fn read<V: Pod>(array: &Array<MapData, V>, map: &'static str, index: u32) -> Result<V, ReadError> {
    array.get(&index, 0).map_err(|error| ReadError {
        map,
        source: to_io(error),
    })
}

impl MapWriter for KernelMaps {
    fn write_svc(&mut self, key: &FrontKey, index: u32) -> Result<(), WriteError> {
        self.svc.insert(key, index, 0).map_err(|error| WriteError {
            map: names::SVC,
            source: to_io(error),
        })
    }

    fn delete_svc(&mut self, key: &FrontKey) -> Result<(), WriteError> {
        match self.svc.remove(key).map_err(to_io) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(WriteError {
                map: names::SVC,
                source: error,
            }),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn write_front(&mut self, index: u32, front: &Front) -> Result<(), WriteError> {
        write(&mut self.front, names::FRONT, index, *front)
    }

    fn write_slot(&mut self, index: u32, backend: u32) -> Result<(), WriteError> {
        write(&mut self.slot, names::SLOT, index, Slot { backend })
    }

    fn write_backend(&mut self, index: u32, backend: &Backend) -> Result<(), WriteError> {
        write(&mut self.be, names::BE, index, *backend)
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        let backend = read(&self.be, names::BE, index).map_err(|error| WriteError {
            map: names::BE,
            source: error.source,
        })?;
        let gone = Backend {
            state: backend.state.gone(),
            ..backend
        };
        write(&mut self.be, names::BE, index, gone)
    }
}

impl MapReader for KernelMaps {
    fn fronts(&self) -> Result<Vec<(FrontKey, u32)>, ReadError> {
        self.svc
            .iter()
            .map(|entry| {
                entry.map_err(|error| ReadError {
                    map: names::SVC,
                    source: to_io(error),
                })
            })
            .collect()
    }

    fn front(&self, index: u32) -> Result<Front, ReadError> {
        read(&self.front, names::FRONT, index)
    }

    fn slot(&self, index: u32) -> Result<Slot, ReadError> {
        read(&self.slot, names::SLOT, index)
    }

    fn backend(&self, index: u32) -> Result<Backend, ReadError> {
        read(&self.be, names::BE, index)
    }
}

/// The kernel's counters by reason.
pub struct Counters {
    pub(super) count: Mutex<PerCpuArray<MapData, u64>>,
}

impl Counters {
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
