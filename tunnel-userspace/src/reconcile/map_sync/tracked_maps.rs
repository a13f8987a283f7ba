//! The service maps, together with their tracked contents. Writes are made in an order that is safe at every
//! step: first, new entries that nothing refers to yet (backends, slots, records); then, one hash map update
//! per frontend; finally, the removal of entries that nothing refers to any more. A crash between two writes
//! leaves each frontend with either its complete old entry or its complete new one.

use tunnel_common::{
    addr::Protocol,
    reason::Reason,
    service::{Backend, Frontend, FrontendKey, IndexRange, Membership, ServiceCounts, SourceRange},
    table::MapSizes,
};

use super::{
    actual::{ActualContent, BackendStatus, ProgrammedFrontend},
    diff::{PortDiff, RecordBuilder},
    fitted_plan::{FittedPlan, FittedSet, weighted_members},
    namespace_shares::NamespaceShares,
    read_maps::{self, InvalidEntries},
    ref_counted_lists::SetRecipe,
    set_values::slots,
};
use crate::{
    plan::{BackendTarget, PortName, SlotLayout},
    reconcile::{
        grace_period::{GracePeriod, RetiredEntries, RetiredEntry},
        map_access::{AdoptError, MapReader, MapWriter, ReadError, WriteError},
        port_problems::PortProblem,
    },
};

/// The reason why a change to the maps was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum ChangeError {
    /// The maps have no free entry at present.
    #[error("{}", .0.meaning())]
    NoRoom(Reason),
    /// The kernel refused a write.
    #[error("{}", Reason::WriteFailed.meaning())]
    Write(#[from] WriteError),
}

impl ChangeError {
    /// Converts the error into a problem with the service port that should have been changed.
    pub(super) fn problem(&self) -> PortProblem {
        let text = self.to_string();
        match self {
            Self::NoRoom(reason) => PortProblem::new(*reason, text),
            Self::Write(error) => {
                let text = format!("{text}: {error}: {}", error.source);
                PortProblem::new(Reason::WriteFailed, text)
            }
        }
    }
}

/// The service maps and their tracked contents.
pub(crate) struct TrackedMaps<M> {
    pub(crate) maps: M,
    pub(crate) actual: ActualContent,
    /// Entries that have been removed since the last call to [`Self::take_retired`].
    pub(super) retired: RetiredEntries,
    /// True if some retired entries have not been freed yet, so that there will be more room once they are.
    pub(super) has_waiting: bool,
}

impl<M: MapReader + MapWriter> TrackedMaps<M> {
    /// Creates an instance for maps of the given sizes. The tracked contents are empty until [`Self::adopt`]
    /// reads the maps.
    pub(super) fn new(maps: M, sizes: MapSizes, namespace_share: u8) -> Self {
        let mut actual = ActualContent::empty(sizes);
        actual.shares = NamespaceShares::new(namespace_share);
        Self {
            maps,
            actual,
            retired: RetiredEntries::default(),
            has_waiting: false,
        }
    }

    /// Reads the contents of the maps from scratch and removes invalid entries. Returns the number of invalid
    /// frontend keys.
    ///
    /// # Errors
    ///
    /// Returns an error if a map can't be read or written, or if the wait for a grace period fails. The call
    /// can be retried. The tracked contents are left unchanged, unless the error is in reading the counters,
    /// which happens last.
    pub(super) fn adopt(&mut self, grace: &impl GracePeriod) -> Result<usize, AdoptError> {
        let (actual, invalid) = read_maps::read_maps(&self.maps, self.actual.sizes)?;
        self.actual = self.complete_read(actual, &invalid, grace)?;
        self.reset_unused_counters()?;
        self.retired = RetiredEntries::default();
        Ok(invalid.frontend_keys.len())
    }

    /// Reads the maps and compares them with their tracked contents. If they differ, the contents just read
    /// become the tracked contents. Returns the number of differences.
    ///
    /// # Errors
    ///
    /// Returns the same errors as [`Self::adopt`].
    pub(super) fn audit(&mut self, grace: &impl GracePeriod) -> Result<usize, AdoptError> {
        let (fresh, invalid) = read_maps::read_maps(&self.maps, self.actual.sizes)?;
        let invalid_entries = invalid.frontend_keys.len() + invalid.backends.len();
        let differences = fresh.differences(&self.actual) + invalid_entries;
        if differences > 0 {
            let mut fresh = self.complete_read(fresh, &invalid, grace)?;
            fresh.move_names_from(&mut self.actual);
            self.actual = fresh;
        }
        Ok(differences)
    }

    /// Frees retired entries after their grace period, except for the indices of backends that still have
    /// open connections. `more` is true if another batch of retired entries is waiting.
    pub(super) fn free(&mut self, retired: &RetiredEntries, more: bool) {
        for entry in &retired.0 {
            let actual = &mut self.actual;
            match *entry {
                RetiredEntry::Frontend(index) => actual.free_frontends.free(index),
                RetiredEntry::Slots(set) => actual.sets.free(set),
                RetiredEntry::SourceRanges(set) => actual.source_ranges.free(set),
                RetiredEntry::Backend(index) => {
                    let free = &mut actual.free_backends;
                    if actual.draining.free_or_drain(index, &self.maps, free) {
                        actual.shares.remove_former_owner(index);
                    } else {
                        actual.shares.add_draining(index);
                    }
                }
                RetiredEntry::PortId(id) => {
                    // If the id were reused, the next daemon would take the new owner for that of the
                    // removed backends.
                    if actual.shares.has_removed(id) {
                        actual.free_ids.free_last(id);
                    } else {
                        actual.free_ids.free(id);
                    }
                    self.reset_counters(id);
                }
            }
        }
        self.has_waiting = more;
    }

    /// Frees the indices of removed backends whose connections have all been closed. Returns how many indices
    /// were freed.
    pub(super) fn poll_draining(&mut self) -> usize {
        let actual = &mut self.actual;
        let freed = actual.draining.poll(&self.maps, &mut actual.free_backends);
        for index in &freed {
            actual.shares.remove_former_owner(*index);
        }
        freed.len()
    }

    /// Returns true if there will be more room once retired entries are freed.
    pub(super) fn is_waiting(&self) -> bool {
        self.has_waiting || !self.retired.0.is_empty()
    }

    /// Returns the entries that have been removed since the last call.
    pub(in crate::reconcile) fn take_retired(&mut self) -> RetiredEntries {
        let retired = std::mem::take(&mut self.retired);
        self.has_waiting |= !retired.0.is_empty();
        retired
    }

    /// Writes a service port's new and changed entries to the maps. Returns the full diff; its deletions are
    /// left to [`Self::remove_unplanned`].
    pub(super) fn write_plan(
        &mut self,
        id: u32,
        protocol: Protocol,
        fitted: &FittedPlan<'_>,
    ) -> Result<PortDiff, ChangeError> {
        let diff = PortDiff::between(&self.actual, id, fitted);
        if diff.upserts.len() > self.actual.free_frontends.free_count() {
            return Err(ChangeError::NoRoom(Reason::FrontendsFull));
        }
        self.write_backends(id, protocol, &diff.new_backends)?;
        let sources = self.write_source_ranges(&diff.new_source_ranges)?;
        let mut sets = [IndexRange::default(); 2];
        let written = self.write_frontends(fitted, &diff, &mut sets);
        // If a write failed, this frees the new lists that no record refers to.
        for set in sets {
            self.actual.sets.free_unused(set);
        }
        self.actual.source_ranges.free_unused(sources);
        written?;
        // The set memberships are written last, so that no client loses its backend before the frontends have
        // the new sets.
        for (index, sets) in &diff.set_changes {
            self.maps.write_backend_sets(*index, *sets)?;
            self.actual
                .update_backend_status(*index, |known| known.membership = *sets);
        }
        Ok(diff)
    }

    /// Removes the entries that are no longer planned, after [`Self::write_plan`] has written the new ones.
    pub(super) fn remove_unplanned(
        &mut self,
        name: Option<&PortName>,
        diff: &PortDiff,
    ) -> Result<(), ChangeError> {
        let mut deletes = diff.deletes.iter();
        deletes.try_for_each(|key| self.delete_frontend(diff.id, key))?;
        let mut removed = diff.removed_backends.iter();
        let retired =
            removed.try_for_each(|(target, index)| self.retire_backend(diff.id, target, *index));
        self.actual.recount(diff.id, None);
        retired?;
        self.retire_id_if_unused(name, diff.id);
        Ok(())
    }

    /// Removes all entries with the given id, which must not be assigned to any service port.
    pub(super) fn remove_all(&mut self, id: u32) -> Result<(), ChangeError> {
        let diff = PortDiff::between(&self.actual, id, &FittedPlan::empty());
        self.remove_unplanned(None, &diff)
    }

    /// Retires a service port's id if the port has no entries left in the maps.
    pub(super) fn retire_id_if_unused(&mut self, name: Option<&PortName>, id: u32) {
        let port = self.actual.ports.get(&id);
        if port.is_none_or(|it| it.frontends.is_empty() && it.backends.is_empty()) {
            self.actual.remove_port(id);
            self.retired.0.push(RetiredEntry::PortId(id));
            if let Some(name) = name {
                self.actual.remove_name(name);
            }
        }
    }

    fn write_frontends(
        &mut self,
        fitted: &FittedPlan<'_>,
        diff: &PortDiff,
        [cluster, local]: &mut [IndexRange; 2],
    ) -> Result<(), ChangeError> {
        *cluster = self.write_set(diff.id, fitted, (fitted.cluster, Membership::CLUSTER))?;
        *local = match fitted.local {
            FittedSet::SameAsCluster => *cluster,
            own @ (FittedSet::Empty | FittedSet::Existing(_) | FittedSet::New(_)) => {
                self.write_set(diff.id, fitted, (own, Membership::LOCAL))?
            }
        };
        if diff.upserts.is_empty() {
            return Ok(());
        }
        let sets = (*cluster, *local);
        let records = RecordBuilder::new(&self.actual, diff.id, fitted, sets);
        let upserts = diff.upserts.iter();
        let upserts = upserts.map(|(key, frontend)| records.build(*key, frontend));
        let upserts: Vec<Frontend> = upserts.collect();
        // Without the abandoned frontends, no record may refer to the port's lists until the new ones are
        // written.
        let held = if fitted.abandoned.is_empty() {
            Vec::new()
        } else {
            upserts.clone()
        };
        held.iter().for_each(|it| self.actual.add_references(it));
        let mut abandoned = fitted.abandoned.iter();
        let written = abandoned
            .try_for_each(|key| self.delete_frontend(diff.id, key))
            .and_then(|()| {
                upserts
                    .into_iter()
                    .try_for_each(|it| self.write_frontend(it))
            });
        for record in &held {
            self.actual.remove_references(record, &mut self.retired);
        }
        written
    }

    /// Allocates and writes backends, stopping at the first error.
    fn write_backends(
        &mut self,
        id: u32,
        protocol: Protocol,
        wanted: &[(BackendTarget, Membership)],
    ) -> Result<(), ChangeError> {
        let mut backends = Vec::with_capacity(wanted.len());
        for (target, sets) in wanted {
            // The caller has checked that there is room for all of them.
            let room = self.actual.free_backends.allocate();
            let index = room.ok_or(ChangeError::NoRoom(Reason::BackendsFull))?;
            let backend = Backend {
                address: target.address,
                port: target.port,
                protocol,
                flags: 0,
                service: id,
                state: self.actual.backend_status(index).state.next_generation(),
                sets: *sets,
            };
            backends.push((index, backend));
        }
        let (written, result) = self.maps.write_backends(&backends);
        for (position, ((index, backend), (target, _))) in backends.iter().zip(wanted).enumerate() {
            if position >= written {
                self.actual.free_backends.free(*index);
                continue;
            }
            let Backend { state, sets, .. } = *backend;
            let written = BackendStatus {
                state,
                membership: sets,
            };
            self.actual
                .update_backend_status(*index, |known| *known = written);
            self.actual.used_backends += 1;
            let port = self.actual.ports.entry(id).or_default();
            port.backends.insert(*target, *index);
        }
        result.map_err(ChangeError::Write)
    }

    /// Computes and writes a set's slots, unless the set is already in the maps. No program reads the slots
    /// until a record refers to them.
    fn write_set(
        &mut self,
        id: u32,
        fitted: &FittedPlan<'_>,
        (fitted_set, set): (FittedSet, Membership),
    ) -> Result<IndexRange, ChangeError> {
        let layout = match fitted_set {
            FittedSet::Empty | FittedSet::SameAsCluster => return Ok(IndexRange::default()),
            FittedSet::Existing(range) => return Ok(range),
            FittedSet::New(layout) => layout,
        };
        let members = weighted_members(&fitted.backends, set);
        let indices = members.iter().map(|(target, weight)| {
            let index = self.actual.backend(id, target);
            Some((index?, *weight))
        });
        let indices: Option<Box<[(u32, u32)]>> = indices.collect();
        let indices = indices.ok_or(ChangeError::NoRoom(Reason::BackendsFull))?;
        let room = self.actual.sets.allocate(layout.slot_count(&members));
        let set = room.ok_or(ChangeError::NoRoom(Reason::SlotsFull))?;
        let distributed = layout.distribute(&members).into_iter();
        let backends = distributed.filter_map(|member| Some(indices.get(member)?.0));
        let backends: Vec<u32> = backends.collect();
        let slots: Vec<_> = slots(&backends).collect();
        if let Err(error) = self.maps.write_slots(set.base, &slots) {
            self.actual.sets.free(set);
            return Err(error.into());
        }
        self.actual.sets.insert(set, backends);
        if layout != SlotLayout::Plain {
            let members = indices;
            let recipe = SetRecipe { layout, members };
            self.actual.sets.set_recipe(set, recipe);
        }
        Ok(set)
    }

    /// Writes source ranges. No program reads them until a record refers to them.
    fn write_source_ranges(&mut self, ranges: &[SourceRange]) -> Result<IndexRange, ChangeError> {
        let room = self.actual.source_ranges.allocate(ranges.len());
        let set = room.ok_or(ChangeError::NoRoom(Reason::SourceRangesFull))?;
        for (index, range) in (set.base..).zip(ranges) {
            if let Err(error) = self.maps.write_source_range(index, range) {
                self.actual.source_ranges.free(set);
                return Err(error.into());
            }
        }
        self.actual.source_ranges.insert(set, ranges.to_vec());
        Ok(set)
    }

    pub(super) fn write_frontend(&mut self, record: Frontend) -> Result<(), ChangeError> {
        let room = self.actual.free_frontends.allocate();
        let index = room.ok_or(ChangeError::NoRoom(Reason::FrontendsFull))?;
        let key = record.key;
        let written = self
            .maps
            .write_frontend(index, &record)
            .and_then(|()| self.maps.write_frontend_key(&key, index));
        if let Err(error) = written {
            self.actual.free_frontends.free(index);
            return Err(error.into());
        }
        self.actual.add_references(&record);
        if let Some(old) = self
            .actual
            .frontends
            .insert(key, ProgrammedFrontend { index, record })
        {
            self.retire_frontend(&old);
        }
        let port = self.actual.ports.entry(record.service).or_default();
        port.frontends.insert(key, ());
        Ok(())
    }

    fn delete_frontend(&mut self, id: u32, key: &FrontendKey) -> Result<(), ChangeError> {
        let known = self.actual.frontends.get(key);
        if known.is_none_or(|frontend| frontend.record.service != id) {
            return Ok(());
        }
        self.maps.delete_frontend_key(key)?;
        if let Some(old) = self.actual.frontends.remove(key) {
            self.retire_frontend(&old);
        }
        Ok(())
    }

    fn retire_frontend(&mut self, old: &ProgrammedFrontend) {
        if let Some(port) = self.actual.ports.get_mut(&old.record.service) {
            port.frontends.remove(&old.record.key);
        }
        self.retired.0.push(RetiredEntry::Frontend(old.index));
        self.actual
            .remove_references(&old.record, &mut self.retired);
    }

    fn retire_backend(
        &mut self,
        id: u32,
        target: &BackendTarget,
        index: u32,
    ) -> Result<(), ChangeError> {
        if self.actual.backend(id, target) != Some(index) {
            return Ok(());
        }
        self.maps.retire_backend(index)?;
        let retire = |known: &mut BackendStatus| known.state = known.state.removed();
        self.actual.update_backend_status(index, retire);
        if let Some(port) = self.actual.ports.get_mut(&id) {
            port.backends.remove(target);
            let namespace = port.namespace.as_ref();
            self.actual.shares.add_retired(index, id, namespace);
        }
        self.actual.used_backends -= 1;
        self.retired.0.push(RetiredEntry::Backend(index));
        Ok(())
    }

    /// Resets the counters for an id that no service port has.
    fn reset_counters(&mut self, id: u32) {
        if let Err(error) = self.maps.reset_service_counts(id) {
            tracing::warn!(id, %error, "cannot reset the counters of a removed service port");
        }
    }

    /// Resets the counters for unused ids, since an earlier process may not have reset them.
    fn reset_unused_counters(&mut self) -> Result<(), ReadError> {
        let counts = self
            .maps
            .all_service_counts(self.actual.sizes.frontend_entries())?;
        let non_zero = (0_u32..).zip(counts);
        let non_zero =
            non_zero.filter(|(_, counts_of_id)| *counts_of_id != ServiceCounts::default());
        let unused = non_zero.filter(|(id, _)| !self.actual.ports.contains_key(id));
        let unused: Vec<u32> = unused.map(|(id, _)| id).collect();
        for id in unused {
            self.reset_counters(id);
        }
        Ok(())
    }

    /// Completes a read of the maps: removes invalid entries, waits for a grace period, and finds the free
    /// backend indices.
    fn complete_read(
        &mut self,
        mut actual: ActualContent,
        invalid: &InvalidEntries,
        grace: &impl GracePeriod,
    ) -> Result<ActualContent, AdoptError> {
        for key in &invalid.frontend_keys {
            tracing::warn!(frontend = %key, "removing a frontend with an invalid record");
            self.maps.delete_frontend_key(key)?;
        }
        let mut backends = invalid.backends.iter();
        backends.try_for_each(|index| self.maps.retire_backend(*index))?;
        // A program that started running before the earlier process exited, or before the keys above were
        // removed, may still be reading entries that are now free.
        grace.wait().map_err(AdoptError::Grace)?;
        actual.shares = NamespaceShares::new(self.actual.shares.percent());
        actual.find_draining(&self.maps)?;
        Ok(actual)
    }
}
