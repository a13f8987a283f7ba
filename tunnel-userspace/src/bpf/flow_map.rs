//! The kernel's map of flows.

use std::{path::Path, time::Duration};

use tunnel_common::{
    flow::{FROZEN_UNTIL, Flow, FlowKey, Phase},
    table,
};

use super::sys::MapHandle;
use crate::{
    flows::{self, FlowMap, SweepError},
    reconcile::{GracePeriod, ReadError, WriteError},
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

    /// Copies the entries that another map lacks, first those of open connections, until the other map is full.
    fn copy_to(&self, other: &Self) -> Result<(), SweepError> {
        let is_open = |flow: &Flow| {
            let phase = flow.seen.phase(flow.protocol);
            matches!(phase, Phase::Established | Phase::HalfClosed)
        };
        self.copy_some_to(other, is_open)?;
        self.copy_some_to(other, |flow| !is_open(flow))
    }

    fn copy_some_to(
        &self,
        other: &Self,
        is_wanted: impl Fn(&Flow) -> bool,
    ) -> Result<(), SweepError> {
        for flow in flows::entries(self) {
            let flow = flow?;
            if is_wanted(&flow) && !other.0.insert(&flow.key(), &flow)? {
                return Ok(());
            }
        }
        Ok(())
    }
}

/// Flows that move from a map to another one, of another size, while the programs that use it are replaced.
#[derive(Debug)]
pub struct MovingFlows {
    old: KernelFlows,
    new: KernelFlows,
    state: MapHandle<u32, u64>,
}

/// The maximum time for which no flow begins, if the daemon is killed meanwhile. The programs compare whole seconds. Packets
/// that arrive again and again keep a CPU busy.
const MAX_FREEZE: Duration = Duration::from_secs(2);

impl MovingFlows {
    /// Opens both maps, and copies the flows for the first time, which takes most of the time.
    pub(super) fn begin(old: &Path, new: &Path) -> Result<Self, SweepError> {
        let moving = Self {
            old: KernelFlows::open(old)?,
            new: KernelFlows::open(new)?,
            state: MapHandle::open(new, &table::PACKET_STATE)?,
        };
        moving.old.copy_to(&moving.new)?;
        Ok(moving)
    }

    /// Moves the flows, and calls `replace` to replace the programs. `now` is the time since boot.
    ///
    /// No flow begins from the last copy to the replacement, because a packet of one that the new programs don't know would
    /// reset it.
    pub fn finish(&self, grace: &impl GracePeriod, now: Duration, replace: impl FnOnce()) {
        let until = now.saturating_add(MAX_FREEZE).as_secs();
        let frozen = self.freeze(until);
        // A program may be about to begin a flow.
        if let Err(error) = grace.wait() {
            tracing::warn!(%error, "cannot wait for the programs; flows may be lost");
        }
        let copied = self.old.copy_to(&self.new);
        replace();
        let thawed = self.freeze(0);
        for result in [frozen, copied, thawed] {
            if let Err(error) = result {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(
                    error,
                    "cannot move all flows of packets; connections may break"
                );
            }
        }
    }

    fn freeze(&self, until: u64) -> Result<(), SweepError> {
        Ok(self.state.write(&FROZEN_UNTIL, &until)?)
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
