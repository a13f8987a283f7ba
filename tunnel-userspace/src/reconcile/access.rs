//! The access of the owner to its maps.

use std::io;

use tunnel_common::{
    service::{Backend, Front, FrontKey, Membership, Slot, Source, Tally},
    steering::{Steered, SteeringKey},
};

/// The error of writing a map.
#[derive(Debug, thiserror::Error)]
#[error("cannot write map {map}")]
pub struct WriteError {
    /// The name of the map.
    pub map: &'static str,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// The error of reading a map.
#[derive(Debug, thiserror::Error)]
#[error("cannot read map {map}")]
pub struct ReadError {
    /// The name of the map.
    pub map: &'static str,
    /// The kernel's error.
    #[source]
    pub source: io::Error,
}

/// The error of adopting the content of maps, into this process or into other maps.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A map can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A map can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The kernel offers no grace period.
    #[error("cannot wait for the kernel's grace period")]
    Grace(#[source] io::Error),
}

/// Writes single entries of the service maps.
pub trait MapWriter: Send {
    /// Points a frontend key at a record.
    ///
    /// # Errors
    ///
    /// The kernel refused the write, and the entry is unchanged. The same holds for the other methods.
    fn write_svc(&mut self, key: &FrontKey, index: u32) -> Result<(), WriteError>;
    /// Removes a frontend key, if it exists.
    fn delete_svc(&mut self, key: &FrontKey) -> Result<(), WriteError>;
    /// Writes a record to which no key leads yet.
    fn write_front(&mut self, index: u32, front: &Front) -> Result<(), WriteError>;
    /// Writes a range of clients to which no record leads yet.
    fn write_source(&mut self, index: u32, source: &Source) -> Result<(), WriteError>;
    /// Writes slots to which no record leads yet, consecutively from index `first`. If one fails, others
    /// may have been written.
    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError>;
    /// Writes backends to which no slot leads yet, each at its index, in the given order. Returns the
    /// number written, and the error that prevented the rest.
    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>);
    /// Writes the sets of a backend, which may be in use.
    fn move_backend(&mut self, index: u32, sets: Membership) -> Result<(), WriteError>;
    /// Marks a backend as removed.
    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError>;
    /// Starts batching: writes of unreachable entries and of keys are delayed and written with few
    /// calls. No key or record is written before the entries it leads to, and all are written before an
    /// entry in use changes. After a refused write no other may follow.
    fn hold(&mut self);
    /// Writes all batched entries, and ends batching.
    ///
    /// # Errors
    ///
    /// The kernel refused some of them; it is unknown which of them were written.
    fn flush(&mut self) -> Result<(), WriteError>;
    /// Resets the counters of a service port.
    fn reset_tally(&mut self, service: u32) -> Result<(), WriteError>;
}

/// Reads the counters of the programs.
pub trait Counts {
    /// Returns the number of open connections of a backend, modulo 2^64. Only programs count.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. The same holds for the other method.
    fn open_at(&self, index: u32) -> Result<u64, ReadError>;
    /// Returns the counters of a service port, since its id was allocated or the maps were created.
    fn tally(&self, service: u32) -> Result<Tally, ReadError>;
}

/// Reads the service maps.
pub trait MapReader: Counts {
    /// Returns true if the maps were created for this process and are empty; called before it writes.
    fn is_new(&self) -> bool;
    /// Returns every frontend key and the index of its record.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. The same holds for the other methods.
    fn fronts(&self) -> Result<Vec<(FrontKey, u32)>, ReadError>;
    /// Returns a record.
    fn front(&self, index: u32) -> Result<Front, ReadError>;
    /// Returns a slot.
    fn slot(&self, index: u32) -> Result<Slot, ReadError>;
    /// Returns a range of clients.
    fn source(&self, index: u32) -> Result<Source, ReadError>;
    /// Returns the first `entries` backends, by index.
    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError>;
    /// Returns the counters of the first `entries` service ports, by id.
    fn tallies(&self, entries: u32) -> Result<Vec<Tally>, ReadError>;
}

/// Reads and writes single entries of the steering maps.
pub trait SteeringMaps: Send {
    /// Returns every key and the index of its record.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. The same holds for the other methods that read.
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError>;
    /// Returns the first `entries` records, by index.
    fn records(&self, entries: u32) -> Result<Vec<Steered>, ReadError>;
    /// Returns the cookie of the network namespace from which the probe connected; 0 for none.
    fn host(&self) -> Result<u64, ReadError>;
    /// Resets that cookie.
    ///
    /// # Errors
    ///
    /// The kernel refused the write.
    fn forget_host(&mut self) -> Result<(), WriteError>;
    /// Points a key at a record.
    ///
    /// # Errors
    ///
    /// The kernel refused the write, and the entry is unchanged. The same holds for the other methods
    /// that write.
    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError>;
    /// Removes a key, if it exists.
    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError>;
    /// Writes a record to which no key leads yet.
    fn write_record(&mut self, index: u32, record: &Steered) -> Result<(), WriteError>;
}
