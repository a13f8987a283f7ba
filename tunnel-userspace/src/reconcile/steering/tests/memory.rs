//! In-memory steering maps.

use std::io;

use tunnel_common::table;
use zerocopy::FromZeros as _;

use super::super::*;
use crate::reconcile::ReadError;

/// In-memory steering maps.
#[derive(Clone, Default)]
pub(super) struct Memory {
    pub(super) keys: BTreeMap<SteeringKey, u32>,
    pub(super) records: BTreeMap<u32, SteeringRecord>,
    pub(super) capacity: usize,
    pub(super) host_namespace: u64,
    /// The number of further writes that will succeed, or `None` if all will.
    pub(super) writes_left: Option<u32>,
    /// The number of writes to a record in use that changed anything other than its removal time.
    pub(super) unsafe_writes: u32,
    /// The published targets. If this is set, writing a key whose target has not been published panics.
    pub(super) published: Option<watch::Receiver<Arc<SteeringTargets>>>,
}

impl Memory {
    fn count_write(&mut self) -> Result<(), WriteError> {
        match &mut self.writes_left {
            Some(0) => Err(WriteError {
                map: table::STEER.name,
                source: io::Error::other("refused"),
            }),
            Some(left) => {
                *left -= 1;
                Ok(())
            }
            None => Ok(()),
        }
    }
}

impl SteeringMaps for Memory {
    fn keys(&self) -> Result<Vec<(SteeringKey, u32)>, ReadError> {
        let keys = self.keys.iter();
        Ok(keys.map(|(key, index)| (*key, *index)).collect())
    }

    fn records(&self, entries: u32) -> Result<Vec<SteeringRecord>, ReadError> {
        let known = |index| self.records.get(&index).copied();
        let record = |index| known(index).unwrap_or_else(SteeringRecord::new_zeroed);
        Ok((0..entries).map(record).collect())
    }

    fn host_namespace(&self) -> Result<u64, ReadError> {
        Ok(self.host_namespace)
    }

    fn write_host_namespace(&mut self, cookie: u64) -> Result<(), WriteError> {
        self.count_write()?;
        self.host_namespace = cookie;
        Ok(())
    }

    fn write_key(&mut self, key: &SteeringKey, index: u32) -> Result<(), WriteError> {
        self.count_write()?;
        if let Some(published) = &self.published {
            let is_known = published.borrow().contains_key(&index);
            assert!(is_known, "the target of index {index} is not published yet");
        }
        self.keys.insert(*key, index);
        assert!(self.keys.len() <= self.capacity, "the hash is full");
        Ok(())
    }

    fn delete_key(&mut self, key: &SteeringKey) -> Result<(), WriteError> {
        self.count_write()?;
        self.keys.remove(key);
        Ok(())
    }

    fn write_record(&mut self, index: u32, record: &SteeringRecord) -> Result<(), WriteError> {
        self.count_write()?;
        let old = self.records.insert(index, *record);
        let is_in_use = self.keys.values().any(|used| *used == index);
        let removed = |old| SteeringRecord {
            removed_at: record.removed_at,
            ..old
        };
        if is_in_use && old.is_some_and(|old| removed(old) != *record) {
            self.unsafe_writes += 1;
        }
        Ok(())
    }
}
