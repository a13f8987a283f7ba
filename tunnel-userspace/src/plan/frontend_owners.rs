//! Tracks the owner of each frontend, since several Services may claim the same address and port.

use std::collections::{BTreeSet, hash_map::Entry};

use foldhash::HashMap;
use litemap::LiteMap;
use tunnel_common::service::FrontendKey;

use super::{FrontendKind, PortName};
use crate::model::ObjectName;

/// The rank of a service port among those that have the same frontend; the port with the lowest rank owns it.
/// Service ports are ranked by the kind of address, then by the Service's creation time, then by the port's
/// name.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub struct ClaimRank {
    kind: FrontendKind,
    created: i64,
}

impl ClaimRank {
    /// Returns the rank for an address of this kind. A Service without a creation time counts as the
    /// youngest.
    #[must_use]
    pub fn new(kind: FrontendKind, created: Option<i64>) -> Self {
        Self {
            kind,
            created: created.unwrap_or(i64::MAX),
        }
    }
}

/// The owners of frontends. The service ports that have the same frontend are sorted by rank, and the first
/// one owns the frontend.
#[derive(Debug, Default)]
pub struct FrontendOwners {
    claims: HashMap<FrontendKey, LiteMap<(ClaimRank, PortName), ()>>,
    by_service: HashMap<ObjectName, LiteMap<(FrontendKey, ClaimRank, PortName), ()>>,
}

impl FrontendOwners {
    /// Reserves memory for this many Services, if there are none yet.
    pub fn reserve(&mut self, services: usize) {
        if self.by_service.is_empty() {
            self.by_service.reserve(services);
            self.claims.reserve(services);
        }
    }

    /// Replaces the frontends that a Service claims. Returns the other Services that gained or lost a
    /// frontend.
    pub fn set_claims(
        &mut self,
        service: &ObjectName,
        claims: impl Iterator<Item = (FrontendKey, ClaimRank, PortName)>,
    ) -> BTreeSet<ObjectName> {
        let mut new = LiteMap::with_capacity(1);
        new.extend(claims.map(|claim| (claim, ())));
        let old = self.by_service.remove(service).unwrap_or_default();
        let mut changed = BTreeSet::new();
        for (key, rank, name) in old.keys().filter(|claim| !new.contains_key(*claim)) {
            let before = self.owner(key).cloned();
            if let Some(claims) = self.claims.get_mut(key) {
                claims.remove(&(*rank, name.clone()));
                if claims.is_empty() {
                    self.claims.remove(key);
                }
            }
            self.note_owner_change(key, before, &mut changed);
        }
        for (key, rank, name) in new.keys().filter(|claim| !old.contains_key(*claim)) {
            let claim = ((*rank, name.clone()), ());
            let claims = match self.claims.entry(*key) {
                Entry::Vacant(vacant) => {
                    // Nearly all frontends have only one claim, so a larger capacity would waste memory.
                    let mut only = LiteMap::with_capacity(1);
                    only.extend([claim]);
                    vacant.insert(only);
                    continue;
                }
                Entry::Occupied(claims) => claims.into_mut(),
            };
            let before = claims.first().map(|((_, name), ())| name.clone());
            claims.extend([claim]);
            self.note_owner_change(key, before, &mut changed);
        }
        if !new.is_empty() {
            self.by_service.insert(service.clone(), new);
        }
        changed.remove(service);
        changed
    }

    /// Returns the service port that owns a frontend.
    #[must_use]
    pub fn owner(&self, key: &FrontendKey) -> Option<&PortName> {
        self.claims.get(key)?.first().map(|((_, name), ())| name)
    }

    fn note_owner_change(
        &self,
        key: &FrontendKey,
        before: Option<PortName>,
        changed: &mut BTreeSet<ObjectName>,
    ) {
        let after = self.owner(key);
        if before.as_ref() != after {
            changed.extend(before.map(|name| name.service));
            changed.extend(after.map(|name| name.service.clone()));
        }
    }
}
