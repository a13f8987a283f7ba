//! The ports of Services in the maps: one after another is written, taken away and freed.

use tunnel_common::{reason::Reason, service::Tally, table::Sizes};

use super::{
    actual::Actual,
    canary::Canary,
    diff::{Diff, Shortage},
    order::{Order, Refused},
    reading::{self, Stray},
    unclaimed::Unclaimed,
};
use crate::{
    plan::{PortName, PortPlan},
    reconcile::{
        access::{AdoptError, MapReader, MapWriter, ReadError},
        grace::{Entry, Grace, Retired},
        problems::{Problem, Problems},
    },
};

/// The service maps and what is known of them.
pub(crate) struct Ports<M> {
    pub(crate) maps: M,
    pub(crate) actual: Actual,
    pub(in crate::reconcile) unclaimed: Unclaimed,
    /// Taken out of reach since this was last asked for.
    pub(super) retired: Retired,
    /// Whether entries are out of reach that are not freed yet, so that what found no room now
    /// may find it soon.
    pub(super) waiting: bool,
}

/// What became of a port.
pub(super) enum Upserted {
    /// It is written, as far as there is room; what is no longer wanted is to be taken away later.
    Written(Option<Diff>),
    /// It waits for room that entries take which are not freed yet.
    Starved,
}

impl<M: MapReader + MapWriter> Ports<M> {
    /// Takes over what the maps hold. Gives how many keys made no sense, too.
    pub(super) fn adopt(
        maps: M,
        sizes: Sizes,
        grace: &impl Grace,
    ) -> Result<(Self, usize), AdoptError> {
        let mut ports = Self {
            maps,
            actual: Actual::empty(sizes),
            unclaimed: Unclaimed::default(),
            retired: Retired::default(),
            waiting: false,
        };
        let is_new = ports.maps.is_new();
        let strays = if is_new { 0 } else { ports.adopt_again(grace)? };
        Ok((ports, strays))
    }

    /// Takes over what the maps hold now, as a process that starts does. Gives how many keys made no
    /// sense.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; nothing is written then, and the same can be tried again.
    pub(super) fn adopt_again(&mut self, grace: &impl Grace) -> Result<usize, AdoptError> {
        let (actual, stray) = reading::read(&self.maps, self.actual.sizes)?;
        self.actual = self.usable(actual, &stray, grace)?;
        self.count_unused_anew()?;
        self.retired = Retired::default();
        self.unclaimed.forget();
        Ok(stray.fronts.len())
    }

    /// Reads the maps and compares them with what is known of them; where they differ, what was read is
    /// known from here on. Gives how many differences there were.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; what was known stays.
    pub(super) fn audit(&mut self, grace: &impl Grace) -> Result<usize, AdoptError> {
        let (fresh, stray) = reading::read(&self.maps, self.actual.sizes)?;
        let differences = fresh
            .differences(&self.actual)
            .saturating_add(stray.fronts.len())
            .saturating_add(stray.backends.len());
        if differences > 0 {
            let mut fresh = self.usable(fresh, &stray, grace)?;
            fresh.take_names(&mut self.actual);
            self.actual = fresh;
            self.unclaimed.set(self.actual.nameless());
        }
        Ok(differences)
    }

    /// Gives back what no program can reach any more, but for what open connections keep. `more`
    /// says whether more is on its way.
    pub(super) fn free(&mut self, retired: &Retired, more: bool) {
        for entry in &retired.0 {
            if let Entry::Id(id) = entry {
                self.count_anew(*id);
            }
            self.actual.free(*entry, &self.maps);
        }
        self.waiting = more;
    }

    /// Gives back what open connections kept, as far as those have closed. Gives how much.
    pub(super) fn look_at_occupied(&mut self) -> usize {
        let actual = &mut self.actual;
        actual.occupied.look(&self.maps, &mut actual.free_backends)
    }

    /// What was taken out of reach since this was last asked.
    pub(in crate::reconcile) fn take_retired(&mut self) -> Retired {
        let retired = std::mem::take(&mut self.retired);
        self.waiting |= !retired.0.is_empty();
        retired
    }

    /// Writes the canary, dials it and removes it. Gives nothing where there is no room for it, or its
    /// front is a Service's.
    pub(in crate::reconcile) fn dial_canary<R>(
        &mut self,
        canary: &Canary,
        dial: impl FnOnce() -> R,
    ) -> Option<R> {
        let known = self.actual.fronts.get(&canary.front);
        let id = match known.map(|front| front.record.service) {
            // Left by a process that was killed.
            Some(id) => self.unclaimed.claim(id).then_some(id)?,
            None => self.actual.free_ids.take()?,
        };
        let plan = canary.plan();
        let diff = Diff::between(&self.actual, id, &plan);
        let written = self.order().upsert(canary.front.protocol, &plan, &diff);
        if let Err(refused) = &written {
            let reason = refused.reason().label();
            tracing::warn!(reason, text = refused.problem().text, "no canary");
        }
        let dialled = written.ok().map(|()| dial());
        if let Err(refused) = self.remove(id) {
            self.unclaimed.put_back(id, refused.problem());
        }
        dialled
    }

    /// Writes what a port wants; where there is no room, what there is room for.
    pub(super) fn upsert(
        &mut self,
        name: &PortName,
        plan: Option<&PortPlan>,
        problems: &mut Problems,
    ) -> Result<Upserted, Refused> {
        if self.unclaimed.keeps(name) {
            return Ok(Upserted::Written(None));
        }
        let Some(id) = self.id(name, plan) else {
            let problem = Problem::no_room(Reason::FrontsFull, 0, 0);
            problems.insert(name.clone(), problem);
            return Ok(Upserted::Written(None));
        };
        let nothing = PortPlan::nothing();
        let plan = plan.unwrap_or(&nothing);
        let protocol = name.protocol;
        let mut diff = Diff::between(&self.actual, id, plan);
        let mut result = self.order().upsert(protocol, plan, &diff);
        if matches!(result, Err(Refused::Full(_))) && self.look_at_occupied() > 0 {
            // Some of it may be written by now.
            diff = Diff::between(&self.actual, id, plan);
            result = self.order().upsert(protocol, plan, &diff);
        }
        let Err(Refused::Full(Shortage { reason, is_passing })) = result else {
            return result.map(|()| Upserted::Written(Some(diff)));
        };
        if is_passing && (self.waiting || !self.retired.0.is_empty()) {
            return Ok(Upserted::Starved);
        }
        let kept = self.actual.occupied.len();
        let problem = Problem::no_room(reason, plan.cluster.len(), kept);
        problems.insert(name.clone(), problem);
        let reduced = if reason == Reason::SourcesFull {
            plan.with_sources(self.actual.sources_of(id))
        } else {
            let Some(port) = self.actual.ports.get(&id) else {
                self.forget_unused(name, id);
                return Ok(Upserted::Written(None));
            };
            plan.restricted_to(
                |key| port.fronts.contains_key(key),
                |target| port.backends.contains_key(target),
                reason == Reason::SlotsFull,
            )
        };
        let diff = Diff::between(&self.actual, id, &reduced);
        self.order().upsert(protocol, &reduced, &diff)?;
        Ok(Upserted::Written(Some(diff)))
    }

    /// Takes away what a port no longer wants.
    pub(super) fn finish(&mut self, name: &PortName, diff: &Diff) -> Result<(), Refused> {
        let finished = self.order().finish(diff);
        self.forget_unused(name, diff.id);
        finished
    }

    /// Removes what is programmed for an id without a name.
    pub(super) fn remove(&mut self, id: u32) -> Result<(), Refused> {
        let diff = Diff::between(&self.actual, id, &PortPlan::nothing());
        self.order().finish(&diff)?;
        self.retire_unused(id);
        Ok(())
    }

    /// The id of a port, given out now if it has none and a plan. A port whose front an earlier
    /// process programmed takes over its id.
    fn id(&mut self, name: &PortName, plan: Option<&PortPlan>) -> Option<u32> {
        if let Some(id) = self.actual.id(name) {
            return Some(id);
        }
        let unclaimed = &mut self.unclaimed;
        let mut holders = self.actual.holders(plan?.fronts.keys());
        let claimed = holders.find(|id| unclaimed.claim(*id));
        drop(holders);
        let id = claimed.or_else(|| self.actual.free_ids.take())?;
        self.actual.set_id(name.clone(), id);
        Some(id)
    }

    fn forget_unused(&mut self, name: &PortName, id: u32) {
        if self.retire_unused(id) {
            self.actual.forget_name(name);
        }
    }

    /// Retires an id of which nothing is programmed; whether it is one.
    fn retire_unused(&mut self, id: u32) -> bool {
        let port = self.actual.ports.get(&id);
        let is_unused = port.is_none_or(|it| it.fronts.is_empty() && it.backends.is_empty());
        if is_unused {
            self.actual.ports.remove(&id);
            self.retired.0.push(Entry::Id(id));
        }
        is_unused
    }

    fn order(&mut self) -> Order<'_, M> {
        Order {
            actual: &mut self.actual,
            writer: &mut self.maps,
            retired: &mut self.retired,
        }
    }

    /// Lets the counts of an id that no program uses any more begin anew.
    fn count_anew(&mut self, id: u32) {
        if let Err(error) = self.maps.reset_tally(id) {
            tracing::warn!(id, %error, "the counts of a service port that is gone stay");
        }
    }

    /// As [`Self::count_anew`], for ids that an earlier process left.
    fn count_unused_anew(&mut self) -> Result<(), ReadError> {
        let tallies = self.maps.tallies(self.actual.sizes.front_entries())?;
        let counted = (0_u32..).zip(tallies);
        let counted = counted.filter(|(_, tally)| *tally != Tally::default());
        let unused = counted.filter(|(id, _)| !self.actual.ports.contains_key(id));
        let unused: Vec<u32> = unused.map(|(id, _)| id).collect();
        for id in unused {
            self.count_anew(id);
        }
        Ok(())
    }

    /// Makes what was read from the maps something to go by: without what made no sense in them, and with
    /// nothing free that is in use.
    fn usable(
        &mut self,
        mut actual: Actual,
        stray: &Stray,
        grace: &impl Grace,
    ) -> Result<Actual, AdoptError> {
        for key in &stray.fronts {
            tracing::warn!(front = %key, "removing a front whose record makes no sense");
            self.maps.delete_svc(key)?;
        }
        let mut backends = stray.backends.iter();
        backends.try_for_each(|index| self.maps.retire_backend(*index))?;
        // What counts as free may still be read by a program that began before the last process died, or
        // before the keys above were removed.
        grace.wait().map_err(AdoptError::Grace)?;
        actual.find_occupied(&self.maps);
        Ok(actual)
    }
}
