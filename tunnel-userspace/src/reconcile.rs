//! The owner of the maps: brings what they hold to what the plans say.
//!
//! - `access`: what is asked of the maps
//! - `actual`: what the maps hold, read once and then kept
//! - `alloc`: which indices are free
//! - `carry`: what maps hold, written into maps of other sizes
//! - `concerns`: what an operator must act on
//! - `counted`: what the programs counted, by service port
//! - `diff`: what must change (pure)
//! - `health`: what load balancers are told of Services
//! - `measures`, `histogram`: what kube-proxy measures of its passes
//! - `names`: which id belongs to which Service
//! - `listeners`: where something of this node listens on the address of a Service itself
//! - `occupied`: indices of backends that are gone, which open connections keep
//! - `order`: the writes, in an order that is safe at every step
//! - `passing`: a pass over what changed, and what follows from writes that were refused
//! - `planning`: what is to be programmed, planned anew where something changed
//! - `problems`: what is not as planned
//! - `grace`: what was taken out of reach, until it can be freed
//! - `run`: the loop
//! - `sources`: which ranges of clients records use
//! - `steering`: the owner of the steering maps
//! - `view`: what is shown of it

mod access;
mod actual;
mod alloc;
mod carry;
mod concerns;
mod counted;
mod diff;
mod grace;
mod health;
mod histogram;
mod listeners;
mod measures;
mod names;
mod occupied;
mod order;
mod passing;
mod planning;
mod problems;
mod run;
mod sources;
mod steering;
mod view;

use std::{
    collections::{BTreeMap, BTreeSet},
    io,
    sync::Arc,
};

use foldhash::{HashMap, HashMapExt as _};
use litemap::LiteMap;
pub use tunnel_common::table::Sizes;
use tunnel_common::{reason::Reason, service::FrontKey};

pub use self::{
    access::{MapReader, MapWriter, ReadError, SteeringMaps, WriteError},
    carry::{CarriedServices, CarriedSteering, CarryError, Misfit, write_unused},
    counted::{Counted, PortCounts},
    grace::{Grace, Retired},
    histogram::Histogram,
    listeners::{Found, LookError},
    measures::SyncStats,
    problems::Problem,
    run::{Loop, Query, Stats, start},
    steering::{AdoptSteeringError, QUARANTINE, Steering, SteeringSettings, SteeringView},
    view::{EndpointView, FrontView, PortView, ServiceView},
};
use self::{
    actual::{Actual, Stray},
    diff::{Diff, Shortage},
    health::Health,
    listeners::Listeners,
    measures::Measures,
    order::{Order, Refused},
    problems::{Changes, describe},
};
use crate::{
    model::{Algorithm, ExternalIps, ObjectName, ServiceState, TopologyKeys},
    plan::{
        Claims, FrontPlan, HealthChecks, Here, NodePortAddresses, Owners, Place, Pools, PortName,
        PortPlan, ServicePlan,
    },
};

/// The owner of the maps.
pub struct Reconciler<M> {
    maps: M,
    actual: Actual,
    /// What the sources say of each Service, to be planned anew when this node changes.
    states: HashMap<ObjectName, ServiceState>,
    plans: BTreeMap<ObjectName, ServicePlan>,
    claims: Claims,
    owners: Owners,
    pools: Pools,
    listeners: Listeners,
    dirty: BTreeSet<ObjectName>,
    problems: BTreeMap<ObjectName, BTreeMap<PortName, Problem>>,
    /// Reasons counted here, since the start.
    counts: BTreeMap<Reason, u64>,
    retired: Retired,
    /// Whether entries are out of reach that are not freed yet, so that what found no room now
    /// may find it soon.
    waiting: bool,
    /// Services that wait for that.
    starved: BTreeSet<ObjectName>,
    /// Whether something was retired since the Services that found no room were last tried.
    has_shrunk: bool,
    here: Here,
    place: Place,
    health: Health,
    measures: Measures,
    /// Whether there is a Node of this node's name.
    node_known: bool,
    node_eligible: bool,
    synced: bool,
    /// Whether the sources hold everything they were told.
    whole: bool,
    /// Whether a source was not heard of since the start.
    stale: bool,
    /// What an earlier process programmed and nobody asks for, while the sources are not whole.
    orphans: BTreeSet<ObjectName>,
    /// Ports that keep the endpoints of an earlier process until then, by their Service.
    held: BTreeMap<ObjectName, BTreeSet<PortName>>,
    seeded: bool,
    drift: u64,
    /// Whether no pass was made yet.
    is_first: bool,
    /// Whether some writes of the first pass were refused, and which is not known.
    in_doubt: bool,
}

/// What planning needs to know of this node.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The name of its Node object.
    pub node_name: String,
    /// How a backend is chosen where a Service doesn't say.
    pub algorithm: Algorithm,
    /// Which addresses of it node ports are dialled on.
    pub node_ports: Vec<NodePortAddresses>,
    /// Which external IPs are served.
    pub external_ips: ExternalIps,
    /// Whether it counts which endpoints Services keep to.
    pub topology_keys: TopologyKeys,
}

impl<M: MapReader + MapWriter> Reconciler<M> {
    /// Takes over what the maps hold.
    ///
    /// # Errors
    ///
    /// The maps can't be read, or what makes no sense in them can't be removed.
    pub fn adopt(
        mut maps: M,
        sizes: Sizes,
        grace: &mut impl Grace,
        settings: Settings,
    ) -> Result<Self, AdoptError> {
        let is_new = maps.is_new();
        let (actual, drift) = if is_new {
            (Actual::empty(sizes), 0)
        } else {
            let (mut actual, stray) = Actual::read(&maps, sizes)?;
            make_usable(&mut actual, &mut maps, &stray, grace)?;
            (actual, stray.fronts.len())
        };
        let drift = u64::try_from(drift).unwrap_or(u64::MAX);
        let node: Arc<str> = settings.node_name.into();
        let mut reconciler = Self {
            maps,
            actual,
            states: HashMap::new(),
            plans: BTreeMap::new(),
            claims: Claims::default(),
            owners: Owners::new(settings.external_ips),
            pools: Pools::new(settings.topology_keys, Arc::clone(&node)),
            listeners: Listeners::default(),
            dirty: BTreeSet::new(),
            problems: BTreeMap::new(),
            counts: BTreeMap::new(),
            retired: Retired::default(),
            waiting: false,
            starved: BTreeSet::new(),
            has_shrunk: false,
            here: Here::new(node, settings.algorithm),
            place: Place::new(settings.node_ports),
            health: Health::default(),
            measures: Measures::default(),
            node_known: false,
            node_eligible: true,
            synced: false,
            whole: false,
            stale: false,
            orphans: BTreeSet::new(),
            held: BTreeMap::new(),
            seeded: false,
            drift,
            is_first: true,
            in_doubt: false,
        };
        if !is_new {
            reconciler.count_unused_anew()?;
        }
        Ok(reconciler)
    }

    /// The maps.
    #[must_use]
    pub const fn maps(&self) -> &M {
        &self.maps
    }

    /// What load balancers are told of Services, if it is not what was given last.
    pub fn take_health(&mut self) -> Option<Arc<HealthChecks>> {
        self.synced.then(|| self.health.take()).flatten()
    }

    /// Whether a Service is programmed as planned.
    #[must_use]
    pub fn is_programmed(&self, service: &ObjectName) -> bool {
        self.plans.contains_key(service)
            && !self.problems.contains_key(service)
            && !self.starved.contains(service)
            && !self.dirty.contains(service)
    }

    /// Whether something is waiting to be written.
    #[must_use]
    pub fn is_dirty(&self) -> bool {
        self.synced && (!self.dirty.is_empty() || self.whole && !self.orphans.is_empty())
    }

    fn write_service(&mut self, service: &ObjectName, leftovers: &mut Vec<(PortName, Diff)>) {
        let mut changes = Changes::default();
        let wanted = self.wanted(service, &mut changes);
        let known = self.actual.ids.get(service);
        let known = known.into_iter().flat_map(LiteMap::keys);
        let unwanted = known.filter(|name| !wanted.contains_key(*name));
        let unwanted: Vec<PortName> = unwanted.cloned().collect();
        for name in &unwanted {
            self.upsert(name, None, &mut changes);
        }
        for (name, plan) in &wanted {
            self.upsert(name, Some(plan), &mut changes);
        }
        leftovers.append(&mut changes.leftovers);
        self.note(service, changes.problems);
    }

    /// Gives back what no program can reach any more, but for what open connections keep. `more`
    /// says whether more is on its way.
    pub fn free(&mut self, retired: &Retired, more: bool) {
        self.count_anew(&retired.ids);
        self.actual.free(retired, &self.maps);
        self.waiting = more;
        self.dirty.append(&mut self.starved);
        self.look_at_occupied();
        if std::mem::take(&mut self.has_shrunk) {
            self.try_refused();
        }
    }

    /// Gives back what open connections kept, as far as those have closed. What found no room before
    /// is dirty then.
    pub fn look_at_occupied(&mut self) {
        if self.actual.look_at_occupied(&self.maps) > 0 {
            self.try_refused();
        }
    }

    /// How many indices of backends that are gone open connections keep.
    #[must_use]
    pub fn occupied(&self) -> usize {
        self.actual.occupied()
    }

    fn try_refused(&mut self) {
        let is_full = |problem: &Problem| {
            matches!(
                problem.reason,
                Reason::FrontsFull | Reason::SlotsFull | Reason::BackendsFull | Reason::SourcesFull
            )
        };
        let refused = self
            .problems
            .iter()
            .filter(|(_, ports)| ports.values().any(is_full));
        self.dirty
            .extend(refused.map(|(service, _)| service.clone()));
    }

    /// The plan of a Service without the fronts that others own.
    fn wanted(&self, service: &ObjectName, changes: &mut Changes) -> ServicePlan {
        let Some(plans) = self.plans.get(service) else {
            return ServicePlan::new();
        };
        let mut wanted = ServicePlan::new();
        for (name, plan) in plans {
            // First, so that anything else that is wrong with the port goes before it.
            self.tell_left_out(name, plan, changes);
            let is_own = |key: &FrontKey| self.claims.owner(key) == Some(name);
            let lost: Vec<_> = plan.fronts.keys().filter(|key| !is_own(key)).collect();
            for key in &lost {
                let winner = self
                    .claims
                    .owner(key)
                    .map(ToString::to_string)
                    .unwrap_or_default();
                let text = format!("{key} belongs to {winner}");
                changes.problem(name, Reason::FrontClaimed, text);
            }
            let noted = |key: &FrontKey, front: &FrontPlan| self.listeners.noted(key, *front);
            let mut fronts = plan.fronts.iter();
            if lost.is_empty() && fronts.all(|(key, front)| noted(key, front) == *front) {
                wanted.insert(name.clone(), Arc::clone(plan));
            } else {
                let mut plan = PortPlan::clone(plan);
                plan.fronts.retain(|key, _| is_own(key));
                for (key, front) in &mut plan.fronts {
                    *front = noted(key, front);
                }
                wanted.insert(name.clone(), Arc::new(plan));
            }
        }
        wanted.retain(|_, plan| !plan.fronts.is_empty());
        wanted
    }

    fn upsert(&mut self, name: &PortName, plan: Option<&PortPlan>, changes: &mut Changes) {
        let held = self.held.get(&name.service);
        if held.is_some_and(|ports| ports.contains(name)) {
            return;
        }
        let Some(id) = self.id(name, plan) else {
            changes.refusal(name, Reason::FrontsFull, 0, 0);
            return;
        };
        let nothing = PortPlan::nothing();
        let plan = plan.unwrap_or(&nothing);
        let mut diff = Diff::between(&self.actual, id, plan);
        let mut result = self.order().upsert(name, plan, &diff);
        if matches!(result, Err(Refused::Full(_))) && self.actual.look_at_occupied(&self.maps) > 0 {
            // Some of it may be written by now.
            diff = Diff::between(&self.actual, id, plan);
            result = self.order().upsert(name, plan, &diff);
        }
        if let Err(Refused::Full(shortage)) = result {
            let is_passing = matches!(shortage, Shortage::Passing(_));
            if is_passing && (self.waiting || !self.retired.is_empty()) {
                self.starved.insert(name.service.clone());
                return;
            }
            let kept = self.actual.occupied();
            changes.refusal(name, shortage.reason(), plan.cluster.len(), kept);
            let reduced = if shortage.reason() == Reason::SourcesFull {
                plan.with_sources(self.actual.sources_of(id))
            } else {
                let Some(port) = self.actual.ports.get(&id) else {
                    self.forget_unused(name, id);
                    return;
                };
                plan.restricted_to(
                    |key| port.fronts.contains_key(key),
                    |target| port.backends.contains_key(target),
                    shortage.reason() == Reason::SlotsFull,
                )
            };
            diff = Diff::between(&self.actual, id, &reduced);
            result = self.order().upsert(name, &reduced, &diff);
        }
        match result {
            Ok(()) => changes.leftovers.push((name.clone(), diff)),
            Err(refused) => {
                self.dirty.insert(name.service.clone());
                changes.problem(name, refused.reason(), describe(&refused));
            }
        }
    }

    fn finish(&mut self, name: &PortName, diff: &Diff) {
        if let Err(refused) = self.order().finish(diff) {
            self.dirty.insert(name.service.clone());
            let problem = Problem {
                reason: refused.reason(),
                text: describe(&refused),
            };
            self.note(&name.service, BTreeMap::from([(name.clone(), problem)]));
        }
        self.forget_unused(name, diff.id);
    }

    /// Keeps what is wrong with a Service, and tells what was not known before.
    fn note(&mut self, service: &ObjectName, problems: BTreeMap<PortName, Problem>) {
        let known = self.problems.remove(service).unwrap_or_default();
        let mut problems = problems;
        if self.starved.contains(service) {
            // It was not tried to the end, so what was wrong may still be.
            for (name, problem) in &known {
                problems
                    .entry(name.clone())
                    .or_insert_with(|| problem.clone());
            }
        }
        for (name, problem) in &problems {
            let count = self.counts.entry(problem.reason).or_default();
            *count = count.saturating_add(1);
            if known.get(name) != Some(problem) {
                let reason = problem.reason.label();
                tracing::warn!(port = %name, reason, text = %problem.text, "not programmed as planned");
            }
        }
        for name in known.keys().filter(|name| !problems.contains_key(*name)) {
            tracing::info!(port = %name, "programmed as planned again");
        }
        if !problems.is_empty() {
            self.problems.insert(service.clone(), problems);
        }
    }

    fn order(&mut self) -> Order<'_, M> {
        Order {
            actual: &mut self.actual,
            writer: &mut self.maps,
            retired: &mut self.retired,
        }
    }
}

/// Makes what was read from maps something to go by: without what made no sense in them, and with
/// nothing free that is in use.
fn make_usable<M: MapReader + MapWriter>(
    actual: &mut Actual,
    maps: &mut M,
    stray: &Stray,
    grace: &mut impl Grace,
) -> Result<(), AdoptError> {
    remove_stray(maps, stray)?;
    // What counts as free may still be read by a program that began before the last process died, or
    // before the keys above were removed.
    grace.wait().map_err(AdoptError::Grace)?;
    actual.find_occupied(maps);
    Ok(())
}

fn remove_stray(maps: &mut impl MapWriter, stray: &Stray) -> Result<(), WriteError> {
    for key in &stray.fronts {
        tracing::warn!(front = %key, "removing a front whose record makes no sense");
        maps.delete_svc(key)?;
    }
    stray
        .backends
        .iter()
        .try_for_each(|index| maps.retire_backend(*index))
}

/// What the maps hold could not be taken over.
#[derive(Debug, thiserror::Error)]
pub enum AdoptError {
    /// A map can't be read.
    #[error(transparent)]
    Read(#[from] ReadError),
    /// A map can't be written.
    #[error(transparent)]
    Write(#[from] WriteError),
    /// The kernel gives no grace period.
    #[error("cannot wait for the kernel's grace period")]
    Grace(#[source] io::Error),
}

#[cfg(test)]
mod tests;
