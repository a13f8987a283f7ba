//! Reads and writes the service maps, the steering maps and the counters in the kernel.

use std::{io, path::Path, sync::Arc};

use aya::maps::{Map, MapData, MapError, PerCpuArray};
use tunnel_common::{
    addr::Address,
    reason::Reason,
    service::{Backend, Frontend, FrontendKey, Membership, ServiceCounts, Slot, SourceRange},
    service_range::ServiceRange,
    steering::{SteeringKey, SteeringRecord},
    table,
};

use super::{batched_writes::BatchedWrites, open_connections::OpenConnections, sys::MapHandle};
use crate::reconcile::{
    AddressMaps, CounterReader, MapReader, MapWriter, ReadError, SteeringMaps, WriteError,
};

/// The service maps in the kernel.
pub struct KernelMaps {
    pub(super) service_maps: ServiceMaps,
    source_ranges: MapHandle<u32, SourceRange>,
    open_connections: Arc<OpenConnections>,
    service_counts: MapHandle<u32, ServiceCounts>,
    /// The pending writes while writes are batched; `None` while they are made immediately.
    pub(super) batched_writes: Option<BatchedWrites>,
    /// True if no maps existed before and this process created them.
    is_new: bool,
}

/// The maps to which writes may be batched.
#[derive(Clone, Debug)]
pub(super) struct ServiceMaps {
    pub(super) services: MapHandle<FrontendKey, u32>,
    pub(super) frontends: MapHandle<u32, Frontend>,
    pub(super) slots: MapHandle<u32, Slot>,
    pub(super) backends: MapHandle<u32, Backend>,
}

impl KernelMaps {
    /// Opens the maps that are pinned in a directory.
    pub(super) fn open(directory: &Path) -> Result<Self, ReadError> {
        Self::open_with(
            directory,
            Arc::new(OpenConnections::open(directory, &[])?),
            false,
        )
    }

    /// Opens the maps that are pinned in a directory, except for the counts of open connections, which the
    /// caller passes in.
    pub(super) fn open_with(
        directory: &Path,
        open_connections: Arc<OpenConnections>,
        is_new: bool,
    ) -> Result<Self, ReadError> {
        Ok(Self {
            service_maps: ServiceMaps {
                services: MapHandle::open(directory, &table::SERVICES)?,
                frontends: MapHandle::open(directory, &table::FRONTENDS)?,
                slots: MapHandle::open(directory, &table::SLOTS)?,
                backends: MapHandle::open(directory, &table::BACKENDS)?,
            },
            source_ranges: MapHandle::open(directory, &table::SOURCE_RANGES)?,
            open_connections,
            service_counts: MapHandle::open(directory, &table::SERVICE_COUNTS)?,
            batched_writes: None,
            is_new,
        })
    }

    /// Reads a backend, changes it, and writes it back.
    fn update_backend(
        &mut self,
        index: u32,
        change: impl FnOnce(&mut Backend),
    ) -> Result<(), WriteError> {
        if !self.finish_batches() {
            return Ok(());
        }
        let read = self.service_maps.backends.get(&index);
        let mut backend = read.map_err(|ReadError { map, source }| WriteError { map, source })?;
        change(&mut backend);
        self.service_maps.backends.write(&index, &backend)
    }
}

impl MapWriter for KernelMaps {
    fn write_frontend_key(&mut self, key: &FrontendKey, index: u32) -> Result<(), WriteError> {
        let Some(writes) = &mut self.batched_writes else {
            return self.service_maps.services.write(key, &index);
        };
        writes.batch.keys.push((*key, index));
        if writes.batch.is_full() {
            self.submit_batch();
        }
        Ok(())
    }

    fn delete_frontend_key(&mut self, key: &FrontendKey) -> Result<(), WriteError> {
        if !self.finish_batches() {
            return Ok(());
        }
        self.service_maps.services.remove(key)
    }

    fn write_frontend(&mut self, index: u32, frontend: &Frontend) -> Result<(), WriteError> {
        if let Some(writes) = &mut self.batched_writes {
            writes.batch.frontends.push((index, *frontend));
            return Ok(());
        }
        self.service_maps.frontends.write(&index, frontend)
    }

    fn write_source_range(&mut self, index: u32, range: &SourceRange) -> Result<(), WriteError> {
        self.source_ranges.write(&index, range)
    }

    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError> {
        let slots = (first..).zip(slots.iter().copied());
        if let Some(writes) = &mut self.batched_writes {
            writes.batch.slots.extend(slots);
            return Ok(());
        }
        let (_, written) = self
            .service_maps
            .slots
            .write_batch(&slots.collect::<Vec<_>>());
        written
    }

    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>) {
        if let Some(writes) = &mut self.batched_writes {
            writes.batch.backends.extend(backends);
            return (backends.len(), Ok(()));
        }
        self.service_maps.backends.write_batch(backends)
    }

    fn write_backend_sets(&mut self, index: u32, sets: Membership) -> Result<(), WriteError> {
        self.update_backend(index, |backend| backend.sets = sets)
    }

    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError> {
        self.update_backend(index, |backend| backend.state = backend.state.removed())
    }

    fn reset_service_counts(&mut self, service: u32) -> Result<(), WriteError> {
        self.service_counts
            .write(&service, &ServiceCounts::default())
    }

    fn start_batch(&mut self) {
        self.batched_writes.get_or_insert_default();
    }

    fn flush_batch(&mut self) -> Result<(), WriteError> {
        self.finish_batches();
        let pending = self.batched_writes.take();
        pending
            .and_then(|pending| pending.error)
            .map_or(Ok(()), Err)
    }
}

impl MapReader for KernelMaps {
    fn is_new(&self) -> bool {
        self.is_new
    }

    fn frontend_keys(&self) -> Result<Vec<(FrontendKey, u32)>, ReadError> {
        let mut keys = self.service_maps.services.read_all()?;
        keys.retain(|(key, _)| !key.is_of_address());
        Ok(keys)
    }

    fn frontend(&self, index: u32) -> Result<Frontend, ReadError> {
        self.service_maps.frontends.get(&index)
    }

    fn slot(&self, index: u32) -> Result<Slot, ReadError> {
        self.service_maps.slots.get(&index)
    }

    fn source_range(&self, index: u32) -> Result<SourceRange, ReadError> {
        self.source_ranges.get(&index)
    }

    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError> {
        self.service_maps.backends.read_first(entries)
    }

    fn all_service_counts(&self, entries: u32) -> Result<Vec<ServiceCounts>, ReadError> {
        self.service_counts.read_first(entries)
    }
}

impl CounterReader for KernelMaps {
    fn open_connections(&self, index: u32) -> Result<u64, ReadError> {
        self.open_connections.count_of(index)
    }

    fn service_counts(&self, service: u32) -> Result<ServiceCounts, ReadError> {
        self.service_counts.get(&service)
    }
}

impl CounterReader for Counters {
    fn open_connections(&self, index: u32) -> Result<u64, ReadError> {
        self.open_connections.count_of(index)
    }

    fn service_counts(&self, service: u32) -> Result<ServiceCounts, ReadError> {
        self.service_counts.get(&service)
    }
}

/// The values of `services` for addresses, and the array `service_ranges`, in the kernel.
pub(super) struct KernelAddresses {
    services: MapHandle<FrontendKey, u32>,
    ranges: MapHandle<u32, ServiceRange>,
}

impl KernelAddresses {
    /// Opens the maps that are pinned in a directory.
    pub(super) fn open(directory: &Path) -> Result<Self, ReadError> {
        Ok(Self {
            services: MapHandle::open(directory, &table::SERVICES)?,
            ranges: MapHandle::open(directory, &table::SERVICE_RANGES)?,
        })
    }
}

impl AddressMaps for KernelAddresses {
    fn addresses(&self) -> Result<Vec<(Address, u32)>, ReadError> {
        let entries = self.services.read_all()?.into_iter();
        let of_addresses = entries.filter(|(key, _)| key.is_of_address());
        Ok(of_addresses
            .map(|(key, value)| (key.address, value))
            .collect())
    }

    fn write_addresses(&mut self, values: &[(Address, u32)]) -> Result<(), WriteError> {
        let values = values.iter();
        let values = values.map(|(address, value)| (FrontendKey::of_address(*address), *value));
        let (_, written) = self.services.write_batch(&Vec::from_iter(values));
        written
    }

    fn remove_address(&mut self, address: &Address) -> Result<(), WriteError> {
        self.services.remove(&FrontendKey::of_address(*address))
    }

    fn write_range(&mut self, index: u32, range: &ServiceRange) -> Result<(), WriteError> {
        self.ranges.write(&index, range)
    }
}

/// The steering maps in the kernel.
pub struct KernelSteering {
    steer: MapHandle<SteeringKey, u32>,
    steered: MapHandle<u32, SteeringRecord>,
    host: MapHandle<u32, u64>,
}

impl KernelSteering {
    /// Opens the maps that are pinned in a directory.
    pub(super) fn open(directory: &Path) -> Result<Self, ReadError> {
        Ok(Self {
            steer: MapHandle::open(directory, &table::STEER)?,
            steered: MapHandle::open(directory, &table::STEERED)?,
            host: MapHandle::open(directory, &table::HOST)?,
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

    fn write_host_namespace(&mut self, cookie: u64) -> Result<(), WriteError> {
        self.host.write(&0, &cookie)
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
/// maps' owner.
pub struct Counters {
    reason_counts: PerCpuArray<MapData, u64>,
    open_connections: Arc<OpenConnections>,
    service_counts: MapHandle<u32, ServiceCounts>,
}

impl Counters {
    /// Opens the maps that are pinned in a directory.
    pub(super) fn open(
        directory: &Path,
        open_connections: Arc<OpenConnections>,
    ) -> Result<Self, ReadError> {
        let count = MapData::from_pin(directory.join(table::REASON_COUNTS.name));
        let count = count.and_then(|data| PerCpuArray::try_from(Map::PerCpuArray(data)));
        Ok(Self {
            reason_counts: count.map_err(read_error)?,
            open_connections,
            service_counts: MapHandle::open(directory, &table::SERVICE_COUNTS)?,
        })
    }

    /// Returns the total number of open connections.
    #[must_use]
    pub fn connections(&self) -> u64 {
        self.open_connections.total()
    }

    /// Returns how often the kernel programs have counted each reason since the map was created, summed over
    /// all CPUs. The reasons are read in the opposite order, so that the number of released sockets never exceeds
    /// that of tracked sockets.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read.
    pub fn read(&self) -> Result<Vec<(Reason, u64)>, ReadError> {
        let reasons = Reason::COUNTED_BY_KERNEL.into_iter().rev();
        let counts: Result<Vec<_>, _> = reasons
            .map(|reason| {
                let values = self
                    .reason_counts
                    .get(&reason.index(), 0)
                    .map_err(read_error)?;
                Ok((reason, values.iter().sum()))
            })
            .collect();
        counts.map(|mut counts| {
            counts.reverse();
            counts
        })
    }
}

/// Converts an error from reading the map of reason counts.
fn read_error(error: MapError) -> ReadError {
    ReadError {
        map: table::REASON_COUNTS.name,
        source: io::Error::other(error),
    }
}
