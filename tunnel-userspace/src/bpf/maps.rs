//! Reads and writes the service maps, the steering maps and the counters in the kernel.

use std::{io, path::Path, sync::Arc};

use aya::maps::{Map, MapData, MapError, PerCpuArray};
use tunnel_common::{
    reason::Reason,
    service::{Backend, Frontend, FrontendKey, Membership, Slot, SourceRange, ServiceCounts},
    steering::{SteeringRecord, SteeringKey},
    table,
};

use super::{open_connections::OpenConnections, batched_writes::Pending, sys::MapHandle};
use crate::reconcile::{CounterReader, MapReader, MapWriter, ReadError, SteeringMaps, WriteError};

/// The service maps in the kernel.
pub struct KernelMaps {
    pub(super) services: Services,
    source: MapHandle<u32, SourceRange>,
    conns: Arc<OpenConnections>,
    tally: MapHandle<u32, ServiceCounts>,
    /// The pending writes while writes are batched; none if they are written at once.
    pub(super) pending: Option<Pending>,
    /// True if this process created the maps, and none existed before.
    is_new: bool,
}

/// The maps whose writes may be batched.
#[derive(Clone, Debug)]
pub(super) struct Services {
    pub(super) svc: MapHandle<FrontendKey, u32>,
    pub(super) front: MapHandle<u32, Frontend>,
    pub(super) slot: MapHandle<u32, Slot>,
    pub(super) be: MapHandle<u32, Backend>,
}

impl KernelMaps {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path) -> Result<Self, ReadError> {
        Self::open_with(folder, Arc::new(OpenConnections::open(folder, &[])?), false)
    }

    /// Opens the maps that are pinned in a folder, except for the counts of open connections, which are
    /// given.
    pub(super) fn open_with(
        folder: &Path,
        conns: Arc<OpenConnections>,
        is_new: bool,
    ) -> Result<Self, ReadError> {
        Ok(Self {
            services: Services {
                svc: MapHandle::open(folder, &table::SERVICES)?,
                front: MapHandle::open(folder, &table::FRONTENDS)?,
                slot: MapHandle::open(folder, &table::SLOTS)?,
                be: MapHandle::open(folder, &table::BACKENDS)?,
            },
            source: MapHandle::open(folder, &table::SOURCE_RANGES)?,
            conns,
            tally: MapHandle::open(folder, &table::SERVICE_COUNTS)?,
            pending: None,
            is_new,
        })
    }

    /// Reads a backend, changes it, and writes it back.
    fn change_backend(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Backend),
    ) -> Result<(), WriteError> {
        if !self.write_held() {
            return Ok(());
        }
        let read = self.services.be.get(&index);
        let mut backend = read.map_err(|ReadError { map, source }| WriteError { map, source })?;
        change(&mut backend);
        self.services.be.write(&index, &backend)
    }
}

impl MapWriter for KernelMaps {
    fn write_frontend_key(&mut self, key: &FrontendKey, index: u32) -> Result<(), WriteError> {
        let Some(pending) = &mut self.pending else {
            return self.services.svc.write(key, &index);
        };
        pending.batch.keys.push((*key, index));
        if pending.batch.is_full() {
            self.hand_over();
        }
        Ok(())
    }

    fn delete_frontend_key(&mut self, key: &FrontendKey) -> Result<(), WriteError> {
        if !self.write_held() {
            return Ok(());
        }
        self.services.svc.remove(key)
    }

    fn write_frontend(&mut self, index: u32, front: &Frontend) -> Result<(), WriteError> {
        if let Some(pending) = &mut self.pending {
            pending.batch.fronts.push((index, *front));
            return Ok(());
        }
        self.services.front.write(&index, front)
    }

    fn write_source_range(&mut self, index: u32, source: &SourceRange) -> Result<(), WriteError> {
        self.source.write(&index, source)
    }

    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError> {
        let slots = (first..).zip(slots.iter().copied());
        if let Some(pending) = &mut self.pending {
            pending.batch.slots.extend(slots);
            return Ok(());
        }
        let (_, written) = self.services.slot.write_batch(&slots.collect::<Vec<_>>());
        written
    }

    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>) {
        if let Some(pending) = &mut self.pending {
            pending.batch.backends.extend(backends);
            return (backends.len(), Ok(()));
        }
        self.services.be.write_batch(backends)
    }

    fn write_backend_sets(&mut self, index: u32, sets: Membership) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.sets = sets)
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.state = backend.state.removed())
    }

    fn reset_service_counts(&mut self, service: u32) -> Result<(), WriteError> {
        self.tally.write(&service, &ServiceCounts::default())
    }

    fn start_batch(&mut self) {
        self.pending.get_or_insert_default();
    }

    fn flush_batch(&mut self) -> Result<(), WriteError> {
        self.write_held();
        let pending = self.pending.take();
        pending
            .and_then(|pending| pending.refused)
            .map_or(Ok(()), Err)
    }
}

impl MapReader for KernelMaps {
    fn is_new(&self) -> bool {
        self.is_new
    }

    fn frontend_keys(&self) -> Result<Vec<(FrontendKey, u32)>, ReadError> {
        self.services.svc.read_all()
    }

    fn frontend(&self, index: u32) -> Result<Frontend, ReadError> {
        self.services.front.get(&index)
    }

    fn slot(&self, index: u32) -> Result<Slot, ReadError> {
        self.services.slot.get(&index)
    }

    fn source_range(&self, index: u32) -> Result<SourceRange, ReadError> {
        self.source.get(&index)
    }

    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError> {
        self.services.be.read_first(entries)
    }

    fn all_service_counts(&self, entries: u32) -> Result<Vec<ServiceCounts>, ReadError> {
        self.tally.read_first(entries)
    }
}

impl CounterReader for KernelMaps {
    fn open_connections(&self, index: u32) -> Result<u64, ReadError> {
        self.conns.count_of(index)
    }

    fn service_counts(&self, service: u32) -> Result<ServiceCounts, ReadError> {
        self.tally.get(&service)
    }
}

impl CounterReader for Counters {
    fn open_connections(&self, index: u32) -> Result<u64, ReadError> {
        self.conns.count_of(index)
    }

    fn service_counts(&self, service: u32) -> Result<ServiceCounts, ReadError> {
        self.tally.get(&service)
    }
}

/// The steering maps in the kernel.
pub struct KernelSteering {
    steer: MapHandle<SteeringKey, u32>,
    steered: MapHandle<u32, SteeringRecord>,
    host: MapHandle<u32, u64>,
}

impl KernelSteering {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path) -> Result<Self, ReadError> {
        Ok(Self {
            steer: MapHandle::open(folder, &table::STEER)?,
            steered: MapHandle::open(folder, &table::STEERED)?,
            host: MapHandle::open(folder, &table::HOST)?,
        })
    }
}

impl SteeringMaps for KernelSteering {
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError> {
        self.steer.read_all()
    }

    fn records(&self, entries: u32) -> Result<Vec<SteeringRecord>, ReadError> {
        self.steered.read_first(entries)
    }

    fn host_namespace(&self) -> Result<u64, ReadError> {
        self.host.get(&0)
    }

    fn reset_host_namespace(&mut self) -> Result<(), WriteError> {
        self.host.write(&0, &0)
    }

    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError> {
        self.steer.write(key, &index)
    }

    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError> {
        self.steer.remove(key)
    }

    fn write_record(&mut self, index: u32, record: &SteeringRecord) -> Result<(), WriteError> {
        self.steered.write(&index, record)
    }
}

/// The kernel's counters by reason, service port and backend, for readers that run concurrently with the
/// owner of the maps.
pub struct Counters {
    count: PerCpuArray<MapData, u64>,
    conns: Arc<OpenConnections>,
    tally: MapHandle<u32, ServiceCounts>,
}

impl Counters {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path, conns: Arc<OpenConnections>) -> Result<Self, ReadError> {
        let count = MapData::from_pin(folder.join(table::REASON_COUNTS.name));
        let count = count.and_then(|data| PerCpuArray::try_from(Map::PerCpuArray(data)));
        Ok(Self {
            count: count.map_err(unread)?,
            conns,
            tally: MapHandle::open(folder, &table::SERVICE_COUNTS)?,
        })
    }

    /// Returns the total number of open connections.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.conns.total()
    }

    /// Returns the count of each reason of the kernel programs since the map was created, summed over all
    /// CPUs.
    ///
    /// # Errors
    ///
    /// The map can't be read.
    pub fn read(&self) -> Result<Vec<(Reason, u64)>, ReadError> {
        let reasons = Reason::COUNTED_BY_KERNEL.into_iter();
        reasons
            .map(|reason| {
                let values = self.count.get(&reason.index(), 0).map_err(unread)?;
                Ok((reason, values.iter().sum()))
            })
            .collect()
    }
}

/// Returns the error of reading the counts of reasons.
fn unread(error: MapError) -> ReadError {
    ReadError {
        map: table::REASON_COUNTS.name,
        source: io::Error::other(error),
    }
}
