//! Writes in an order that is safe at every step: first what is new and that nothing leads to yet
//! (backends, slots, records), then one hash update per front, then what nothing leads to any
//! more. A crash between two writes leaves the old or the new, whole.

use tunnel_common::{
    reason::Reason,
    service::{Backend, Front, FrontKey, Membership, Set},
};

use super::{
    MapWriter, WriteError,
    actual::{Actual, Programmed, SetUse, slots},
    diff::{Diff, SetChange, Shortage, record},
    grace::Retired,
};
use crate::plan::{PortName, PortPlan, Target};

/// Why a change was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// There is no room.
    #[error("{}", .0.reason().meaning())]
    Full(Shortage),
    /// The kernel refused a write.
    #[error("{}", Reason::WriteFailed.meaning())]
    Write(#[from] WriteError),
}

impl Refused {
    /// The reason, as it is counted.
    #[must_use]
    pub(super) const fn reason(&self) -> Reason {
        match self {
            Self::Full(shortage) => shortage.reason(),
            Self::Write(_) => Reason::WriteFailed,
        }
    }
}

/// The maps, what is known of them, and what was taken out of reach.
pub(crate) struct Order<'a, W> {
    pub(crate) actual: &'a mut Actual,
    pub(crate) writer: &'a mut W,
    pub(crate) retired: &'a mut Retired,
}

impl<W: MapWriter> Order<'_, W> {
    /// Programs every front of a plan. What is no longer wanted is left for [`Self::finish`].
    pub(crate) fn upsert(
        &mut self,
        name: &PortName,
        plan: &PortPlan,
        diff: &Diff,
    ) -> Result<(), Refused> {
        diff.room(self.actual).map_err(Refused::Full)?;
        for (target, sets) in &diff.new_backends {
            self.add_backend(diff.id, name, *target, *sets)?;
        }
        let cluster = self.write_set(diff.id, &diff.cluster)?;
        let written = self.write_set(diff.id, &diff.local).and_then(|local| {
            let fronts = diff.upserts.iter().try_for_each(|key| {
                let sets = (cluster, local);
                self.write_front(record(self.actual, *key, diff.id, plan, sets))
            });
            self.drop_unused(local);
            fronts
        });
        self.drop_unused(cluster);
        written?;
        // Only now, so that clients which keep their backend are not sent off before the others.
        diff.moves
            .iter()
            .try_for_each(|(index, sets)| self.move_backend(*index, *sets))
    }

    /// Takes away what a plan no longer wants, once every front that it wants is programmed.
    pub(crate) fn finish(&mut self, diff: &Diff) -> Result<(), Refused> {
        for key in &diff.deletes {
            self.delete_front(diff.id, key)?;
        }
        for (target, index) in &diff.gone {
            self.retire_backend(diff.id, target, *index)?;
        }
        Ok(())
    }

    fn add_backend(
        &mut self,
        id: u32,
        name: &PortName,
        target: Target,
        sets: Membership,
    ) -> Result<(), Refused> {
        let index = self
            .actual
            .free_backends
            .take()
            .ok_or(Refused::Full(Shortage::Passing(Reason::BackendsFull)))?;
        let state = self.actual.state(index).next_use();
        let backend = Backend {
            address: target.address,
            port: target.port,
            protocol: name.protocol,
            flags: 0,
            service: id,
            state,
            sets,
        };
        if let Err(error) = self.writer.write_backend(index, &backend) {
            self.actual.free_backends.give(index);
            return Err(error.into());
        }
        self.actual.set_state(index, state);
        self.actual.set_sets_of(index, sets);
        self.actual.used_backends = self.actual.used_backends.saturating_add(1);
        self.actual
            .ports
            .entry(id)
            .or_default()
            .backends
            .insert(target, index);
        Ok(())
    }

    fn move_backend(&mut self, index: u32, sets: Membership) -> Result<(), Refused> {
        self.writer.move_backend(index, sets)?;
        self.actual.set_sets_of(index, sets);
        Ok(())
    }

    /// Writes the slots of a set. Nothing leads to them before a record does.
    fn write_set(&mut self, id: u32, change: &SetChange) -> Result<Set, Refused> {
        let targets = match change {
            SetChange::Keep(set) => return Ok(*set),
            SetChange::Write(targets) => targets,
        };
        let len = u32::try_from(targets.len())
            .map_err(|_too_long| Refused::Full(Shortage::Passing(Reason::SlotsFull)))?;
        let base = self
            .actual
            .free_slots
            .take(len)
            .ok_or(Refused::Full(Shortage::Passing(Reason::SlotsFull)))?;
        let backends = targets.iter().map(|target| self.actual.backend(id, target));
        let Some(backends) = backends.collect::<Option<Vec<_>>>() else {
            self.actual.free_slots.give(base, len);
            return Err(Refused::Full(Shortage::Passing(Reason::BackendsFull)));
        };
        for (place, slot) in (base..).zip(slots(&backends)) {
            if let Err(error) = self.writer.write_slot(place, slot) {
                self.actual.free_slots.give(base, len);
                return Err(error.into());
            }
        }
        self.actual.used_slots = self.actual.used_slots.saturating_add(len);
        self.actual.sets.insert(
            base,
            SetUse {
                records: 0,
                backends,
            },
        );
        Ok(Set { base, len })
    }

    /// Gives back a set that no record came to use.
    fn drop_unused(&mut self, set: Set) {
        let is_unused = self
            .actual
            .sets
            .get(&set.base)
            .is_some_and(|known| known.records == 0);
        if is_unused && set.len > 0 {
            self.actual.sets.remove(&set.base);
            self.actual.used_slots = self.actual.used_slots.saturating_sub(set.len);
            self.actual.free_slots.give(set.base, set.len);
        }
    }

    fn write_front(&mut self, record: Front) -> Result<(), Refused> {
        let index = self
            .actual
            .free_fronts
            .take()
            .ok_or(Refused::Full(Shortage::Passing(Reason::FrontsFull)))?;
        let key = record.key;
        let written = self
            .writer
            .write_front(index, &record)
            .and_then(|()| self.writer.write_svc(&key, index));
        if let Err(error) = written {
            self.actual.free_fronts.give(index);
            return Err(error.into());
        }
        self.actual.hold(record.cluster);
        self.actual.hold(record.local);
        if let Some(old) = self.actual.fronts.insert(key, Programmed { index, record }) {
            self.retire_front(&old);
        }
        self.actual
            .ports
            .entry(record.service)
            .or_default()
            .fronts
            .insert(key);
        Ok(())
    }

    fn delete_front(&mut self, id: u32, key: &FrontKey) -> Result<(), Refused> {
        let is_own = self
            .actual
            .fronts
            .get(key)
            .is_some_and(|front| front.record.service == id);
        if !is_own {
            return Ok(());
        }
        self.writer.delete_svc(key)?;
        if let Some(old) = self.actual.fronts.remove(key) {
            self.retire_front(&old);
        }
        Ok(())
    }

    fn retire_front(&mut self, old: &Programmed) {
        if let Some(port) = self.actual.ports.get_mut(&old.record.service) {
            port.fronts.remove(&old.record.key);
        }
        self.retired.fronts.push(old.index);
        self.actual.release(old.record.cluster, self.retired);
        self.actual.release(old.record.local, self.retired);
    }

    fn retire_backend(&mut self, id: u32, target: &Target, index: u32) -> Result<(), Refused> {
        let is_current = self
            .actual
            .ports
            .get(&id)
            .is_some_and(|port| port.backends.get(target) == Some(&index));
        if !is_current {
            return Ok(());
        }
        self.writer.retire_backend(index)?;
        let gone = self.actual.state(index).gone();
        self.actual.set_state(index, gone);
        if let Some(port) = self.actual.ports.get_mut(&id) {
            port.backends.remove(target);
        }
        self.actual.used_backends = self.actual.used_backends.saturating_sub(1);
        self.retired.backends.push(index);
        Ok(())
    }
}
