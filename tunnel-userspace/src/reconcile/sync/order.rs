//! Writes in an order that is safe at every step: first what is new and that nothing leads to yet
//! (backends, slots, records), then one hash update per front, then what nothing leads to any
//! more. A crash between two writes leaves the old or the new, whole.

use tunnel_common::{
    addr::Protocol,
    reason::Reason,
    service::{Backend, Front, FrontKey, Membership, Set, Source},
};

use super::{
    actual::{Actual, Programmed, Standing},
    diff::{Diff, SetChange, Shortage, record},
    slots::slots,
};
use crate::{
    plan::{PortPlan, Target},
    reconcile::{
        access::{MapWriter, WriteError},
        grace::{Entry, Retired},
        problems::Problem,
    },
};

/// Why a change was not made.
#[derive(Debug, thiserror::Error)]
pub(super) enum Refused {
    /// There is no room.
    #[error("{}", .0.reason.meaning())]
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
            Self::Full(shortage) => shortage.reason,
            Self::Write(_) => Reason::WriteFailed,
        }
    }

    /// The problem that it is for a port.
    pub(super) fn problem(&self) -> Problem {
        let text = match self {
            Self::Full(_) => self.to_string(),
            Self::Write(error) => format!("{self}: {error}: {}", error.source),
        };
        Problem {
            reason: self.reason(),
            text,
        }
    }
}

/// No room until the old is freed.
const fn full(reason: Reason) -> Refused {
    let is_passing = true;
    Refused::Full(Shortage { reason, is_passing })
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
        protocol: Protocol,
        plan: &PortPlan,
        diff: &Diff,
    ) -> Result<(), Refused> {
        diff.room(self.actual).map_err(Refused::Full)?;
        self.add_backends(diff.id, protocol, &diff.new_backends)?;
        let sources = self.write_sources(&diff.new_sources)?;
        let cluster = match self.write_set(diff.id, &diff.cluster) {
            Ok(cluster) => cluster,
            Err(error) => {
                self.actual.sources.drop_unused(sources);
                return Err(error);
            }
        };
        let written = self.write_set(diff.id, &diff.local).and_then(|local| {
            let fronts = diff.upserts.iter().try_for_each(|key| {
                let sets = (cluster, local);
                self.write_front(record(self.actual, *key, diff.id, plan, sets))
            });
            self.actual.sets.drop_unused(local);
            fronts
        });
        self.actual.sets.drop_unused(cluster);
        self.actual.sources.drop_unused(sources);
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

    /// Writes backends, as many of them as can be.
    fn add_backends(
        &mut self,
        id: u32,
        protocol: Protocol,
        wanted: &[(Target, Membership)],
    ) -> Result<(), Refused> {
        let mut backends = Vec::with_capacity(wanted.len());
        for (target, sets) in wanted {
            // That there is room for all was seen before.
            let Some(index) = self.actual.free_backends.take() else {
                break;
            };
            let backend = Backend {
                address: target.address,
                port: target.port,
                protocol,
                flags: 0,
                service: id,
                state: self.actual.standing(index).state.next_use(),
                sets: *sets,
            };
            backends.push((index, backend));
        }
        let (written, result) = self.writer.write_backends(&backends);
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
        result?;
        if backends.len() < wanted.len() {
            return Err(full(Reason::BackendsFull));
        }
        Ok(())
    }

    fn move_backend(&mut self, index: u32, sets: Membership) -> Result<(), Refused> {
        self.writer.move_backend(index, sets)?;
        self.actual.note(index, |known| known.sets = sets);
        Ok(())
    }

    /// Writes the slots of a set. Nothing leads to them before a record does.
    fn write_set(&mut self, id: u32, change: &SetChange) -> Result<Set, Refused> {
        let targets = match change {
            SetChange::Keep(set) => return Ok(*set),
            SetChange::Write(targets) => targets,
        };
        let backends = targets.iter().map(|target| self.actual.backend(id, target));
        let Some(backends) = backends.collect::<Option<Vec<_>>>() else {
            return Err(full(Reason::BackendsFull));
        };
        let room = self.actual.sets.take(backends.len());
        let set = room.ok_or_else(|| full(Reason::SlotsFull))?;
        let slots: Vec<_> = slots(&backends).collect();
        if let Err(error) = self.writer.write_slots(set.base, &slots) {
            self.actual.sets.give(set);
            return Err(error.into());
        }
        self.actual.sets.put(set, backends);
        Ok(set)
    }

    /// Writes ranges of clients. Nothing leads to them before a record does.
    fn write_sources(&mut self, ranges: &[Source]) -> Result<Set, Refused> {
        let room = self.actual.sources.take(ranges.len());
        let set = room.ok_or_else(|| full(Reason::SourcesFull))?;
        for (place, range) in (set.base..).zip(ranges) {
            if let Err(error) = self.writer.write_source(place, range) {
                self.actual.sources.give(set);
                return Err(error.into());
            }
        }
        self.actual.sources.put(set, ranges.to_vec());
        Ok(set)
    }

    fn write_front(&mut self, record: Front) -> Result<(), Refused> {
        let room = self.actual.free_fronts.take();
        let index = room.ok_or_else(|| full(Reason::FrontsFull))?;
        let key = record.key;
        let written = self
            .writer
            .write_front(index, &record)
            .and_then(|()| self.writer.write_svc(&key, index));
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

    fn delete_front(&mut self, id: u32, key: &FrontKey) -> Result<(), Refused> {
        let known = self.actual.fronts.get(key);
        if known.is_none_or(|front| front.record.service != id) {
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
        self.retired.0.push(Entry::Front(old.index));
        self.actual.release(&old.record, self.retired);
    }

    fn retire_backend(&mut self, id: u32, target: &Target, index: u32) -> Result<(), Refused> {
        if self.actual.backend(id, target) != Some(index) {
            return Ok(());
        }
        self.writer.retire_backend(index)?;
        let retire = |known: &mut Standing| known.state = known.state.gone();
        self.actual.note(index, retire);
        if let Some(port) = self.actual.ports.get_mut(&id) {
            port.backends.remove(target);
        }
        self.actual.used_backends = self.actual.used_backends.saturating_sub(1);
        self.retired.0.push(Entry::Backend(index));
        Ok(())
    }
}
