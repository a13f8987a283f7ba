use std::{collections::BTreeSet, net::IpAddr, sync::Arc, time::Duration};

use tunnel_common::{service::FrontKey, table::Sizes};

use super::{
    access::{Counts, MapReader, MapWriter},
    desired::{Changed, Desired, Listeners, Settings},
    grace::{Grace, Retired},
    observe::{Observe, Published, ServiceView, Stats, SyncStats, concerns},
    sync::{AdoptError, Canary, MapSync},
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
    held_back: Option<BTreeSet<ObjectName>>,
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
        grace: &mut impl Grace,
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
    /// to be given back to [`Self::free`] after a grace period.
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

    /// Takes over what the maps hold, as a process that starts does, after a first pass of which some
    /// was refused. From then on each write is a call of its own, so that one that is refused again
    /// stops no other.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; nothing is written then, and the same can be tried again.
    pub fn begin_anew(&mut self, grace: &mut impl Grace) -> Result<(), AdoptError> {
        self.sync.begin_anew(grace)
    }

    /// Reads the maps again and compares them with what is known of them. Where they differ, they
    /// are taken over anew and everything is written again. Gives the number of differences.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; what was known stays.
    pub fn audit(&mut self, grace: &mut impl Grace) -> Result<u64, AdoptError> {
        let differences = self.sync.audit(&self.desired, grace)?;
        if differences > 0 {
            self.observe.measures.all_anew();
        }
        Ok(differences)
    }

    /// Gives back what no program can reach any more, but for what open connections keep. `more`
    /// says whether more is on its way.
    pub fn free(&mut self, retired: &Retired, more: bool) {
        self.sync.free(retired, more);
    }

    /// Gives back what open connections kept, as far as those have closed. What found no room before
    /// is dirty then.
    pub fn look_at_occupied(&mut self) {
        self.sync.look_at_occupied();
    }

    /// Writes the canary, dials it and removes it. Gives what came of it, if it was written, and what
    /// was taken out of reach.
    pub(super) fn dial_canary<R>(
        &mut self,
        canary: &Canary,
        dial: impl FnOnce() -> R,
    ) -> (Option<R>, Retired) {
        let dialled = self.sync.ports.dial_canary(canary, dial);
        (dialled, self.sync.ports.take_retired())
    }
}

impl<M: Counts> Reconciler<M> {
    /// The Services that were read and what is programmed of them: those of a name, which may begin
    /// with the namespace and a slash, or all.
    #[must_use]
    pub fn services(&self, name: Option<&str>) -> Vec<ServiceView> {
        self.published().services(self.maps(), name)
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
        self.observe.published()
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

    pub(super) const fn listeners(&mut self) -> &mut Listeners {
        &mut self.desired.listeners
    }

    /// Lets Services wait, from here on, until it is known whether something listens at their fronts.
    pub(super) fn hold_back(&mut self) {
        self.held_back.get_or_insert_default();
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

    /// Whether it is not known what the maps hold, since some writes of the first pass were refused.
    /// Nothing is written before [`Self::begin_anew`].
    #[must_use]
    pub fn is_in_doubt(&self) -> bool {
        self.sync.is_in_doubt()
    }

    /// How many indices of backends that are gone open connections keep.
    #[must_use]
    pub fn occupied(&self) -> usize {
        self.sync.ports.actual.occupied()
    }

    pub(super) fn concerns(&self, steering: &BTreeSet<SteeringProblem>) -> Vec<Concern> {
        concerns(&self.desired, &self.sync, steering)
    }

    pub(super) fn describe(&self, stats: &mut Stats) {
        self.observe.describe(stats, &self.desired, &self.sync);
    }

    /// Measures a pass that has just ended.
    pub(super) fn measure(&mut self, stats: &mut SyncStats, took: Duration) {
        let Self {
            desired,
            sync,
            observe,
            ..
        } = self;
        observe.measure(stats, took, desired, sync);
    }
}
