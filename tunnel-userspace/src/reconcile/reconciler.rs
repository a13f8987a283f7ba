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

/// The owner of the service maps.
pub struct Reconciler<M> {
    pub(super) desired: Desired,
    pub(super) sync: MapSync<M>,
    pub(super) measures: Measures,
    /// The Services, for others to read.
    published: Published,
    /// Whether a source was not heard of since the start.
    stale: bool,
    /// Services that wait until it is known whether something listens at their fronts; nothing where
    /// none has to.
    pub(super) held_back: Option<BTreeSet<ObjectName>>,
}

impl<M: MapReader + MapWriter> Reconciler<M> {
    /// Takes over what the maps hold.
    ///
    /// # Errors
    ///
    /// The maps can't be read, or what makes no sense in them can't be removed.
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

    /// Writes what changed. What can't be written stays dirty. Gives what was taken out of reach,
    /// to be given back after a grace period.
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

    /// Reads the maps again and compares them with what is known of them. Where they differ, they
    /// are taken over anew and everything is written again. Gives the number of differences.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; what was known stays.
    pub fn audit(&mut self, grace: &impl Grace) -> Result<u64, AdoptError> {
        let differences = self.sync.audit(&self.desired, grace)?;
        self.measures.is_full |= differences > 0;
        Ok(differences)
    }
}

impl<M> Reconciler<M> {
    /// The maps.
    #[must_use]
    pub const fn maps(&self) -> &M {
        &self.sync.ports.maps
    }

    /// What is shown of Services, for others to read.
    #[must_use]
    pub const fn published(&self) -> &Published {
        &self.published
    }

    /// Plans what changed. Nothing is written.
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

    /// Takes the addresses that this node has now. Nothing is written.
    pub fn set_addresses(&mut self, addresses: BTreeSet<IpAddr>) {
        let changed = self.desired.set_addresses(addresses);
        self.touch(changed);
    }

    /// Takes at which fronts of this node's own addresses something listens now; the others have no
    /// listener. Nothing is written.
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

    /// The health checks of Services; nothing before anything is programmed.
    #[must_use]
    pub fn health(&self) -> Option<&Arc<HealthChecks>> {
        self.sync.is_synced().then_some(&self.desired.health)
    }

    /// Whether something is waiting to be written.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.sync.is_dirty()
    }

    /// What of it an operator must act on.
    pub(super) fn concerns(&self, steering: &BTreeSet<SteeringProblem>) -> Vec<Concern> {
        concerns(&self.desired, &self.sync, steering)
    }

    /// Says in numbers how it is after a pass that has just ended.
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
