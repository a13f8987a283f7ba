//! The endpoints of a Service port, and its cluster and local backend sets (contract §1 and §4).

use std::{
    collections::{BTreeMap, BTreeSet},
    net::SocketAddr,
};

use k8s_openapi::api::discovery::v1::{self, EndpointPort, EndpointSlice};

use super::{
    Cluster, EndpointSet, LocalNode, Owner,
    address::{Family, parse},
    objects, pools,
};

/// An endpoint. `local` is true if it is on the node for which the model computes frontends.
#[derive(Clone, Debug)]
pub(super) struct Endpoint {
    pub(super) local: bool,
    pub(super) ready: bool,
    serving: bool,
    terminating: bool,
    nodes: BTreeSet<String>,
    zones: BTreeSet<String>,
}

/// The endpoints of one Service port in one address family.
pub(super) type Endpoints = BTreeMap<SocketAddr, Endpoint>;

/// Returns all endpoints of a Service port, including those that can't be used.
pub(super) fn endpoints(
    cluster: &Cluster,
    here: &LocalNode,
    owner: &Owner,
    family: Family,
) -> Endpoints {
    let mut found = Endpoints::new();
    for slice in objects::slices(cluster, (&owner.namespace, &owner.service), family) {
        // As in yurthub, this filter is applied before all other rules.
        let slice = &pools::filter_endpoints(cluster, here, slice);
        for port in slice.ports.iter().flatten() {
            if let Some(number) = number_for(port, owner) {
                add(&mut found, here, slice, (family, number));
            }
        }
    }
    found
}

/// Returns an endpoint port's number if its name and protocol match the Service port's (contract §1,
/// `ports[].name`). A port without a name or number is ignored.
fn number_for(port: &EndpointPort, owner: &Owner) -> Option<u16> {
    let matches = port.name.as_deref()? == owner.port
        && objects::protocol(port.protocol.as_deref()) == Some(owner.protocol);
    if !matches {
        return None;
    }
    objects::port_number(port.port?)
}

/// Adds the endpoints of a slice, all with the given port number.
fn add(
    found: &mut Endpoints,
    here: &LocalNode,
    slice: &EndpointSlice,
    (family, port): (Family, u16),
) {
    for entry in slice.endpoints.iter().flatten() {
        // Contract §1, `endpoints[].addresses`: only the first address counts.
        let Some(address) = entry.addresses.first().and_then(|text| parse(text)) else {
            continue;
        };
        if Family::of(address) != family {
            continue;
        }
        let at = SocketAddr::new(address, port);
        let endpoint = endpoint(entry, here);
        // Contract §1, "duplicates over slices". If two endpoints that are not terminating have the same
        // address, the last one is kept, as in kube-proxy within a slice (see addEndpoints in
        // `pkg/proxy/endpointslicecache.go`). Between slices, kube-proxy's order is random; here, slices are
        // ordered by name.
        if !found.contains_key(&at) || !endpoint.terminating {
            found.insert(at, endpoint);
        }
    }
}

/// Parses an endpoint (contract §1, "conditions" and "nodeName").
fn endpoint(entry: &v1::Endpoint, here: &LocalNode) -> Endpoint {
    let conditions = entry.conditions.clone().unwrap_or_default();
    let hints = entry.hints.clone().unwrap_or_default();
    let nodes = hints.for_nodes.unwrap_or_default();
    let zones = hints.for_zones.unwrap_or_default();
    Endpoint {
        local: entry.node_name.as_ref() == Some(&here.node),
        ready: conditions.ready.unwrap_or(true),
        serving: conditions.serving.unwrap_or(true),
        terminating: conditions.terminating.unwrap_or(false),
        nodes: nodes.into_iter().map(|node| node.name).collect(),
        zones: zones.into_iter().map(|zone| zone.name).collect(),
    }
}

/// Returns true for a terminating endpoint that is still serving, which is used if no endpoint is ready
/// (contract §4.1).
const fn is_fallback(endpoint: &Endpoint) -> bool {
    endpoint.serving && endpoint.terminating
}

/// Returns the ready endpoints that hints select or, if no endpoint is ready, all fallback endpoints
/// (contract §4.2).
pub(super) fn cluster_set(
    endpoints: &Endpoints,
    here: &LocalNode,
    zone: Option<&str>,
) -> EndpointSet {
    let ready = filter(endpoints, |endpoint| endpoint.ready);
    if ready.is_empty() {
        return addresses(&filter(endpoints, is_fallback));
    }
    addresses(&select_by_hints(ready, here, zone))
}

/// Returns the local ready endpoints or, if there are none, the local fallback endpoints (contract §4.4).
/// Hints have no effect.
pub(super) fn local_set(endpoints: &Endpoints) -> EndpointSet {
    let local = filter(endpoints, |endpoint| endpoint.local);
    let ready = filter(&local, |endpoint| endpoint.ready);
    if ready.is_empty() {
        return addresses(&filter(&local, is_fallback));
    }
    addresses(&ready)
}

/// Returns the ready endpoints whose hints name this node or its zone, or all ready endpoints if the hints
/// select none (contract §4.3).
fn select_by_hints(ready: Endpoints, here: &LocalNode, zone: Option<&str>) -> Endpoints {
    let for_node = filter(&ready, |endpoint| endpoint.nodes.contains(&here.node));
    let all_name_nodes = ready.values().all(|endpoint| !endpoint.nodes.is_empty());
    if all_name_nodes && !for_node.is_empty() {
        return for_node;
    }
    let Some(zone) = zone else {
        return ready;
    };
    let for_zone = filter(&ready, |endpoint| endpoint.zones.contains(zone));
    let all_name_zones = ready.values().all(|endpoint| !endpoint.zones.is_empty());
    if all_name_zones && !for_zone.is_empty() {
        return for_zone;
    }
    ready
}

fn filter(endpoints: &Endpoints, wanted: impl Fn(&Endpoint) -> bool) -> Endpoints {
    let mut matching = endpoints.clone();
    matching.retain(|_, endpoint| wanted(endpoint));
    matching
}

fn addresses(endpoints: &Endpoints) -> EndpointSet {
    endpoints.keys().copied().collect()
}
