//! Reads and writes the service maps, the steering maps and the counters in the kernel.

use std::{io, path::Path, sync::Arc};

use aya::maps::{Map, MapData, MapError, PerCpuArray};
use tunnel_common::{
    reason::Reason,
    service::{Backend, Frontend, FrontendKey, Membership, Slot, SourceRange, ServiceCounts},
    steering::{SteeringRecord, SteeringKey},
    table,
};

use super::{conns::Conns, pending::Pending, sys::Handle};
use crate::reconcile::{CounterReader, MapReader, MapWriter, ReadError, SteeringMaps, WriteError};

/// The service maps in the kernel.
pub struct KernelMaps {
    pub(super) services: Services,
    source: Handle<u32, SourceRange>,
    conns: Arc<Conns>,
    tally: Handle<u32, ServiceCounts>,
    /// The pending writes while writes are batched; none if they are written at once.
    pub(super) pending: Option<Pending>,
    /// True if this process created the maps, and none existed before.
    is_new: bool,
}

/// The maps whose writes may be batched.
#[derive(Clone, Debug)]
pub(super) struct Services {
    pub(super) svc: Handle<FrontendKey, u32>,
    pub(super) front: Handle<u32, Frontend>,
    pub(super) slot: Handle<u32, Slot>,
    pub(super) be: Handle<u32, Backend>,
}

impl KernelMaps {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path) -> Result<Self, ReadError> {
        Self::open_with(folder, Arc::new(Conns::open(folder, &[])?), false)
    }

    /// Opens the maps that are pinned in a folder, except for the counts of open connections, which are
    /// given.
    pub(super) fn open_with(
        folder: &Path,
        conns: Arc<Conns>,
        is_new: bool,
    ) -> Result<Self, ReadError> {
        Ok(Self {
            services: Services {
                svc: Handle::open(folder, &table::SERVICES)?,
                front: Handle::open(folder, &table::FRONTENDS)?,
                slot: Handle::open(folder, &table::SLOTS)?,
                be: Handle::open(folder, &table::BACKENDS)?,
            },
            source: Handle::open(folder, &table::SOURCE_RANGES)?,
            conns,
            tally: Handle::open(folder, &table::SERVICE_COUNTS)?,
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
        self.services.be.put(&index, &backend)
    }
}

impl MapWriter for KernelMaps {
    fn write_frontend_key(&mut self, key: &FrontendKey, index: u32) -> Result<(), WriteError> {
        let Some(pending) = &mut self.pending else {
            return self.services.svc.put(key, &index);
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
        self.services.front.put(&index, front)
    }

    fn write_source_range(&mut self, index: u32, source: &SourceRange) -> Result<(), WriteError> {
        self.source.put(&index, source)
    }

    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError> {
        let slots = (first..).zip(slots.iter().copied());
        if let Some(pending) = &mut self.pending {
            pending.batch.slots.extend(slots);
            return Ok(());
        }
        let (_, written) = self.services.slot.put_many(&slots.collect::<Vec<_>>());
        written
    }

    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>) {
        if let Some(pending) = &mut self.pending {
            pending.batch.backends.extend(backends);
            return (backends.len(), Ok(()));
        }
        self.services.be.put_many(backends)
    }

    fn write_backend_sets(&mut self, index: u32, sets: Membership) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.sets = sets)
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        self.change_backend(index, |backend| backend.state = backend.state.removed())
    }

    fn reset_service_counters(&mut self, service: u32) -> Result<(), WriteError> {
        self.tally.put(&service, &ServiceCounts::default())
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
        self.services.svc.all()
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
        self.services.be.first(entries)
    }

    fn all_service_counters(&self, entries: u32) -> Result<Vec<ServiceCounts>, ReadError> {
        self.tally.first(entries)
    }
}

impl CounterReader for KernelMaps {
    fn open_connections(&self, index: u32) -> Result<u64, ReadError> {
        self.conns.of(index)
    }

    fn service_counters(&self, service: u32) -> Result<ServiceCounts, ReadError> {
        self.tally.get(&service)
    }
}

impl CounterReader for Counters {
    fn open_connections(&self, index: u32) -> Result<u64, ReadError> {
        self.conns.of(index)
    }

    fn service_counters(&self, service: u32) -> Result<ServiceCounts, ReadError> {
        self.tally.get(&service)
    }
}

/// The steering maps in the kernel.
pub struct KernelSteering {
    steer: Handle<SteeringKey, u32>,
    steered: Handle<u32, SteeringRecord>,
    host: Handle<u32, u64>,
}

impl KernelSteering {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path) -> Result<Self, ReadError> {
        Ok(Self {
            steer: Handle::open(folder, &table::STEER)?,
            steered: Handle::open(folder, &table::STEERED)?,
            host: Handle::open(folder, &table::HOST)?,
        })
    }
}

impl SteeringMaps for KernelSteering {
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError> {
        self.steer.all()
    }

    fn records(&self, entries: u32) -> Result<Vec<SteeringRecord>, ReadError> {
        self.steered.first(entries)
    }

    fn host_namespace(&self) -> Result<u64, ReadError> {
        self.host.get(&0)
    }

    fn reset_host_namespace(&mut self) -> Result<(), WriteError> {
        self.host.put(&0, &0)
    }

    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError> {
        self.steer.put(key, &index)
    }

    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError> {
        self.steer.remove(key)
    }

    fn write_record(&mut self, index: u32, record: &SteeringRecord) -> Result<(), WriteError> {
        self.steered.put(&index, record)
    }
}

/// The kernel's counters by reason, service port and backend, for readers that run concurrently with the
/// owner of the maps.
pub struct Counters {
    count: PerCpuArray<MapData, u64>,
    conns: Arc<Conns>,
    tally: Handle<u32, ServiceCounts>,
}

impl Counters {
    /// Opens the maps that are pinned in a folder.
    pub(super) fn open(folder: &Path, conns: Arc<Conns>) -> Result<Self, ReadError> {
        let count = MapData::from_pin(folder.join(table::REASON_COUNTS.name));
        let count = count.and_then(|data| PerCpuArray::try_from(Map::PerCpuArray(data)));
        Ok(Self {
            count: count.map_err(unread)?,
            conns,
            tally: Handle::open(folder, &table::SERVICE_COUNTS)?,
        })
    }

    /// Returns the total number of open connections.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.conns.sum()
    }

    /// Returns the count of each reason of the kernel programs since the map was created, summed over all
    /// CPUs.
    ///
    /// # Errors
    ///
    /// The map can't be read.
    pub fn read(&self) -> Result<Vec<(Reason, u64)>, ReadError> {
        let reasons = Reason::OF_KERNEL.into_iter();
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
