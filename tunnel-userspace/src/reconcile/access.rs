//! What the owner of the maps asks of them, and how large they are.

use std::io;

use tunnel_common::{
    service::{Backend, Front, FrontKey, Membership, Slot, Source, Tally},
    steering::{Steered, SteeringKey},
};

/// A map could not be written.
#[derive(Debug, thiserror::Error)]
#[error("cannot write map {map}")]
pub struct WriteError {
    /// The name of the map.
    pub map: &'static str,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

/// A map could not be read.
#[derive(Debug, thiserror::Error)]
#[error("cannot read map {map}")]
pub struct ReadError {
    /// The name of the map.
    pub map: &'static str,
    /// What the kernel said.
    #[source]
    pub source: io::Error,
}

/// What maps hold could not be taken over, into this process or into other maps.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A map can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A map can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The kernel gives no grace period.
    #[error("cannot wait for the kernel's grace period")]
    Grace(#[source] io::Error),
}

/// Writes single entries of the service maps.
pub trait MapWriter: Send {
    /// Points a front key at a record.
    ///
    /// # Errors
    ///
    /// The kernel refused the write; the entry is as it was. So for the others.
    fn write_svc(&mut self, key: &FrontKey, index: u32) -> Result<(), WriteError>;
    /// Removes a front key; that it is absent is no error.
    fn delete_svc(&mut self, key: &FrontKey) -> Result<(), WriteError>;
    /// Writes a record that nothing leads to.
    fn write_front(&mut self, index: u32, front: &Front) -> Result<(), WriteError>;
    /// Writes a range of clients that nothing leads to.
    fn write_source(&mut self, index: u32, source: &Source) -> Result<(), WriteError>;
    /// Writes slots that nothing leads to, one behind another from the first place on. Where one
    /// fails, others may be written.
    fn write_slots(&mut self, first: u32, slots: &[Slot]) -> Result<(), WriteError>;
    /// Writes backends that nothing leads to, each at its index, in their order. Says how many were
    /// written, and what ended it if those are not all.
    fn write_backends(&mut self, backends: &[(u32, Backend)]) -> (usize, Result<(), WriteError>);
    /// Says which sets a backend is in, which may be in use.
    fn move_backend(&mut self, index: u32, sets: Membership) -> Result<(), WriteError>;
    /// Marks a backend as gone.
    fn retire_backend(&mut self, index: u32) -> Result<(), WriteError>;
    /// Lets writes wait from now on, so that many go with one call: those of what nothing leads to, and
    /// of keys. They are made in an order in which nothing leads to what isn't written, and before
    /// anything that is in use changes. After one was refused, no other may be made.
    fn hold(&mut self);
    /// Makes the writes that wait; those that follow don't.
    ///
    /// # Errors
    ///
    /// The kernel refused some of them; which of them were made is not known.
    fn flush(&mut self) -> Result<(), WriteError>;
    /// Lets the counts of a service port begin anew.
    fn reset_tally(&mut self, service: u32) -> Result<(), WriteError>;
}

/// Reads the counts of programs.
pub trait Counts {
    /// How many open sockets remember a backend, modulo 2^64. Only programs count.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. So for the other.
    fn open_at(&self, index: u32) -> Result<u64, ReadError>;
    /// What the programs counted of a service port, since it came or the maps were made.
    fn tally(&self, service: u32) -> Result<Tally, ReadError>;
}

/// Reads the service maps.
pub trait MapReader: Counts {
    /// Whether the maps were made for this process and hold nothing; asked before it writes.
    fn is_new(&self) -> bool;
    /// Every front key and the index of its record.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. So for the others.
    fn fronts(&self) -> Result<Vec<(FrontKey, u32)>, ReadError>;
    /// A record.
    fn front(&self, index: u32) -> Result<Front, ReadError>;
    /// A slot.
    fn slot(&self, index: u32) -> Result<Slot, ReadError>;
    /// A range of clients.
    fn source(&self, index: u32) -> Result<Source, ReadError>;
    /// The backends from the first on, by index.
    fn backends(&self, entries: u32) -> Result<Vec<Backend>, ReadError>;
    /// What the programs counted of the service ports from the first id on.
    fn tallies(&self, entries: u32) -> Result<Vec<Tally>, ReadError>;
}

/// Reads and writes single entries of the steering maps.
pub trait SteeringMaps: Send {
    /// Every key and the index of its record.
    ///
    /// # Errors
    ///
    /// The kernel refused the read. So for the others that read.
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError>;
    /// The records from the first on, by index.
    fn records(&self, entries: u32) -> Result<Vec<Steered>, ReadError>;
    /// The cookie of the network namespace that the canary was seen in; 0 for none.
    fn host(&self) -> Result<u64, ReadError>;
    /// Forgets that cookie.
    ///
    /// # Errors
    ///
    /// The kernel refused the write.
    fn forget_host(&mut self) -> Result<(), WriteError>;
    /// Points a key at a record.
    ///
    /// # Errors
    ///
    /// The kernel refused the write; the entry is as it was. So for the others that write.
    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError>;
    /// Removes a key; that it is absent is no error.
    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError>;
    /// Writes a record that no key leads to.
    fn write_record(&mut self, index: u32, record: &Steered) -> Result<(), WriteError>;
}
