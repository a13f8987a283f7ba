//! The endpoints of a port that get traffic (kube-proxy `pkg/proxy/topology.go`, `CategorizeEndpoints`).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tunnel_common::addr::{Address, Port, Protocol};

use super::{Here, Target};
use crate::model::{Endpoint, EndpointSlice, Family, Hints, Weights};

/// The endpoints of a port that get traffic.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Endpoints {
    /// The endpoints for traffic with policy Cluster.
    pub(super) cluster: BTreeSet<Target>,
    /// The endpoints for traffic with policy Local.
    pub(super) local: BTreeSet<Target>,
    /// The endpoints that answer, whether they get new connections or not.
    pub(super) serving: BTreeSet<Target>,
    /// The weight of each; empty without weights, so that all are equal.
    pub(super) weights: BTreeMap<Target, u32>,
}

/// Returns the endpoints for this node of a Service's port, by its name and protocol, over all slices of
/// a family.
pub(super) fn of_port(
    slices: &[Arc<EndpointSlice>],
    family: Family,
    port: (&str, Protocol),
    weights: Option<&Weights>,
    here: &Here,
) -> Endpoints {
    let found = found(slices, family, port);
    let weigh = |weights: &Weights| {
        let all = found.iter();
        all.map(|(target, endpoint)| {
            let weight = weights.of(endpoint.name.as_deref(), endpoint.zone.as_deref());
            (*target, weight)
        })
        .collect()
    };
    let pick = |wanted: &dyn Fn(&Endpoint) -> bool| -> BTreeSet<Target> {
        let wanted = found.iter().filter(|(_, endpoint)| wanted(endpoint));
        wanted.map(|(target, _)| *target).collect()
    };
    let is_local = |endpoint: &Endpoint| here.has(endpoint);
    let topology = topology(found.values().filter(|endpoint| endpoint.ready), here);
    let is_near = |endpoint: &Endpoint| {
        let hints = endpoint.hints.as_deref();
        topology.is_none_or(|is_near| hints.is_some_and(|hints| is_near(here, hints)))
    };
    let cluster = pick(&|endpoint| endpoint.ready && is_near(endpoint));
    let local = pick(&|endpoint| endpoint.ready && is_local(endpoint));
    Endpoints {
        cluster: or_else(cluster, || pick(&Endpoint::is_fallback)),
        local: or_else(local, || {
            pick(&|endpoint| endpoint.is_fallback() && is_local(endpoint))
        }),
        serving: pick(&|endpoint| endpoint.ready || endpoint.serving),
        weights: weights.map(weigh).unwrap_or_default(),
    }
}

/// Returns every endpoint of a port, by its name and protocol. A slice serves the port if one of its own
/// ports has the same name and protocol; its number may differ between slices. If slices contradict each
/// other about an address, the one that is not terminating wins (kube-proxy
/// `pkg/proxy/endpointslicecache.go`).
pub(super) fn found<'a>(
    slices: &'a [Arc<EndpointSlice>],
    family: Family,
    (name, protocol): (&str, Protocol),
) -> BTreeMap<Target, &'a Endpoint> {
    // Ordered so that the greater of two wins.
    let order = |endpoint: &Endpoint| (!endpoint.terminating, endpoint.ready, endpoint.serving);
    let mut found: BTreeMap<Target, &Endpoint> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.family == family) {
        let own = slice.ports.iter();
        let own = own.filter(|own| *own.name == *name && own.protocol == protocol);
        for number in own.map(|own| Port::from_host(own.port)) {
            for endpoint in &slice.endpoints {
                let target = Target {
                    address: Address::from_ip(endpoint.address),
                    port: number,
                };
                let known = found.entry(target).or_insert(endpoint);
                if order(endpoint) > order(known) {
                    *known = endpoint;
                }
            }
        }
    }
    found
}

fn or_else(set: BTreeSet<Target>, other: impl FnOnce() -> BTreeSet<Target>) -> BTreeSet<Target> {
    if set.is_empty() { other() } else { set }
}

/// Returns true if hints are for clients of this node, or of its zone.
type IsNear = fn(&Here, &Hints) -> bool;

/// Returns the check for endpoints near enough; none if all are. Hints count if every ready endpoint has
/// some, and one of them is for this node, or else for its zone.
fn topology<'a>(ready: impl Iterator<Item = &'a &'a Endpoint>, here: &Here) -> Option<IsNear> {
    let hints: Vec<Option<&Hints>> = ready.map(|endpoint| endpoint.hints.as_deref()).collect();
    let count = |has: fn(&Hints) -> bool, is_near: IsNear| {
        hints.iter().all(|hints| hints.is_some_and(has))
            && hints.iter().flatten().any(|hints| is_near(here, hints))
    };
    if count(|hints| !hints.nodes.is_empty(), Here::is_node_of) {
        Some(Here::is_node_of)
    } else if count(|hints| !hints.zones.is_empty(), Here::is_zone_of) {
        Some(Here::is_zone_of)
    } else {
        None
    }
}

impl Here {
    /// Returns true if an endpoint is on this node.
    pub(super) fn has(&self, endpoint: &Endpoint) -> bool {
        !self.node.is_empty() && endpoint.node.as_ref() == Some(&self.node)
    }

    fn is_node_of(&self, hints: &Hints) -> bool {
        !self.node.is_empty() && hints.nodes.contains(&self.node)
    }

    fn is_zone_of(&self, hints: &Hints) -> bool {
        let zone = self.zone.as_ref();
        zone.is_some_and(|zone| hints.zones.contains(zone))
    }
}
