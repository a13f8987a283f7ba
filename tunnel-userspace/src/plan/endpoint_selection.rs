//! Selects the endpoints of a service port that get traffic from this node, as kube-proxy does
//! (`pkg/proxy/topology.go`, `CategorizeEndpoints`).

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
};

use tunnel_common::addr::{Address, Port, Protocol};

use super::{BackendTarget, NodeInfo};
use crate::model::{Endpoint, EndpointSlice, Family, Hints, Weights};

/// The endpoints of a service port that get traffic.
#[derive(Debug, Eq, PartialEq)]
pub(super) struct SelectedEndpoints {
    /// The endpoints for new connections under traffic policy `Cluster`.
    pub(super) cluster: BTreeSet<BackendTarget>,
    /// The endpoints for new connections under traffic policy `Local`.
    pub(super) local: BTreeSet<BackendTarget>,
    /// The endpoints that serve open connections, even if they get no new ones.
    pub(super) serving: BTreeSet<BackendTarget>,
    /// The weight of each endpoint; empty if the Service has no weights.
    pub(super) weights: BTreeMap<BackendTarget, u32>,
}

/// Selects the endpoints of the service port with a given name and protocol.
pub(super) fn select_endpoints(
    slices: &[Arc<EndpointSlice>],
    family: Family,
    port: (&str, Protocol),
    weights: Option<&Weights>,
    node_info: &NodeInfo,
) -> SelectedEndpoints {
    let found = endpoints_of_port(slices, family, port);
    let weigh = |weights: &Weights| {
        let all = found.iter();
        all.map(|(target, endpoint)| {
            let weight = weights.of(endpoint.name.as_deref(), endpoint.zone.as_deref());
            (*target, weight)
        })
        .collect()
    };
    let select = |wanted: &dyn Fn(&Endpoint) -> bool| -> BTreeSet<BackendTarget> {
        let wanted = found.iter().filter(|(_, endpoint)| wanted(endpoint));
        wanted.map(|(target, _)| *target).collect()
    };
    let is_local = |endpoint: &Endpoint| node_info.hosts(endpoint);
    let hint_filter =
        choose_hint_filter(found.values().filter(|endpoint| endpoint.ready), node_info);
    let is_selected = |endpoint: &Endpoint| {
        let hints = endpoint.hints.as_deref();
        hint_filter.is_none_or(|matches| hints.is_some_and(|hints| matches(node_info, hints)))
    };
    let cluster = select(&|endpoint| endpoint.ready && is_selected(endpoint));
    let local = select(&|endpoint| endpoint.ready && is_local(endpoint));
    SelectedEndpoints {
        cluster: fallback_if_empty(cluster, || select(&Endpoint::is_fallback)),
        local: fallback_if_empty(local, || {
            select(&|endpoint| endpoint.is_fallback() && is_local(endpoint))
        }),
        serving: select(&|endpoint| endpoint.ready || endpoint.serving),
        weights: weights.map(weigh).unwrap_or_default(),
    }
}

/// Returns all endpoints of the service port with a given name and protocol. Port numbers come from the
/// slices, and may differ between slices. If several slices have the same address and port, an endpoint that
/// isn't terminating takes precedence (kube-proxy `pkg/proxy/endpointslicecache.go`).
pub(super) fn endpoints_of_port<'a>(
    slices: &'a [Arc<EndpointSlice>],
    family: Family,
    (name, protocol): (&str, Protocol),
) -> BTreeMap<BackendTarget, &'a Endpoint> {
    // The endpoint with the greatest value takes precedence.
    let order = |endpoint: &Endpoint| (!endpoint.terminating, endpoint.ready, endpoint.serving);
    let mut found: BTreeMap<BackendTarget, &Endpoint> = BTreeMap::new();
    for slice in slices.iter().filter(|slice| slice.family == family) {
        let slice_ports = slice.ports.iter();
        let matching = slice_ports.filter(|port| *port.name == *name && port.protocol == protocol);
        for port_number in matching.map(|port| Port::from_host(port.port)) {
            for endpoint in &slice.endpoints {
                let target = BackendTarget {
                    address: Address::from_ip(endpoint.address),
                    port: port_number,
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

fn fallback_if_empty(
    set: BTreeSet<BackendTarget>,
    other: impl FnOnce() -> BTreeSet<BackendTarget>,
) -> BTreeSet<BackendTarget> {
    if set.is_empty() { other() } else { set }
}

/// A function that returns true if an endpoint's hints select it for this node.
type HintFilter = fn(&NodeInfo, &Hints) -> bool;

/// Chooses which kind of topology hints to apply: those for nodes, those for zones, or none. A kind applies
/// if every ready endpoint has hints of this kind, and the hints select at least one of these endpoints for
/// this node.
fn choose_hint_filter<'a>(
    ready: impl Iterator<Item = &'a &'a Endpoint>,
    node_info: &NodeInfo,
) -> Option<HintFilter> {
    let hints: Vec<Option<&Hints>> = ready.map(|endpoint| endpoint.hints.as_deref()).collect();
    let applies = |has: fn(&Hints) -> bool, matches: HintFilter| {
        hints.iter().all(|hints| hints.is_some_and(has))
            && hints
                .iter()
                .flatten()
                .any(|hints| matches(node_info, hints))
    };
    if applies(
        |hints| !hints.nodes.is_empty(),
        NodeInfo::matches_node_hints,
    ) {
        Some(NodeInfo::matches_node_hints)
    } else if applies(
        |hints| !hints.zones.is_empty(),
        NodeInfo::matches_zone_hints,
    ) {
        Some(NodeInfo::matches_zone_hints)
    } else {
        None
    }
}

impl NodeInfo {
    /// Returns true if an endpoint runs on this node.
    pub(super) fn hosts(&self, endpoint: &Endpoint) -> bool {
        !self.name.is_empty() && endpoint.node.as_ref() == Some(&self.name)
    }

    fn matches_node_hints(&self, hints: &Hints) -> bool {
        !self.name.is_empty() && hints.nodes.contains(&self.name)
    }

    fn matches_zone_hints(&self, hints: &Hints) -> bool {
        let zone = self.zone.as_ref();
        zone.is_some_and(|zone| hints.zones.contains(zone))
    }
}
