//! The kernel's map of flows.

use tunnel_common::{
    flow::{Flow, FlowKey},
    table,
};

use super::sys::MapHandle;
use crate::{
    flows::FlowMap,
    reconcile::{ReadError, WriteError},
};

/// The number of entries that are read with one system call. The kernel reads whole buckets of a hash, which have fewer
/// entries.
const BATCH: u32 = 1024;

/// The kernel's map of flows.
#[derive(Debug)]
pub struct KernelFlows(MapHandle<FlowKey, Flow>);

impl KernelFlows {
    pub(super) fn open(directory: &std::path::Path) -> Result<Self, ReadError> {
        MapHandle::open(directory, &table::FLOWS).map(Self)
    }
}

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
