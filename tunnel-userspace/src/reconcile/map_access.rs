//! Traits for reading and writing the BPF maps. `bpf` implements them for kernel maps, tests for maps in
//! memory.

use std::io;

use tunnel_common::{
    service::{Backend, Frontend, FrontendKey, Membership, ServiceCounts, Slot, SourceRange},
    steering::{SteeringKey, SteeringRecord},
};

/// A map can't be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write map {map}")]
pub struct WriteError {
    /// The name of the map.
    pub map: &'static str,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// A map can't be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read map {map}")]
pub struct ReadError {
    /// The name of the map.
    pub map: &'static str,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// The content of the maps can't be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A map can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A map can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The kernel refused to wait for a grace period.
    #[error("cannot wait for the kernel's grace period")]
    Grace(#[source] io::Error),
}

/// Writes to the service maps.
pub trait MapWriter: Send {
    /// Inserts or updates the index of a frontend key's record.
    ///
    /// # Errors
    ///
    /// The kernel refused the write, and the entry is unchanged. The same holds for the other methods.
    fn write_frontend_key(&mut self, key: &FrontendKey, index: u32) -> Result<(), WriteError>;
    /// Removes a frontend key, if it exists.
    fn delete_frontend_key(&mut self, key: &FrontendKey) -> Result<(), WriteError>;
    /// Writes a frontend record that no key refers to yet.
    fn write_frontend(&mut self, index: u32, frontend: &Frontend) -> Result<(), WriteError>;
    /// Writes a range of client addresses that no record refers to yet.
    fn write_source_range(&mut self, index: u32, source: &SourceRange) -> Result<(), WriteError>;
    /// Writes slots that no record refers to yet, at consecutive indices from `first`. On an error, some of
    /// them may have been written.
    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError>;
    /// Writes backends that no slot refers to yet, each at its index, in the given order. Returns the
    /// number of backends written, and the error that stopped the rest.
    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>);
    /// Writes the set membership of a backend, which may be in use.
    fn write_backend_sets(&mut self, index: u32, sets: Membership) -> Result<(), WriteError>;
    /// Marks a backend as removed.
    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError>;
    /// Starts batching: keys and entries that are not in use yet are collected, to be written with few
    /// system calls. An entry is always written before the record or key that refers to it, and the whole
    /// batch before an entry in use changes. After a refused write, nothing else is written.
    fn start_batch(&mut self);
    /// Writes the batch, and ends batching.
    ///
    /// # Errors
    ///
    /// The kernel refused a write; it is unknown which entries were written.
    fn flush_batch(&mut self) -> Result<(), WriteError>;
    /// Resets the counters of a service port.
    fn reset_service_counts(&mut self, service: u32) -> Result<(), WriteError>;
}

/// Reads the counters that the kernel programs maintain.
pub trait CounterReader {
    /// Returns the number of open connections of a backend, modulo 2^64.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. The same holds for the other method.
    fn open_connections(&self, index: u32) -> Result<u64, ReadError>;
    /// Returns the counters of a service port; they start at 0 when its id is allocated.
    fn service_counts(&self, service: u32) -> Result<ServiceCounts, ReadError>;
}

/// Reads the service maps.
pub trait MapReader: CounterReader {
    /// Returns true if the maps were created by this process and are still empty.
    fn is_new(&self) -> bool;
    /// Returns every frontend key and the index of its record.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. The same holds for the other methods.
    fn frontend_keys(&self) -> Result<Vec<(FrontendKey, u32)>, ReadError>;
    /// Returns a frontend record.
    fn frontend(&self, index: u32) -> Result<Frontend, ReadError>;
    /// Returns a slot.
    fn slot(&self, index: u32) -> Result<Slot, ReadError>;
    /// Returns a range of client addresses.
    fn source_range(&self, index: u32) -> Result<SourceRange, ReadError>;
    /// Returns the first `entries` backends, by index.
    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError>;
    /// Returns the counters of the service ports with the ids from 0 to `entries` - 1, in this order.
    fn all_service_counts(&self, entries: u32) -> Result<Vec<ServiceCounts>, ReadError>;
}

/// Reads and writes the steering maps.
pub trait SteeringMaps: Send {
    /// Returns every key and the index of its record.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. The same holds for the other methods that read.
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError>;
    /// Returns the first `entries` records, by index.
    fn records(&self, entries: u32) -> Result<Vec<SteeringRecord>, ReadError>;
    /// Returns the cookie of the network namespace from which the probe connected; 0 if no program has
    /// stored one.
    fn host_namespace(&self) -> Result<u64, ReadError>;
    /// Resets this cookie to 0.
    ///
    /// # Errors
    ///
    /// The kernel refused the write.
    fn reset_host_namespace(&mut self) -> Result<(), WriteError>;
    /// Inserts or updates the index of a key's record.
    ///
    /// # Errors
    ///
    /// The kernel refused the write, and the entry is unchanged. The same holds for the other methods
    /// that write.
    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError>;
    /// Removes a key, if it exists.
    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError>;
    /// Writes a record that no key refers to. Of a removed record only the time of removal may change, since
    /// programs may still read it.
    fn write_record(&mut self, index: u32, record: &SteeringRecord) -> Result<(), WriteError>;
}
