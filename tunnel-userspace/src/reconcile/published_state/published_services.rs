//! The published Services, which other threads can read while the reconciler replaces some of them.

use std::{
    collections::BTreeMap,
    iter,
    ops::{Bound, Deref},
    sync::{Arc, PoisonError, RwLock, RwLockReadGuard},
};

use super::{
    port_counters::{PortCounterList, PortCounters},
    service_snapshot::ServiceSnapshot,
    service_view::ServicePart,
};
use crate::{model::ObjectName, reconcile::map_access::CounterReader};

/// The maximum number of Services that a reader visits at a time, since it blocks the reconciler while it
/// holds the lock.
const PAGE: usize = 128;

/// A handle to the published Services. Cloning it returns another handle to the same Services. Each Service
/// that a reader gets is consistent in itself, but a long read may return Services from different syncs.
#[derive(Clone, Debug, Default)]
pub struct PublishedServices(Arc<RwLock<Table>>);

#[derive(Debug, Default)]
struct Table {
    services: BTreeMap<ObjectName, Arc<ServiceSnapshot>>,
    /// The total number of ports of all Services.
    ports: usize,
}

impl PublishedServices {
    /// Publishes Services, which must be sorted by name. `None` removes a Service.
    pub(super) fn replace(
        &self,
        services: impl Iterator<Item = (ObjectName, Option<ServiceSnapshot>)>,
    ) {
        let services: Vec<_> = services
            .map(|(name, snapshot)| (name, snapshot.map(Arc::new)))
            .collect();
        let mut replaced = Vec::with_capacity(services.len());
        let mut table = self.0.write().unwrap_or_else(PoisonError::into_inner);
        if table.services.is_empty() {
            let all = services.into_iter();
            table.services = all.filter_map(|(name, it)| Some((name, it?))).collect();
            table.ports = table
                .services
                .values()
                .map(|snapshot| snapshot.ports.len())
                .sum();
            return;
        }
        for (name, snapshot) in services {
            table.ports += snapshot.as_ref().map_or(0, |snapshot| snapshot.ports.len());
            let old = match snapshot {
                Some(snapshot) => table.services.insert(name, snapshot),
                None => table.services.remove(&name),
            };
            table.ports -= old.as_ref().map_or(0, |old| old.ports.len());
            // The old Services are dropped after the lock is released, so that readers don't wait as long.
            replaced.extend(old);
        }
        drop(table);
        drop(replaced);
    }

    /// Returns all Services, or only those with the given name, which has the form `name` or
    /// `namespace/name`. A list of all Services contains at most ten endpoints of each port that are not in the
    /// maps, and none of a port that is not in the maps, so that its length depends on the sizes of the maps.
    ///
    /// Each part is created when it is requested, since all of them at once would take very much memory.
    /// Meanwhile, the iterator keeps the state of only one Service.
    pub fn service_parts<R>(
        &self,
        reader: R,
        name: Option<&str>,
    ) -> impl Iterator<Item = ServicePart> + use<R>
    where
        R: Deref,
        R::Target: CounterReader + Sized,
    {
        let is_brief = name.is_none();
        let name = name.map(str::to_owned);
        let is_wanted = move |service: &ObjectName| {
            let name = name.as_deref();
            name.is_none_or(|name| is_named(service, name))
        };
        let (table, mut last, mut current) = (self.clone(), None, None);
        iter::from_fn(move || {
            loop {
                let Some((snapshot, next_port)) = current.take() else {
                    let snapshot = table.next(&mut last, &is_wanted)?;
                    let start = ServicePart::Start(snapshot.name().clone());
                    current = Some((snapshot, 0));
                    return Some(start);
                };
                if let Some(port) = snapshot.port_view(next_port, &*reader, is_brief) {
                    current = Some((snapshot, next_port + 1));
                    return Some(ServicePart::Port(Box::new(port)));
                }
            }
        })
    }

    /// Reads the counters of the first `most` service ports in order of name.
    #[must_use]
    pub fn port_counters(&self, reader: &impl CounterReader, most: usize) -> PortCounterList {
        let omitted = self.read().ports.saturating_sub(most);
        let mut ports = Vec::new();
        // The loop stops once `ports` is full, instead of visiting the remaining Services.
        let mut services = self.all();
        while ports.len() < most
            && let Some(snapshot) = services.next()
        {
            let room = most - ports.len();
            let some = snapshot.ports.iter().take(room);
            ports.extend(some.map(|port| PortCounters::read(port, reader)));
        }
        PortCounterList { ports, omitted }
    }

    /// Returns the names of all service ports in the maps, or only of those of the Service with this name, as in
    /// [`Self::service_parts`].
    #[must_use]
    pub fn port_names(&self, name: Option<&str>) -> PortNames {
        let services = self
            .all()
            .filter(|snapshot| name.is_none_or(|name| is_named(snapshot.name(), name)));
        let ports = services.flat_map(|snapshot| {
            let named = snapshot.ports.iter();
            let named = named.filter_map(|port| Some((port.id?, port.name.to_string())));
            named.collect::<Vec<_>>()
        });
        PortNames(ports.collect())
    }

    fn all(&self) -> impl Iterator<Item = Arc<ServiceSnapshot>> {
        let mut last = None;
        iter::from_fn(move || self.next(&mut last, |_| true))
    }

    /// Returns the first Service after `last` that is wanted, and sets `last` to its name.
    fn next(
        &self,
        last: &mut Option<ObjectName>,
        is_wanted: impl Fn(&ObjectName) -> bool,
    ) -> Option<Arc<ServiceSnapshot>> {
        loop {
            let after = last.as_ref().map_or(Bound::Unbounded, Bound::Excluded);
            let table = self.read();
            let page = table.services.range((after, Bound::Unbounded)).take(PAGE);
            let mut visited = None;
            for (name, snapshot) in page {
                visited = Some(name);
                if is_wanted(name) {
                    let found = Some(Arc::clone(snapshot));
                    *last = Some(name.clone());
                    return found;
                }
            }
            *last = Some(visited?.clone());
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Table> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The names of service ports, by their ids in the maps.
#[derive(Clone, Debug, Default)]
pub struct PortNames(BTreeMap<u32, String>);

impl PortNames {
    /// Returns true if there is a service port with this id.
    #[must_use]
    pub fn contains(&self, id: u32) -> bool {
        self.0.contains_key(&id)
    }

    /// Returns the name of the service port with this id.
    #[must_use]
    pub fn name(&self, id: u32) -> String {
        let name = self.0.get(&id).cloned();
        name.unwrap_or_else(|| format!("{id} (not programmed)"))
    }
}

impl<const N: usize> From<[(u32, String); N]> for PortNames {
    fn from(names: [(u32, String); N]) -> Self {
        Self(names.into())
    }
}

fn is_named(service: &ObjectName, name: &str) -> bool {
    match name.split_once('/') {
        Some((namespace, name)) => *service.namespace == *namespace && *service.name == *name,
        None => *service.name == *name,
    }
}
