//! Sweeps the flows from time to time, and reports when the map is full.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, sleep},
};
use tracing::{debug, info, warn};
use tunnel_common::{
    flow::{Phase, Timeouts},
    reason::Reason,
};

use super::{FlowCounts, FlowMap, SweepError, make_room, now, sweep};
use crate::{
    drain,
    error_chain::chain,
    model::{FlowNeeds, ObjectWarning},
    publish,
};

/// The minimum pause between two sweeps.
const PAUSE: Duration = Duration::from_secs(10);
/// The pause after a sweep, as a multiple of the time that it took, so that sweeps take little of a CPU.
const PAUSE_FACTOR: u32 = 30;
/// The time for which a warning about a full map is kept after the last refused flow.
const KEEP_WARNING: Duration = Duration::from_secs(300);

/// The flows of translated packets, as shown in the status.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct FlowsView {
    /// The number of flows in each state, as of the last sweep.
    pub states: BTreeMap<String, usize>,
    /// The number of entries in the map. A flow has two, or three if it is masqueraded.
    pub entries: usize,
    /// The maximum number of entries; 0 if packets are not translated.
    pub capacity: u32,
    /// The error from the last sweep, if it failed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}

/// The settings of [`FlowSweeper`].
pub struct SweeperSettings {
    /// The timeouts of idle flows.
    pub timeouts: Timeouts,
    /// The name of this node's Node object.
    pub node: String,
    /// Returns the number of flows that were refused because the map was full.
    pub refused: Box<dyn Fn() -> u64 + Send>,
}

impl std::fmt::Debug for SweeperSettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("SweeperSettings")
    }
}

/// The channels to which [`FlowSweeper`] publishes.
pub type FlowSenders = (
    watch::Sender<FlowsView>,
    watch::Sender<Arc<[ObjectWarning]>>,
    watch::Sender<FlowNeeds>,
);

/// The task that sweeps the flows.
pub struct FlowSweeper<M> {
    map: Arc<M>,
    settings: SweeperSettings,
    view: watch::Sender<FlowsView>,
    warnings: watch::Sender<Arc<[ObjectWarning]>>,
    needs: watch::Sender<FlowNeeds>,
    /// The number of refused flows after the last sweep, and the time at which it last grew.
    refused: (u64, Option<Instant>),
}

impl<M: FlowMap> FlowSweeper<M> {
    /// Creates the task. Publishes the flows to `view`, problems for an operator to `warnings`, and what
    /// the flows need to `needs`.
    pub fn new(
        map: Arc<M>,
        settings: SweeperSettings,
        (view, warnings, needs): FlowSenders,
    ) -> Self {
        let refused = ((settings.refused)(), None);
        Self {
            map,
            settings,
            view,
            warnings,
            needs,
            refused,
        }
    }

    /// Runs until the drain begins.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        loop {
            let began = Instant::now();
            self.sweep().await;
            let pause = PAUSE.max(began.elapsed() * PAUSE_FACTOR);
            tokio::select! {
                () = drain::begun(&mut draining) => return,
                () = sleep(pause) => {}
            }
        }
    }

    async fn sweep(&mut self) {
        let (map, timeouts) = (Arc::clone(&self.map), self.settings.timeouts);
        let now = now();
        let swept = spawn_blocking(move || sweep_and_make_room(&*map, &timeouts, now)).await;
        let swept = match swept {
            Ok(swept) => swept.map_err(|error| chain(&error)),
            Err(error) => Err(chain(&error)),
        };
        match swept {
            Ok(counts) => self.publish(counts),
            Err(problem) => {
                warn!(%problem, "cannot sweep the flows; the programs still end them by themselves");
                self.view.send_modify(|view| view.problem = Some(problem));
            }
        }
        self.report_refused();
    }

    fn publish(&self, counts: FlowCounts) {
        if counts.removed > 0 {
            debug!(flows = counts.removed, "removed flows that are over");
        }
        let count = |phase: Phase| counts.by_phase.get(&phase).copied().unwrap_or(0);
        let states = Phase::ALL.map(|phase| (phase.label().to_owned(), count(phase)));
        let view = FlowsView {
            states: states.into(),
            entries: counts.entries,
            capacity: self.map.capacity(),
            problem: None,
        };
        publish::publish_if_changed(&self.view, view);
        let needs = FlowNeeds {
            pod_links: counts.on_pod_links > 0,
            replies_to_host: counts.of_host > 0,
        };
        publish::publish_if_changed(&self.needs, needs);
    }

    /// Publishes a warning while flows are refused because the map is full.
    fn report_refused(&mut self) {
        let total = (self.settings.refused)();
        let (before, last) = &mut self.refused;
        if total > *before {
            *last = Some(Instant::now());
        }
        *before = total;
        let is_recent = last.is_some_and(|last| last.elapsed() < KEEP_WARNING);
        let warnings = is_recent.then(|| {
            let note = format!(
                "new flows from outside the node are refused: all {} flows in bpf.maps.flows are open connections; \
                 raise bpf.maps.flows",
                self.map.capacity() / 3
            );
            ObjectWarning::for_node(&self.settings.node, Reason::FlowsFull, note)
        });
        publish::publish_if_changed(&self.warnings, warnings.into_iter().collect());
    }
}

/// Sweeps the flows and, if the map is still almost full, removes idle ones.
fn sweep_and_make_room<M: FlowMap>(
    map: &M,
    timeouts: &Timeouts,
    now: u32,
) -> Result<FlowCounts, SweepError> {
    let counts = sweep(map, timeouts, now)?;
    if let Some(excess) = make_room::excess(counts.entries, map.capacity()) {
        let removed = make_room::make_room(map, (timeouts, now), excess)?;
        if removed > 0 {
            info!(
                entries = counts.entries,
                capacity = map.capacity(),
                removed,
                "the map of flows is almost full; idle flows were removed"
            );
        }
    }
    Ok(counts)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU64, Ordering};

    use tunnel_common::{addr::Protocol, flow::Seen};

    use super::*;
    use crate::flows::fixture::{MemoryFlows, answered, dialled};

    #[test]
    fn a_sweep_leaves_room_for_new_flows() {
        let map = MemoryFlows::with_capacity(300);
        let now = 1_000_000;
        for port in 1..=100 {
            let client = format!("203.0.113.9:{port}");
            let flow = dialled(&client, Protocol::UDP, now - port, Seen::NOTHING);
            map.insert_all(flow, now - port, answered());
        }

        let counts = sweep_and_make_room(&map, &Timeouts::DEFAULT, now).expect("swept");

        assert_eq!((counts.entries, map.len()), (300, 270));
        sweep_and_make_room(&map, &Timeouts::DEFAULT, now).expect("swept");
        assert_eq!(map.len(), 270);
    }

    #[tokio::test]
    async fn refused_flows_are_reported_and_the_others_are_counted() {
        let map = Arc::new(MemoryFlows::default());
        let now = now();
        map.insert_all(
            dialled("203.0.113.9:1", Protocol::TCP, now, Seen::NOTHING),
            now,
            Seen::NOTHING,
        );
        let (view, warnings) = (watch::Sender::default(), watch::Sender::new(Arc::from([])));
        let (flows, reported) = (view.subscribe(), warnings.subscribe());
        let needs = watch::Sender::<FlowNeeds>::default();
        let needed = needs.subscribe();
        let refused = Arc::new(AtomicU64::new(3));
        let count = Arc::clone(&refused);
        let settings = SweeperSettings {
            timeouts: Timeouts::DEFAULT,
            node: "node-a".to_owned(),
            refused: Box::new(move || count.load(Ordering::Relaxed)),
        };
        let mut sweeper = FlowSweeper::new(map, settings, (view, warnings, needs));

        sweeper.sweep().await;

        // Those that an earlier process has counted are not reported.
        assert!(reported.borrow().is_empty());
        let counted = flows.borrow().clone();
        assert_eq!(counted.states.get("half_open"), Some(&1));
        assert_eq!((counted.entries, counted.capacity), (3, 97));
        assert!(!needed.borrow().pod_links);

        refused.store(4, Ordering::Relaxed);
        sweeper.sweep().await;
        let warning = reported.borrow().first().cloned().expect("a warning");
        assert_eq!(warning.reason, Reason::FlowsFull);
        assert!(warning.note.contains("all 32 flows"), "{}", warning.note);
    }
}
