//! Moves the flows of packets to a map of another size, while the programs that use it are replaced.

use std::{
    collections::BTreeMap,
    path::Path,
    sync::mpsc::{self, RecvTimeoutError},
    thread,
    time::Duration,
};

use tunnel_common::{
    flow::{FROZEN_UNTIL, FlowKey},
    forward::RECENT_FLOWS_OF_CPU,
    table,
};

use super::{
    flow_map::KernelFlows,
    pin::Pin,
    pin_directory::{PinDirectory, PinError},
    sys::MapHandle,
};
use crate::{
    flows::{CopiedFlows, FlowCopy, SweepError},
    reconcile::GracePeriod,
};

/// The number of flows of each CPU that are copied again, because their first packets may still have been on their way.
const ON_THEIR_WAY: u32 = 64;

/// The maximum time for which no flow begins, if the daemon is killed meanwhile. The programs compare whole seconds. Packets
/// that arrive again and again keep a CPU busy.
const FREEZE: Duration = Duration::from_secs(2);

/// The interval at which the time is extended while the flows are moved, and the number of times, which limits the time for
/// which a call to the kernel that hangs keeps flows from beginning.
const EXTENSION_INTERVAL: Duration = Duration::from_millis(500);
const MAX_EXTENSIONS: u32 = 20;

/// Flows that move from a map to another one, of another size, while the programs that use it are replaced.
#[derive(Debug)]
pub struct MovingFlows {
    old: KernelFlows,
    new: KernelFlows,
    state: MapHandle<u32, u64>,
    recent: MapHandle<u32, FlowKey>,
    counts: MapHandle<u32, u32>,
    /// True if an earlier process was killed while it replaced the programs, so that some of them may use the new map.
    is_new_used: bool,
}

/// The flows that have been copied so far.
#[derive(Debug, Default)]
struct Progress {
    copied: CopiedFlows,
    /// The number of flows that each CPU had begun.
    counts: BTreeMap<u32, u32>,
}

impl MovingFlows {
    /// Opens both maps, and copies the flows that there are: if the daemon is killed before the programs are replaced, the next
    /// one finds them.
    pub(super) fn begin(old: &Path, new: &Path) -> Result<Self, SweepError> {
        Self::open(old, new, false)
    }

    fn open(old: &Path, new: &Path, is_new_used: bool) -> Result<Self, SweepError> {
        let moving = Self {
            old: KernelFlows::open(old)?,
            new: KernelFlows::open(new)?,
            state: MapHandle::open(new, &table::PACKET_STATE)?,
            recent: MapHandle::open(new, &table::RECENT_FLOWS)?,
            counts: MapHandle::open(new, &table::RECENT_COUNTS)?,
            is_new_used,
        };
        moving.copy_all()?;
        Ok(moving)
    }

    /// Opens the maps of a move that an earlier process did not finish before it was killed: some programs on links may still use
    /// the map that was replaced. Returns `None` if there is none, or if a map can't be opened, which is logged.
    pub(super) fn resume(pins: &PinDirectory, new: &Path) -> Result<Option<Self>, PinError> {
        let replaced = pins.replaced(new, table::FLOWS.name)?;
        let Some(old) = replaced.first() else {
            return Ok(None);
        };
        // All other maps are removed right before the first program is replaced.
        let is_new_used = Pin::all(old)?.len() == 1;
        let resumed = Self::open(old, new, is_new_used);
        if let Err(error) = &resumed {
            tracing::warn!(
                error = error as &dyn std::error::Error,
                "cannot move the flows of packets, which an earlier process has not done; their connections break"
            );
        }
        Ok(resumed.ok())
    }

    /// Moves the flows as they are now, and calls `replace` to replace the programs. `now` returns the time of the monotonic
    /// clock.
    ///
    /// No flow begins from the last copy to the replacement, because a packet of one that the new programs don't know would
    /// reset it.
    pub fn finish(
        &self,
        grace: &impl GracePeriod,
        now: impl Fn() -> Duration + Sync,
        replace: impl FnOnce(),
    ) {
        let progress = self.copy_again();
        let began = now();
        let frozen = self.while_frozen(&now, || {
            // A program may be about to begin a flow.
            if let Err(error) = grace.wait() {
                tracing::warn!(%error, "cannot wait for the programs; flows may be lost");
            }
            let copied = progress.and_then(|mut progress| {
                self.catch_up(&mut progress)?;
                self.replace_recent(&progress.copied)
            });
            replace();
            copied
        });
        let milliseconds = now().saturating_sub(began).as_millis();
        match frozen {
            Ok(()) => tracing::info!(milliseconds, "moved the flows of packets"),
            Err(error) => {
                let error = &error as &dyn std::error::Error;
                tracing::warn!(
                    error,
                    milliseconds,
                    "cannot move all flows of packets; connections may break"
                );
            }
        }
    }

    /// Calls a function while no flow begins.
    fn while_frozen(
        &self,
        now: &(impl Fn() -> Duration + Sync),
        work: impl FnOnce() -> Result<(), SweepError>,
    ) -> Result<(), SweepError> {
        let freeze = || self.freeze(now().saturating_add(FREEZE).as_secs());
        let frozen = freeze();
        let worked = thread::scope(|scope| {
            let (is_working, working) = mpsc::channel::<()>();
            let extended =
                thread::Builder::new().spawn_scoped(scope, move || extend(&freeze, &working));
            if let Err(error) = extended {
                tracing::warn!(%error, "flows may begin while they are moved");
            }
            let worked = work();
            drop(is_working);
            worked
        });
        let thawed = self.freeze(0);
        frozen.and(worked).and(thawed)
    }

    /// Copies all flows once more, since they have changed and others have begun, and then those that have begun meanwhile: the
    /// less is left, the shorter packets of new flows have to wait.
    fn copy_again(&self) -> Result<Progress, SweepError> {
        let mut progress = self.copy_all()?;
        self.catch_up(&mut progress)?;
        Ok(progress)
    }

    fn copy_all(&self) -> Result<Progress, SweepError> {
        let counts = self.counts.read_all()?.into_iter().collect();
        let copied = self.flows().copy_all()?;
        Ok(Progress { copied, counts })
    }

    /// Copies the flows that have begun since the last copy.
    fn catch_up(&self, progress: &mut Progress) -> Result<(), SweepError> {
        let counts: BTreeMap<_, _> = self.counts.read_all()?.into_iter().collect();
        let mut recent = Vec::new();
        for (cpu, count) in &counts {
            let before = progress.counts.get(cpu).copied().unwrap_or_default();
            let number = count.wrapping_sub(before).saturating_add(ON_THEIR_WAY);
            if number > RECENT_FLOWS_OF_CPU / 2 {
                // Some of the keys have been overwritten, or may be before they are read.
                *progress = self.copy_all()?;
                return Ok(());
            }
            let positions = (1..=number)
                .rev()
                .map(|age| count.wrapping_sub(age) % RECENT_FLOWS_OF_CPU);
            recent.extend(positions.map(|position| cpu * RECENT_FLOWS_OF_CPU + position));
        }
        for index in recent {
            let key = self.recent.get(&index)?;
            self.flows().copy_flow(&key, &mut progress.copied)?;
        }
        progress.counts = counts;
        Ok(())
    }

    const fn flows(&self) -> FlowCopy<'_, KernelFlows> {
        FlowCopy {
            old: &self.old,
            new: &self.new,
            is_new_used: self.is_new_used,
        }
    }

    /// Replaces the keys of recent flows, unless all flows were copied: if the new map is full, the programs look among recent
    /// flows for one that gives way, and would hardly find any that was copied.
    fn replace_recent(&self, copied: &CopiedFlows) -> Result<(), SweepError> {
        let keys = &copied.may_give_way;
        if !copied.is_cut_short || keys.is_empty() {
            return Ok(());
        }
        let all = (0..self.recent.entries()).zip(keys.iter().copied().cycle());
        let (_, written) = self.recent.write_batch(&Vec::from_iter(all));
        Ok(written?)
    }

    fn freeze(&self, until: u64) -> Result<(), SweepError> {
        Ok(self.state.write(&FROZEN_UNTIL, &until)?)
    }
}

/// Calls `freeze` again and again until the sender of `working` is dropped, or has not been for too long.
fn extend(freeze: &impl Fn() -> Result<(), SweepError>, working: &mpsc::Receiver<()>) {
    for _ in 0..MAX_EXTENSIONS {
        if working.recv_timeout(EXTENSION_INTERVAL) != Err(RecvTimeoutError::Timeout) {
            return;
        }
        if let Err(error) = freeze() {
            tracing::warn!(%error, "flows may begin while they are moved");
        }
    }
}
