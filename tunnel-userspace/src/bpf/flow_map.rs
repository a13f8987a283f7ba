//! The kernel's map of flows.

use std::{path::Path, thread, time::Duration};

use tunnel_common::{
    flow::{Flow, FlowKey},
    table,
};

use super::sys::MapHandle;
use crate::{
    flows::{FlowMap, WritableFlowMap},
    reconcile::{ReadError, WriteError},
};

/// The number of entries that are read with one system call. The kernel reads whole buckets of a hash, which have fewer
/// entries.
const BATCH: u32 = 1024;

/// The kernel's map of flows.
#[derive(Debug)]
pub struct KernelFlows(MapHandle<FlowKey, Flow>);

impl KernelFlows {
    pub(super) fn open(directory: &Path) -> Result<Self, ReadError> {
        MapHandle::open(directory, &table::FLOWS).map(Self)
    }

    /// Writes an entry. The kernel allocates its memory without waiting, so that an attempt can fail although there is
    /// enough.
    #[expect(
        clippy::disallowed_methods,
        reason = "the programs are replaced in one go, without other tasks in between"
    )]
    fn write_patiently(&self, entry: &Flow) -> Result<(), WriteError> {
        let mut attempts = 0;
        loop {
            attempts += 1;
            match self.0.write(&entry.key(), entry) {
                Err(error)
                    if error.source.raw_os_error() == Some(libc::ENOMEM)
                        && attempts < MAX_ATTEMPTS =>
                {
                    thread::sleep(PAUSE);
                }
                written => return written,
            }
        }
    }
}

/// The maximum number of attempts to write an entry for which there is no memory, and the pause between two of them.
const MAX_ATTEMPTS: u32 = 100;
const PAUSE: Duration = Duration::from_millis(5);

impl FlowMap for KernelFlows {
    fn capacity(&self) -> u32 {
        self.0.entries()
    }

    fn read_some(&self, position: Option<u32>) -> Result<(Vec<Flow>, Option<u32>), ReadError> {
        self.0.read_batch(position, BATCH)
    }

    fn find(&self, key: &FlowKey) -> Result<Option<Flow>, ReadError> {
        self.0.find(key)
    }

    fn remove(&self, key: &FlowKey) -> Result<(), WriteError> {
        self.0.remove(key)
    }
}

impl WritableFlowMap for KernelFlows {
    fn write(&self, entry: &Flow) -> Result<bool, WriteError> {
        match self.write_patiently(entry) {
            Ok(()) => Ok(true),
            Err(error) if error.source.raw_os_error() == Some(libc::E2BIG) => Ok(false),
            Err(error) => Err(error),
        }
    }
}
