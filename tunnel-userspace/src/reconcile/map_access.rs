//! Traits for reading and writing the BPF maps. `bpf` implements them for kernel maps, and tests implement
//! them for in-memory maps.

use std::io;

use tunnel_common::{
    service::{Backend, Frontend, FrontendKey, Membership, ServiceCounts, Slot, SourceRange},
    steering::{SteeringKey, SteeringRecord},
};

/// An error that occurred while writing to a map.
#[derive(Debug, thiserror::Error)]
#[error("cannot write map {map}")]
pub struct WriteError {
    /// The name of the map.
    pub map: &'static str,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// An error that occurred while reading from a map.
#[derive(Debug, thiserror::Error)]
#[error("cannot read map {map}")]
pub struct ReadError {
    /// The name of the map.
    pub map: &'static str,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// An error that occurred while taking over the maps.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A map can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A map can't be written to.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The wait for a grace period failed.
    #[error("cannot wait for the kernel's grace period")]
    Grace(#[source] io::Error),
}

/// Writes to the service maps.
pub trait MapWriter: Send {
    /// Maps a frontend key to the index of its record, inserting or updating the entry.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the write, in which case the entry is unchanged. This also
    /// applies to the other methods.
    fn write_frontend_key(&mut self, key: &FrontendKey, index: u32) -> Result<(), WriteError>;
    /// Removes a frontend key if it exists.
    fn delete_frontend_key(&mut self, key: &FrontendKey) -> Result<(), WriteError>;
    /// Writes a frontend record that no key refers to yet.
    fn write_frontend(&mut self, index: u32, frontend: &Frontend) -> Result<(), WriteError>;
    /// Writes a source range that no record refers to yet.
    fn write_source_range(&mut self, index: u32, source: &SourceRange) -> Result<(), WriteError>;
    /// Writes slots that no record refers to yet, at consecutive indices starting with `first`. On error,
    /// some of them may have been written.
    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError>;
    /// Writes backends that no slot refers to yet, each at its own index, in the given order. Returns how
    /// many backends were written, along with the error, if any, that prevented the rest from being written.
    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>);
    /// Writes a backend's set membership. The backend may be in use.
    fn write_backend_sets(&mut self, index: u32, sets: Membership) -> Result<(), WriteError>;
    /// Marks a backend as removed.
    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError>;
    /// Starts batching: keys and entries that are not in use yet are collected so that they can be written
    /// with few system calls. An entry is always written before the record or key that refers to it, and the
    /// whole batch is written before any entry that is in use changes. After a refused write, nothing more is
    /// written.
    fn start_batch(&mut self);
    /// Writes the batch and ends batching.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses a write, in which case it is unknown which entries were
    /// written.
    fn flush_batch(&mut self) -> Result<(), WriteError>;
    /// Resets a service port's counters.
    fn reset_service_counts(&mut self, service: u32) -> Result<(), WriteError>;
}

/// Reads the counters that the BPF programs maintain.
pub trait CounterReader {
    /// Returns the number of open connections to a backend, modulo 2^64.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the read. This also applies to the other method.
    fn open_connections(&self, index: u32) -> Result<u64, ReadError>;
    /// Returns a service port's counters, which start at 0 when its id is allocated.
    fn service_counts(&self, service: u32) -> Result<ServiceCounts, ReadError>;
}

/// Reads the service maps.
pub trait MapReader: CounterReader {
    /// Returns true if this process created the maps and they are still empty.
    fn is_new(&self) -> bool;
    /// Returns every frontend key with the index of its record.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the read. This also applies to the other methods.
    fn frontend_keys(&self) -> Result<Vec<(FrontendKey, u32)>, ReadError>;
    /// Returns the frontend record at an index.
    fn frontend(&self, index: u32) -> Result<Frontend, ReadError>;
    /// Returns the slot at an index.
    fn slot(&self, index: u32) -> Result<Slot, ReadError>;
    /// Returns the source range at an index.
    fn source_range(&self, index: u32) -> Result<SourceRange, ReadError>;
    /// Returns the first `entries` backends in order of index.
    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError>;
    /// Returns the counters of the service ports with ids 0 to `entries` - 1, in order of id.
    fn all_service_counts(&self, entries: u32) -> Result<Vec<ServiceCounts>, ReadError>;
}

/// Reads and writes the steering maps.
pub trait SteeringMaps: Send {
    /// Returns every key with the index of its record.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the read. This also applies to the other methods that read.
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError>;
    /// Returns the first `entries` records in order of index.
    fn records(&self, entries: u32) -> Result<Vec<SteeringRecord>, ReadError>;
    /// Returns the cookie of the host's network namespace, which is the one that the probe last connected
    /// from, or 0 if no program has stored one.
    fn host_namespace(&self) -> Result<u64, ReadError>;
    /// Writes the cookie of the host's network namespace.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the write.
    fn write_host_namespace(&mut self, cookie: u64) -> Result<(), WriteError>;
    /// Maps a key to the index of its record, inserting or updating the entry.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel refuses the write, in which case the entry is unchanged. This also
    /// applies to the other methods that write.
    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError>;
    /// Removes a key if it exists.
    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError>;
    /// Writes a record that no key refers to. When a record is marked as removed, only its time of removal
    /// may change, since programs may still be reading it.
    fn write_record(&mut self, index: u32, record: &SteeringRecord) -> Result<(), WriteError>;
}
