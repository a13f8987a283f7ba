use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use tunnel_common::{service::FrontKey, table::Sizes};

use super::{
    access::{AdoptError, MapReader, MapWriter},
    desired::{Changed, Desired, Settings, served},
    grace::{Grace, Retired},
    observe::{Measures, Published, Stats, SyncStats, concerns, show},
    sync::MapSync,
};
use crate::{
    model::{Concern, ObjectName, Update},
    plan::{HealthChecks, SteeringProblem},
};

/// Owns the service maps, and keeps them as planned.
pub struct Reconciler<M> {
    pub(super) desired: Desired,
    pub(super) sync: MapSync<M>,
    pub(super) measures: Measures,
    /// The published Services.
    published: Published,
    /// True if a source has not answered since the start.
    stale: bool,
    /// Services with frontends that no poll for listeners has covered yet; they are not written before.
    /// `None` if polling is off.
    pub(super) held_back: Option<BTreeSet<ObjectName>>,
}

impl<M: MapReader + MapWriter> Reconciler<M> {
    /// Takes over the maps with their present content.
    ///
    /// # Errors
    ///
    /// The maps can't be read, or invalid entries can't be removed.
    pub fn adopt(
        maps: M,
        sizes: Sizes,
        grace: &impl Grace,
        settings: Settings,
    ) -> Result<Self, AdoptError> {
        Ok(Self {
            sync: MapSync::adopt(maps, sizes, grace)?,
            desired: Desired::new(settings),
            measures: Measures::default(),
            published: Published::default(),
            stale: false,
            held_back: None,
        })
    }

    /// Writes the Services that changed. Those that can't be written stay dirty. Returns the entries that
    /// are no longer in use, to be freed after a grace period.
    pub fn pass(&mut self) -> Retired {
        if let Some(held_back) = &mut self.held_back {
            let listeners = &self.desired.listeners;
            let is_held = |service: &ObjectName| listeners.has_unknown(service);
            held_back.extend(self.sync.dirty.extract_if(.., is_held));
        }
        let services = self.sync.pass(&self.desired);
        show(services, &self.desired, &self.sync, &self.published);
        self.sync.ports.take_retired()
    }

    /// Reads the maps again, and compares them with their tracked content. If they differ, their content
    /// becomes the tracked one, and every Service is marked dirty. Returns the number of differences.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; the tracked content stays as it was.
    pub fn audit(&mut self, grace: &impl Grace) -> Result<u64, AdoptError> {
        let differences = self.sync.audit(&self.desired, grace)?;
        self.measures.is_full |= differences > 0;
        Ok(differences)
    }
}

impl<M> Reconciler<M> {
    /// Returns the maps.
    #[must_use]
    pub const fn maps(&self) -> &M {
        &self.sync.ports.maps
    }

    /// Returns the published Services.
    #[must_use]
    pub const fn published(&self) -> &Published {
        &self.published
    }

    /// Plans the changes of an update. Writes nothing.
    pub fn update(&mut self, update: Update) {
        self.stale = update.stale;
        self.measures.stats.last_queued_at = Some(Timestamp::now());
        for (name, state) in &update.services {
            self.sync.unclaimed.told(name);
            let before = self.desired.states.get(name);
            self.measures.note(name, before, served(state.as_ref()));
        }
        let (synced, whole) = (update.synced, update.whole);
        let changed = self.desired.apply(update.nodes, update.services);
        self.sync.heard(synced, whole);
        self.touch(changed);
    }

    /// Replaces the addresses of this node. Writes nothing.
    pub fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        let changed = self.desired.set_addresses(addresses);
        self.touch(changed);
    }

    /// Replaces the set of frontends with a local listener. Frontends on addresses of other nodes are
    /// ignored. Writes nothing.
    pub fn set_listeners(&mut self, found: BTreeSet<FrontKey>) {
        let changed = self.desired.set_listeners(&found);
        self.touch(changed);
        if let Some(held_back) = &mut self.held_back {
            self.sync.dirty.append(held_back);
        }
    }

    fn touch(&mut self, mut changed: Changed) {
        self.measures.is_full |= changed.is_all;
        self.sync.dirty.append(&mut changed.services);
    }

    /// Returns the health checks of Services; `None` before the first sync.
    #[must_use]
    pub fn health(&self) -> Option<&Arc<HealthChecks>> {
        self.sync.is_synced().then_some(&self.desired.health)
    }

    /// Returns true if a change waits to be written.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.sync.is_dirty()
    }

    /// Returns the problems that an operator must act on.
    pub(super) fn concerns(&self, steering: &BTreeSet<SteeringProblem>) -> Vec<Concern> {
        concerns(&self.desired, &self.sync, steering)
    }

    /// Fills in the statistics of a sync that has just ended.
    pub(super) fn describe(&mut self, stats: &mut Stats, took: Duration) {
        stats.stale = self.stale;
        stats.describe(&self.desired, &self.sync);
        if self.sync.is_synced() {
            let (dirty, starved) = (&self.sync.dirty, &self.sync.starved);
            let is_open = |name: &ObjectName| dirty.contains(name) || starved.contains(name);
            self.measures.pass(took, Timestamp::now(), is_open);
            stats.sync = SyncStats {
                gaps: self.desired.gaps,
                planned: self.desired.planned,
                ..self.measures.stats.clone()
            };
        }
    }
}
