use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use tunnel_common::{service::FrontKey, table::Sizes};

use super::{
    access::{AdoptError, Counts, MapReader, MapWriter},
    desired::{Changed, Desired, Settings},
    grace::{Grace, Retired},
    observe::{Observe, ServiceView, Stats, concerns},
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
    pub(super) observe: Observe,
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
            observe: Observe::default(),
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
        let passed = self.sync.pass(&self.desired);
        self.observe
            .show(passed.services, &self.desired, &self.sync);
        passed.retired
    }

    /// Reads the maps again and compares them with what is known of them. Where they differ, they
    /// are taken over anew and everything is written again. Gives the number of differences.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; what was known stays.
    pub fn audit(&mut self, grace: &impl Grace) -> Result<u64, AdoptError> {
        let differences = self.sync.audit(&self.desired, grace)?;
        if differences > 0 {
            self.observe.measures.all_anew();
        }
        Ok(differences)
    }
}

impl<M: Counts> Reconciler<M> {
    /// The Services that were read and what is programmed of them: those of a name, which may begin
    /// with the namespace and a slash, or all.
    #[must_use]
    pub fn services(&self, name: Option<&str>) -> Vec<ServiceView> {
        self.observe.published.services(self.maps(), name)
    }
}

impl<M> Reconciler<M> {
    /// The maps.
    #[must_use]
    pub const fn maps(&self) -> &M {
        &self.sync.ports.maps
    }

    /// Plans what changed. Nothing is written.
    pub fn update(&mut self, update: Update) {
        self.observe.note(&self.desired, &update);
        for (service, _) in &update.services {
            self.sync.ports.unclaimed.told(service);
        }
        let (synced, whole) = (update.synced, update.whole);
        let changed = self.desired.apply(update.nodes, update.services);
        self.observe.planned(&changed);
        self.sync.heard(changed.services, synced, whole);
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
            self.sync.touch(std::mem::take(held_back));
        }
    }

    fn touch(&mut self, changed: Changed) {
        self.observe.planned(&changed);
        self.sync.touch(changed.services);
    }

    /// What load balancers are told of Services, if it is not what was given last.
    pub fn take_health(&mut self) -> Option<Arc<HealthChecks>> {
        self.sync
            .is_synced()
            .then(|| self.desired.take_health())
            .flatten()
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
        self.observe
            .describe(stats, took, &self.desired, &self.sync);
    }
}
