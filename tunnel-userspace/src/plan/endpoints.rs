//! Selects the endpoints of a service port that get traffic from this node, as kube-proxy does
//! (`pkg/proxy/topology.go`, `CategorizeEndpoints`).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tunnel_common::addr::{Address, Port, Protocol};

use super::{Here, Target};
use crate::model::{Endpoint, EndpointSlice, Family, Hints, Weights};

/// The endpoints of a service port that get traffic.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct Endpoints {
    /// The endpoints for new connections with policy Cluster.
    pub(super) cluster: BTreeSet<Target>,
    /// The endpoints for new connections with policy Local.
    pub(super) local: BTreeSet<Target>,
    /// The endpoints that serve open connections, also if they get no new ones.
    pub(super) serving: BTreeSet<Target>,
    /// The weight of each endpoint; empty if the Service has no weights.
    pub(super) weights: BTreeMap<Target, u32>,
}

/// Selects the endpoints of a service port, which is given by its name and protocol.
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

/// Returns all endpoints of a service port, which is given by its name and protocol. Port numbers come from
/// the slices, and may differ between them. If several slices have the same address and port, an endpoint
/// that isn't terminating has precedence (kube-proxy `pkg/proxy/endpointslicecache.go`).
pub(super) fn found<'a>(
    slices: &'a [Arc<EndpointSlice>],
    family: Family,
    (name, protocol): (&str, Protocol),
) -> BTreeMap<Target, &'a Endpoint> {
    // The greatest has precedence.
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

/// A function that returns true if the hints of an endpoint select it for this node.
type IsNear = fn(&Here, &Hints) -> bool;

/// Chooses the kind of topology hints to apply: those for nodes, those for zones, or none. Hints of a kind
/// apply if every ready endpoint has some, and at least one of these endpoints is selected for this node.
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
    /// Returns true if an endpoint runs on this node.
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
