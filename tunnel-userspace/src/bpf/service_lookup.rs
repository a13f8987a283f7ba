//! Reads what the programs would read to choose a backend for a frontend, so that the choice can be repeated in memory.

use std::collections::BTreeMap;

use tunnel_common::{
    affinity::{Affinity, AffinityKey, Client},
    decide::Maps,
    service::{Backend, Frontend, FrontendKey, IndexRange, Slot, SourceRange},
    steering::{SteeringKey, SteeringRecord},
    table,
};

use super::{pin_directory::PinDirectory, sys::MapHandle};
use crate::{clock::monotonic, reconcile::ReadError};

/// Looks up frontends in the kernel's service maps.
#[derive(Debug)]
pub struct ServiceLookup {
    services: MapHandle<FrontendKey, u32>,
    frontends: MapHandle<u32, Frontend>,
    slots: MapHandle<u32, Slot>,
    source_ranges: MapHandle<u32, SourceRange>,
    backends: MapHandle<u32, Backend>,
    affinity: MapHandle<AffinityKey, Affinity>,
    steer: MapHandle<SteeringKey, u32>,
    steered: MapHandle<u32, SteeringRecord>,
}

impl ServiceLookup {
    /// Opens the maps of a pin directory.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be opened.
    pub fn open(pins: &PinDirectory) -> Result<Self, ReadError> {
        let directory = &pins.maps();
        Ok(Self {
            services: MapHandle::open(directory, &table::SERVICES)?,
            frontends: MapHandle::open(directory, &table::FRONTENDS)?,
            slots: MapHandle::open(directory, &table::SLOTS)?,
            source_ranges: MapHandle::open(directory, &table::SOURCE_RANGES)?,
            backends: MapHandle::open(directory, &table::BACKENDS)?,
            affinity: MapHandle::open(directory, &table::AFFINITY)?,
            steer: MapHandle::open(directory, &table::STEER)?,
            steered: MapHandle::open(directory, &table::STEERED)?,
        })
    }

    /// Reads a frontend, with everything from which a backend is chosen for a client. Returns `None` if there is no such
    /// frontend.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read.
    pub fn frontend(
        &self,
        key: &FrontendKey,
        client: &Client,
    ) -> Result<Option<FrontendLookup>, ReadError> {
        let Some(index) = self.services.find(key)? else {
            return Ok(None);
        };
        let frontend = self.frontends.get(&index)?;
        let mut found = FrontendLookup {
            index,
            frontend,
            slots: BTreeMap::new(),
            backends: BTreeMap::new(),
            source_ranges: BTreeMap::new(),
            affinity: None,
        };
        for set in [frontend.cluster, frontend.local] {
            for slot in indices(set) {
                let value = self.slots.get(&slot)?;
                found.slots.insert(slot, value);
                let backend = self.backends.get(&value.backend)?;
                found.backends.insert(value.backend, backend);
            }
        }
        for range in indices(frontend.source_ranges) {
            found
                .source_ranges
                .insert(range, self.source_ranges.get(&range)?);
        }
        let key = AffinityKey {
            client: *client,
            service: frontend.service,
        };
        if frontend.affinity_timeout != 0 {
            found.affinity = self.affinity.find(&key)?;
        }
        Ok(Some(found))
    }

    /// Reads the steering record of an edge node's address and port, if connections to it are steered.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read.
    pub fn steering(&self, key: &SteeringKey) -> Result<Option<SteeringRecord>, ReadError> {
        let Some(index) = self.steer.find(key)? else {
            return Ok(None);
        };
        self.steered.find(&index)
    }
}

fn indices(range: IndexRange) -> std::ops::Range<u32> {
    range.base..range.base.saturating_add(range.len)
}

/// A frontend, and everything from which a backend is chosen: the maps in memory. The choice is that of the programs
/// ([`tunnel_common::decide`]), and writes nothing.
#[derive(Clone, Debug)]
pub struct FrontendLookup {
    /// The index of the record.
    pub index: u32,
    /// The record.
    pub frontend: Frontend,
    slots: BTreeMap<u32, Slot>,
    backends: BTreeMap<u32, Backend>,
    source_ranges: BTreeMap<u32, SourceRange>,
    affinity: Option<Affinity>,
}

impl FrontendLookup {
    /// Returns the backends in a set, each once.
    pub fn backends(&self, set: IndexRange) -> impl Iterator<Item = &Backend> {
        let indices: std::collections::BTreeSet<u32> = indices(set)
            .filter_map(|slot| self.slots.get(&slot))
            .map(|slot| slot.backend)
            .collect();
        indices
            .into_iter()
            .filter_map(|index| self.backends.get(&index))
    }

    /// Returns the backend that session affinity remembers for the client.
    #[must_use]
    pub const fn affinity(&self) -> Option<&Affinity> {
        self.affinity.as_ref()
    }
}

impl Maps for FrontendLookup {
    fn frontend_index(&self, key: &FrontendKey) -> Option<u32> {
        (self.frontend.key == *key).then_some(self.index)
    }

    fn frontend(&self, index: u32) -> Option<&Frontend> {
        (self.index == index).then_some(&self.frontend)
    }

    fn slot(&self, index: u32) -> Option<&Slot> {
        self.slots.get(&index)
    }

    fn source_range(&self, index: u32) -> Option<&SourceRange> {
        self.source_ranges.get(&index)
    }

    fn backend(&self, index: u32) -> Option<&Backend> {
        self.backends.get(&index)
    }

    fn affinity(&self, key: &AffinityKey) -> Option<&Affinity> {
        self.affinity.as_ref().filter(|entry| entry.key == *key)
    }

    fn insert_affinity(&self, _: &Affinity, _: bool) -> bool {
        true
    }

    fn open_connections(&self, _: u32) -> u64 {
        0
    }

    fn next_round_robin(&self, _: u32) -> Option<u32> {
        Some(self.random())
    }

    fn random(&self) -> u32 {
        fastrand::u32(..)
    }

    fn now(&self) -> u64 {
        u64::try_from(monotonic().as_nanos()).unwrap_or(u64::MAX)
    }
}
