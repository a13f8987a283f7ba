//! The maps as they are, and their way to the maps as they should be.

mod actual;
mod alloc;
mod canary;
mod diff;
mod faults;
mod lists;
mod mode;
mod occupied;
mod order;
mod ports;
mod reading;
mod slots;
mod unclaimed;

use std::collections::{BTreeMap, BTreeSet};

use litemap::LiteMap;
use tunnel_common::{reason::Reason, table::Sizes};

pub use self::canary::Canary;
pub(super) use self::{
    actual::{Actual, PortUse},
    lists::Lists,
    ports::Ports,
    reading::read,
    slots::slots,
};
use self::{diff::Diff, faults::Faults, mode::Mode, ports::Upserted};
use super::{
    access::{AdoptError, MapReader, MapWriter, WriteError},
    desired::Desired,
    grace::{Grace, Retired},
    problems::{Problem, Problems},
};
use crate::{model::ObjectName, plan::PortName};

/// The Services to be written, and the maps they are written to.
pub(super) struct MapSync<M> {
    pub(super) ports: Ports<M>,
    mode: Mode,
    /// Services that are to be written.
    pub(super) dirty: BTreeSet<ObjectName>,
    /// Services that wait for room that is taken by entries which are not freed yet.
    pub(super) starved: BTreeSet<ObjectName>,
    /// Whether something was retired since the Services that found no room were last tried.
    has_shrunk: bool,
    pub(super) faults: Faults,
    /// Differences found between the maps and what was known of them.
    pub(super) drift: u64,
}

impl<M: MapReader + MapWriter> MapSync<M> {
    /// Takes over what the maps hold.
    pub(super) fn adopt(maps: M, sizes: Sizes, grace: &impl Grace) -> Result<Self, AdoptError> {
        let (ports, strays) = Ports::adopt(maps, sizes, grace)?;
        Ok(Self {
            ports,
            mode: Mode::Waiting,
            dirty: BTreeSet::new(),
            starved: BTreeSet::new(),
            has_shrunk: false,
            faults: Faults::default(),
            drift: u64::try_from(strays).unwrap_or(u64::MAX),
        })
    }

    /// Writes what changed. What can't be written stays dirty. Gives the Services that were written, or
    /// tried.
    pub(super) fn pass(&mut self, desired: &Desired) -> BTreeSet<ObjectName> {
        if !self.mode.writes() {
            return BTreeSet::new();
        }
        if self.mode != Mode::Following {
            self.find_names(desired);
        }
        let before = self.ports.actual.usage();
        let services = std::mem::take(&mut self.dirty);
        if self.mode == Mode::Starting {
            self.ports.maps.hold();
            self.ports.actual.make_room(services.len());
        }
        let mut leftovers = Vec::new();
        for service in &services {
            self.write(desired, service, &mut leftovers);
        }
        if let Err(error) = self.ports.maps.flush() {
            self.doubt(&error, desired);
            return services;
        }
        self.mode = self.mode.passed();
        // Deletions come last, so that an address that moves from one Service to another is never
        // without an owner.
        for (name, diff) in leftovers {
            if let Err(refused) = self.ports.finish(&name, &diff) {
                self.dirty.insert(name.service.clone());
                let problems = Problems::from([(name.clone(), refused.problem())]);
                self.note(&name.service, problems);
            }
        }
        self.remove_unclaimed();
        self.has_shrunk |= before.exceeds(&self.ports.actual.usage());
        services
    }

    /// Finds the names of the ids that the maps hold: an id belongs to the port that now owns one
    /// of its fronts. One whose fronts nobody owns is unclaimed.
    fn find_names(&mut self, desired: &Desired) {
        let Ports {
            actual, unclaimed, ..
        } = &mut self.ports;
        let mut taken: BTreeSet<u32> = BTreeSet::new();
        for (name, plan) in desired.plans.values().flatten() {
            let mut holders = actual.holders(plan.fronts.keys());
            let holder = holders.find(|id| !taken.contains(id));
            drop(holders);
            let is_owner = |key| desired.claims.owner(key) == Some(name);
            if let Some(id) = holder
                && plan.fronts.keys().any(is_owner)
            {
                taken.insert(id);
                actual.set_id(name.clone(), id);
            }
        }
        unclaimed.set(actual.nameless());
        self.dirty.extend(desired.plans.keys().cloned());
        if unclaimed.may_go() {
            return;
        }
        for (service, plans) in &desired.plans {
            // What names their endpoints may be what was refused.
            let lost = plans.iter().filter(|(name, plan)| {
                let id = actual.id(name);
                let port = id.and_then(|id| actual.ports.get(&id));
                !plan.has_endpoints && port.is_some_and(|port| !port.backends.is_empty())
            });
            unclaimed.keep(service, lost.map(|(name, _)| name.clone()).collect());
        }
        let (orphans, held) = unclaimed.len();
        tracing::warn!(
            orphans,
            held,
            "not everything is known yet, or something was refused: what an earlier process programmed stays"
        );
    }

    fn write(
        &mut self,
        desired: &Desired,
        service: &ObjectName,
        leftovers: &mut Vec<(PortName, Diff)>,
    ) {
        let (wanted, mut problems) = desired.wanted(service);
        let known = self.ports.actual.ids.get(service);
        let known = known.into_iter().flat_map(LiteMap::keys);
        let unwanted = known.filter(|name| !wanted.contains_key(*name));
        let unwanted: Vec<PortName> = unwanted.cloned().collect();
        let unwanted = unwanted.iter().map(|name| (name, None));
        let wanted = wanted.iter().map(|(name, plan)| (name, Some(&**plan)));
        for (name, plan) in unwanted.chain(wanted) {
            match self.ports.upsert(name, plan, &mut problems) {
                Ok(Upserted::Written(diff)) => {
                    leftovers.extend(diff.map(|diff| (name.clone(), diff)));
                }
                Ok(Upserted::Starved) => {
                    self.starved.insert(service.clone());
                }
                Err(refused) => {
                    self.dirty.insert(service.clone());
                    problems.insert(name.clone(), refused.problem());
                }
            }
        }
        self.note(service, problems);
    }

    fn note(&mut self, service: &ObjectName, problems: Problems) {
        let was_tried = !self.starved.contains(service);
        self.faults.note(service, problems, was_tried);
    }

    fn remove_unclaimed(&mut self) {
        for id in self.ports.unclaimed.take_due() {
            if let Err(refused) = self.ports.remove(id) {
                let problem = refused.problem();
                tracing::warn!(id, text = %problem.text, "what an earlier process programmed is not removed");
                self.faults.count(problem.reason);
                self.ports.unclaimed.put_back(id, problem);
            }
        }
    }

    fn doubt(&mut self, error: &WriteError, desired: &Desired) {
        let error = error as &dyn std::error::Error;
        tracing::warn!(error, "cannot write everything at once, beginning anew");
        self.faults.count(Reason::WriteFailed);
        self.mode = Mode::Doubtful;
        // It is not known what was taken out of reach.
        self.ports.retired = Retired::default();
        // Something is to be written, whatever comes.
        self.dirty.extend(desired.plans.keys().cloned());
    }

    /// Takes over what the maps hold, as a process that starts does, after a first pass of which some
    /// was refused.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; nothing is written then, and the same can be tried again.
    pub(super) fn begin_anew(&mut self, grace: &impl Grace) -> Result<(), AdoptError> {
        self.ports.adopt_again(grace)?;
        self.starved.clear();
        self.mode = self.mode.read_again();
        Ok(())
    }

    /// Reads the maps again and compares them with what is known of them. Where they differ, they
    /// are taken over anew and everything is written again. Gives the number of differences.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; what was known stays.
    pub(super) fn audit(
        &mut self,
        desired: &Desired,
        grace: &impl Grace,
    ) -> Result<u64, AdoptError> {
        if self.ports.waiting || self.mode != Mode::Following {
            return Ok(0);
        }
        let differences = u64::try_from(self.ports.audit(grace)?).unwrap_or(u64::MAX);
        if differences > 0 {
            self.dirty.extend(desired.plans.keys().cloned());
            self.dirty.extend(self.ports.actual.ids.keys().cloned());
            self.drift += differences;
        }
        Ok(differences)
    }

    /// Gives back what no program can reach any more, but for what open connections keep. `more`
    /// says whether more is on its way.
    pub(super) fn free(&mut self, retired: &Retired, more: bool) {
        self.ports.free(retired, more);
        self.dirty.append(&mut self.starved);
        self.look_at_occupied();
        if std::mem::take(&mut self.has_shrunk) {
            self.dirty.extend(self.faults.without_room().cloned());
        }
    }

    /// Gives back what open connections kept, as far as those have closed. What found no room before
    /// is dirty then.
    pub(super) fn look_at_occupied(&mut self) {
        if self.ports.look_at_occupied() > 0 {
            self.dirty.extend(self.faults.without_room().cloned());
        }
    }
}

impl<M> MapSync<M> {
    /// Takes the state of the sources.
    pub(super) fn heard(&mut self, synced: bool, whole: bool) {
        self.mode = self.mode.heard(synced);
        self.dirty.extend(self.ports.unclaimed.heard(whole));
    }

    /// Lets some Services be written again.
    pub(super) fn touch(&mut self, services: BTreeSet<ObjectName>) {
        if self.dirty.is_empty() {
            self.dirty = services;
        } else {
            self.dirty.extend(services);
        }
    }

    /// Whether every source has told its first list.
    pub(super) fn is_synced(&self) -> bool {
        self.mode != Mode::Waiting
    }

    /// Whether it is not known what the maps hold. Nothing is written before [`Self::begin_anew`].
    pub(super) fn is_in_doubt(&self) -> bool {
        self.mode == Mode::Doubtful
    }

    /// Whether something is waiting to be written.
    pub(super) fn is_dirty(&self) -> bool {
        self.is_synced() && (!self.dirty.is_empty() || self.ports.unclaimed.is_due())
    }

    /// Every problem there is.
    pub(super) fn problems(&self) -> impl Iterator<Item = &Problem> {
        let problems = self.faults.problems().values().flat_map(BTreeMap::values);
        problems.chain(self.ports.unclaimed.problems())
    }
}
