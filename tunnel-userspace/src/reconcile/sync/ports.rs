//! The service maps together with their tracked content. The order of writes is safe at every step: first new
//! entries that nothing refers to yet (backends, slots, records), then one hash update per frontend, then the
//! removal of entries that nothing refers to any more. A crash between two writes leaves either the complete
//! old entry of a frontend or the complete new one.

use tunnel_common::{
    addr::Protocol,
    reason::Reason,
    service::{Backend, Frontend, FrontendKey, Membership, IndexRange, SourceRange, ServiceCounts},
    table::MapSizes,
};

use super::{
    actual::{Actual, Programmed, Standing},
    diff::{Diff, Shortage, record},
    entries::slots,
    reading::{self, Stray},
};
use crate::{
    plan::{PortName, PortPlan, BackendTarget},
    reconcile::{
        access::{AdoptError, MapReader, MapWriter, ReadError, WriteError},
        grace::{RetiredEntry, GracePeriod, Retired},
        problems::PortProblem,
    },
};

/// A change of the maps was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// The maps have no room.
    #[error("{}", .0.reason.meaning())]
    Full(Shortage),
    /// The kernel refused a write.
    #[error("{}", Reason::WriteFailed.meaning())]
    Write(#[from] WriteError),
}

impl Refused {
    /// Returns the problem with the service port that was to be changed.
    pub(super) fn problem(&self) -> PortProblem {
        let text = self.to_string();
        match self {
            Self::Full(Shortage { reason, .. }) => PortProblem {
                reason: *reason,
                text,
            },
            Self::Write(error) => PortProblem {
                reason: Reason::WriteFailed,
                text: format!("{text}: {error}: {}", error.source),
            },
        }
    }
}

/// Returns a shortage that ends once retired entries are freed.
const fn full(reason: Reason) -> Refused {
    let is_passing = true;
    Refused::Full(Shortage { reason, is_passing })
}

/// The service maps, and their tracked content.
pub(crate) struct Ports<M> {
    pub(crate) maps: M,
    pub(crate) actual: Actual,
    /// Entries that were removed since the last [`Self::take_retired`].
    pub(super) retired: Retired,
    /// True if some retired entries are not freed yet, so that there will be more room.
    pub(super) waiting: bool,
}

impl<M: MapReader + MapWriter> Ports<M> {
    /// Starts with empty maps of these sizes.
    pub(super) fn new(maps: M, sizes: MapSizes) -> Self {
        Self {
            maps,
            actual: Actual::empty(sizes),
            retired: Retired::default(),
            waiting: false,
        }
    }

    /// Reads the content of the maps, as at a start, and removes invalid entries. Returns the number of
    /// invalid keys.
    ///
    /// # Errors
    ///
    /// A map can't be read or written; the tracked content stays, and the call can be repeated.
    pub(super) fn adopt(&mut self, grace: &impl GracePeriod) -> Result<usize, AdoptError> {
        let (actual, stray) = reading::read(&self.maps, self.actual.sizes)?;
        self.actual = self.usable(actual, &stray, grace)?;
        self.count_unused_anew()?;
        self.retired = Retired::default();
        Ok(stray.fronts.len())
    }

    /// Reads the maps, and compares them with their tracked content. If they differ, their content becomes
    /// the tracked one. Returns the number of differences.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`].
    pub(super) fn audit(&mut self, grace: &impl GracePeriod) -> Result<usize, AdoptError> {
        let (fresh, stray) = reading::read(&self.maps, self.actual.sizes)?;
        let strays = stray.fronts.len() + stray.backends.len();
        let differences = fresh.differences(&self.actual) + strays;
        if differences > 0 {
            let mut fresh = self.usable(fresh, &stray, grace)?;
            fresh.take_names(&mut self.actual);
            self.actual = fresh;
        }
        Ok(differences)
    }

    /// Frees retired entries after their grace period, except for backend indices with open connections.
    /// `more` is true if another batch of retired entries waits.
    pub(super) fn free(&mut self, retired: &Retired, more: bool) {
        for entry in &retired.0 {
            let actual = &mut self.actual;
            match *entry {
                RetiredEntry::Frontend(index) => actual.free_fronts.give(index),
                RetiredEntry::Slots(set) => actual.sets.give(set),
                RetiredEntry::SourceRanges(set) => actual.sources.give(set),
                RetiredEntry::Backend(index) => {
                    let free = &mut actual.free_backends;
                    actual.occupied.free(index, &self.maps, free);
                }
                RetiredEntry::PortId(id) => {
                    actual.free_ids.give(id);
                    self.count_anew(id);
                }
            }
        }
        self.waiting = more;
    }

    /// Frees the indices of removed backends whose connections have all closed. Returns the number of freed
    /// indices.
    pub(super) fn look_at_occupied(&mut self) -> usize {
        let actual = &mut self.actual;
        actual.occupied.look(&self.maps, &mut actual.free_backends)
    }

    /// Returns the entries that were removed since the last call.
    pub(in crate::reconcile) fn take_retired(&mut self) -> Retired {
        let retired = std::mem::take(&mut self.retired);
        self.waiting |= !retired.0.is_empty();
        retired
    }

    /// Writes the new and changed entries of a service port's plan. Returns the difference; its deletions are
    /// left to [`Self::finish`].
    pub(super) fn program(
        &mut self,
        id: u32,
        protocol: Protocol,
        plan: &PortPlan,
    ) -> Result<Diff, Refused> {
        let diff = Diff::between(&self.actual, id, plan);
        diff.room(&self.actual, plan).map_err(Refused::Full)?;
        self.add_backends(id, protocol, &diff.new_backends)?;
        let sources = self.write_sources(&diff.new_sources)?;
        let mut sets = [IndexRange::default(); 2];
        let written = self.write_fronts(plan, &diff, &mut sets);
        // Frees new lists that no record refers to, since a write failed.
        for set in sets {
            self.actual.sets.drop_unused(set);
        }
        self.actual.sources.drop_unused(sources);
        written?;
        // Last, so that no client loses its backend before the frontends have the new sets.
        for (index, sets) in &diff.moves {
            self.maps.write_backend_sets(*index, *sets)?;
            self.actual.note(*index, |known| known.sets = *sets);
        }
        Ok(diff)
    }

    /// Removes the entries that are no longer planned, after [`Self::program`] has written the new ones.
    pub(super) fn finish(&mut self, name: Option<&PortName>, diff: &Diff) -> Result<(), Refused> {
        let mut deletes = diff.deletes.iter();
        deletes.try_for_each(|key| self.delete_front(diff.id, key))?;
        let mut gone = diff.gone.iter();
        gone.try_for_each(|(target, index)| self.retire_backend(diff.id, target, *index))?;
        self.retire_unused(name, diff.id);
        Ok(())
    }

    /// Removes all entries of an id that is assigned to no service port.
    pub(super) fn remove(&mut self, id: u32) -> Result<(), Refused> {
        let diff = Diff::between(&self.actual, id, &PortPlan::default());
        self.finish(None, &diff)
    }

    /// Retires the id of a service port, if it has no entries.
    pub(super) fn retire_unused(&mut self, name: Option<&PortName>, id: u32) {
        let port = self.actual.ports.get(&id);
        if port.is_none_or(|it| it.fronts.is_empty() && it.backends.is_empty()) {
            self.actual.ports.remove(&id);
            self.retired.0.push(RetiredEntry::PortId(id));
            if let Some(name) = name {
                self.actual.forget_name(name);
            }
        }
    }

    fn write_fronts(
        &mut self,
        plan: &PortPlan,
        diff: &Diff,
        [cluster, local]: &mut [IndexRange; 2],
    ) -> Result<(), Refused> {
        *cluster = self.write_set(diff.id, diff.cluster, &plan.cluster)?;
        *local = self.write_set(diff.id, diff.local, &plan.local)?;
        for (key, front) in &diff.upserts {
            let sets = (*cluster, *local);
            let record = record(&self.actual, (*key, front), diff.id, plan, sets);
            self.write_front(record)?;
        }
        Ok(())
    }

    /// Allocates and writes backends, up to the first error.
    fn add_backends(
        &mut self,
        id: u32,
        protocol: Protocol,
        wanted: &[(BackendTarget, Membership)],
    ) -> Result<(), Refused> {
        let mut backends = Vec::with_capacity(wanted.len());
        for (target, sets) in wanted {
            // The caller has checked that there is room for all of them.
            let room = self.actual.free_backends.take();
            let index = room.ok_or_else(|| full(Reason::BackendsFull))?;
            let backend = Backend {
                address: target.address,
                port: target.port,
                protocol,
                flags: 0,
                service: id,
                state: self.actual.standing(index).state.next_generation(),
                sets: *sets,
            };
            backends.push((index, backend));
        }
        let (written, result) = self.maps.write_backends(&backends);
        for (place, ((index, backend), (target, _))) in backends.iter().zip(wanted).enumerate() {
            if place >= written {
                self.actual.free_backends.give(*index);
                continue;
            }
            let Backend { state, sets, .. } = *backend;
            let written = Standing { state, sets };
            self.actual.note(*index, |known| *known = written);
            self.actual.used_backends += 1;
            let port = self.actual.ports.entry(id).or_default();
            port.backends.insert(*target, *index);
        }
        result.map_err(Refused::Write)
    }

    /// Writes the slots of a set, unless the equal set `kept` exists. No program reads them before a record
    /// refers to them.
    fn write_set(
        &mut self,
        id: u32,
        kept: Option<IndexRange>,
        targets: &[BackendTarget],
    ) -> Result<IndexRange, Refused> {
        if let Some(kept) = kept {
            return Ok(kept);
        }
        let backends = targets.iter().map(|target| self.actual.backend(id, target));
        let backends: Option<Vec<_>> = backends.collect();
        let backends = backends.ok_or_else(|| full(Reason::BackendsFull))?;
        let room = self.actual.sets.take(backends.len());
        let set = room.ok_or_else(|| full(Reason::SlotsFull))?;
        let slots: Vec<_> = slots(&backends).collect();
        if let Err(error) = self.maps.write_slots(set.base, &slots) {
            self.actual.sets.give(set);
            return Err(error.into());
        }
        self.actual.sets.put(set, backends);
        Ok(set)
    }

    /// Writes ranges of clients. No program reads them before a record refers to them.
    fn write_sources(&mut self, ranges: &[SourceRange]) -> Result<IndexRange, Refused> {
        let room = self.actual.sources.take(ranges.len());
        let set = room.ok_or_else(|| full(Reason::SourceRangesFull))?;
        for (place, range) in (set.base..).zip(ranges) {
            if let Err(error) = self.maps.write_source_range(place, range) {
                self.actual.sources.give(set);
                return Err(error.into());
            }
        }
        self.actual.sources.put(set, ranges.to_vec());
        Ok(set)
    }

    fn write_front(&mut self, record: Frontend) -> Result<(), Refused> {
        let room = self.actual.free_fronts.take();
        let index = room.ok_or_else(|| full(Reason::FrontendsFull))?;
        let key = record.key;
        let written = self
            .maps
            .write_frontend(index, &record)
            .and_then(|()| self.maps.write_frontend_key(&key, index));
        if let Err(error) = written {
            self.actual.free_fronts.give(index);
            return Err(error.into());
        }
        self.actual.hold(&record);
        if let Some(old) = self.actual.fronts.insert(key, Programmed { index, record }) {
            self.retire_front(&old);
        }
        let port = self.actual.ports.entry(record.service).or_default();
        port.fronts.insert(key, ());
        Ok(())
    }

    fn delete_front(&mut self, id: u32, key: &FrontendKey) -> Result<(), Refused> {
        let known = self.actual.fronts.get(key);
        if known.is_none_or(|front| front.record.service != id) {
            return Ok(());
        }
        self.maps.delete_frontend_key(key)?;
        if let Some(old) = self.actual.fronts.remove(key) {
            self.retire_front(&old);
        }
        Ok(())
    }

    fn retire_front(&mut self, old: &Programmed) {
        if let Some(port) = self.actual.ports.get_mut(&old.record.service) {
            port.fronts.remove(&old.record.key);
        }
        self.retired.0.push(RetiredEntry::Frontend(old.index));
        self.actual.release(&old.record, &mut self.retired);
    }

    fn retire_backend(&mut self, id: u32, target: &BackendTarget, index: u32) -> Result<(), Refused> {
        if self.actual.backend(id, target) != Some(index) {
            return Ok(());
        }
        self.maps.retire_backend(index)?;
        let retire = |known: &mut Standing| known.state = known.state.removed();
        self.actual.note(index, retire);
        if let Some(port) = self.actual.ports.get_mut(&id) {
            port.backends.remove(target);
        }
        self.actual.used_backends -= 1;
        self.retired.0.push(RetiredEntry::Backend(index));
        Ok(())
    }

    /// Resets the counters of a freed id.
    fn count_anew(&mut self, id: u32) {
        if let Err(error) = self.maps.reset_service_counters(id) {
            tracing::warn!(id, %error, "cannot reset the counters of a removed service port");
        }
    }

    /// Resets the counters of unused ids, which an earlier process may not have reset.
    fn count_unused_anew(&mut self) -> Result<(), ReadError> {
        let tallies = self.maps.all_service_counters(self.actual.sizes.frontend_entries())?;
        let counted = (0_u32..).zip(tallies);
        let counted = counted.filter(|(_, tally)| *tally != ServiceCounts::default());
        let unused = counted.filter(|(id, _)| !self.actual.ports.contains_key(id));
        let unused: Vec<u32> = unused.map(|(id, _)| id).collect();
        for id in unused {
            self.count_anew(id);
        }
        Ok(())
    }

    /// Completes the content that was read from the maps: removes invalid entries, waits for a grace period,
    /// and finds the free backend indices.
    fn usable(
        &mut self,
        mut actual: Actual,
        stray: &Stray,
        grace: &impl GracePeriod,
    ) -> Result<Actual, AdoptError> {
        for key in &stray.fronts {
            tracing::warn!(frontend = %key, "removing a frontend with an invalid record");
            self.maps.delete_frontend_key(key)?;
        }
        let mut backends = stray.backends.iter();
        backends.try_for_each(|index| self.maps.retire_backend(*index))?;
        // A program that started before the earlier process ended, or before the keys above were removed,
        // may still read entries that are free now.
        grace.wait().map_err(AdoptError::Grace)?;
        actual.find_occupied(&self.maps);
        Ok(actual)
    }
}
