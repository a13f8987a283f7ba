//! The owner of each frontend, if several Services have the same address and port.

use std::collections::{BTreeSet, hash_map::Entry};

use foldhash::HashMap;
use litemap::LiteMap;
use tunnel_common::service::FrontKey;

use super::{FrontKind, PortName};
use crate::model::ObjectName;

/// The rank of a service port among those that have the same frontend; the smallest rank owns it. Ranks are
/// compared by the kind of address, then by the creation time of the Service, then by the name of the port.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct Rank {
    kind: FrontKind,
    created: i64,
}

impl Rank {
    /// Returns the rank for an address of this kind. A Service without a creation time is the youngest.
    #[must_use]
    pub fn new(kind: FrontKind, created: Option<i64>) -> Self {
        Self {
            kind,
            created: created.unwrap_or(i64::MAX),
        }
    }
}

/// The service ports that have each frontend, sorted by rank, and the frontends of each Service.
#[derive(Debug, Default)]
pub struct Claims {
    fronts: HashMap<FrontKey, LiteMap<(Rank, PortName), ()>>,
    services: HashMap<ObjectName, LiteMap<(FrontKey, Rank, PortName), ()>>,
}

impl Claims {
    /// Reserves memory for this number of Services, if there are none yet.
    pub fn make_room(&mut self, services: usize) {
        if self.services.is_empty() {
            self.services.reserve(services);
            self.fronts.reserve(services);
        }
    }

    /// Replaces the frontends of a Service. Returns the other Services that won or lost a frontend.
    pub fn replace(
        &mut self,
        service: &ObjectName,
        claims: impl Iterator<Item = (FrontKey, Rank, PortName)>,
    ) -> BTreeSet<ObjectName> {
        let mut new = LiteMap::with_capacity(1);
        new.extend(claims.map(|claim| (claim, ())));
        let old = self.services.remove(service).unwrap_or_default();
        let mut moved = BTreeSet::new();
        for (key, rank, name) in old.keys().filter(|claim| !new.contains_key(*claim)) {
            let before = self.owner(key).cloned();
            if let Some(claims) = self.fronts.get_mut(key) {
                claims.remove(&(*rank, name.clone()));
                if claims.is_empty() {
                    self.fronts.remove(key);
                }
            }
            self.note_move(key, before, &mut moved);
        }
        for (key, rank, name) in new.keys().filter(|claim| !old.contains_key(*claim)) {
            let claim = ((*rank, name.clone()), ());
            let claims = match self.fronts.entry(*key) {
                Entry::Vacant(place) => {
                    place.insert(LiteMap::from_iter([claim]));
                    continue;
                }
                Entry::Occupied(claims) => claims.into_mut(),
            };
            let before = claims.first().map(|((_, name), ())| name.clone());
            claims.extend([claim]);
            self.note_move(key, before, &mut moved);
        }
        if !new.is_empty() {
            self.services.insert(service.clone(), new);
        }
        moved.remove(service);
        moved
    }

    /// Returns the service port that owns a frontend.
    #[must_use]
    pub fn owner(&self, key: &FrontKey) -> Option<&PortName> {
        self.fronts.get(key)?.first().map(|((_, name), ())| name)
    }

    fn note_move(
        &self,
        key: &FrontKey,
        before: Option<PortName>,
        moved: &mut BTreeSet<ObjectName>,
    ) {
        let after = self.owner(key);
        if before.as_ref() != after {
            moved.extend(before.map(|name| name.service));
            moved.extend(after.map(|name| name.service.clone()));
        }
    }
}
