//! What others see of the owner: Services as they are programmed, counts, measures, problems.

mod concerns;
mod counted;
mod histogram;
mod measures;
mod published;
mod shown;
mod stats;
mod view;

use std::{collections::BTreeSet, time::Duration};

use jiff::Timestamp;

pub(super) use self::concerns::concerns;
pub use self::{
    counted::{Counted, PortCounts},
    histogram::Histogram,
    measures::SyncStats,
    published::Published,
    stats::Stats,
    view::{EndpointView, FrontView, PortView, ServiceView},
};
use self::{measures::Measures, shown::Shown};
use super::{
    desired::{Changed, Desired, served},
    sync::MapSync,
};
use crate::{
    model::{ObjectName, Update},
    parallel,
};

/// Fewer Services than these are shown one after the other.
const MANY: usize = 1024;

/// What was seen of changes and passes, and what is shown of Services.
#[derive(Debug, Default)]
pub(super) struct Observe {
    pub(super) measures: Measures,
    /// The Services, for others to read.
    pub(super) published: Published,
    /// Whether a source was not heard of since the start.
    stale: bool,
}

impl Observe {
    /// Takes note of what is about to change.
    pub(super) fn note(&mut self, desired: &Desired, update: &Update) {
        self.stale = update.stale;
        self.measures.stats.last_queued_at = Some(Timestamp::now());
        for (name, state) in &update.services {
            let before = desired.states.get(name);
            self.measures.note(name, before, served(state.as_ref()));
        }
    }

    /// Takes note of the plans that changed.
    pub(super) const fn planned(&mut self, changed: &Changed) {
        if changed.is_all {
            self.measures.all_anew();
        }
    }

    /// Shows some Services as they are planned and programmed now.
    pub(super) fn show<M>(
        &self,
        services: BTreeSet<ObjectName>,
        desired: &Desired,
        sync: &MapSync<M>,
    ) {
        let services: Vec<_> = services.into_iter().collect();
        let (actual, problems) = (&sync.ports.actual, sync.faults.problems());
        let shown = parallel::each(&services, MANY, |_, name| {
            Shown::of(name, desired, actual, problems.get(name))
        });
        self.published.put(services.into_iter().zip(shown));
    }

    /// Says in numbers how it is after a pass that has just ended.
    pub(super) fn describe<M>(
        &mut self,
        stats: &mut Stats,
        took: Duration,
        desired: &Desired,
        sync: &MapSync<M>,
    ) {
        stats.stale = self.stale;
        stats.describe(desired, sync);
        if sync.is_synced() {
            let (dirty, starved) = (&sync.dirty, &sync.starved);
            let is_open = |name: &ObjectName| dirty.contains(name) || starved.contains(name);
            self.measures.pass(took, Timestamp::now(), is_open);
            stats.sync = SyncStats {
                gaps: desired.gaps,
                planned: desired.planned,
                ..self.measures.stats.clone()
            };
        }
    }
}
