//! Selects the endpoints of a service port that get traffic from this node, as kube-proxy does
//! (`pkg/proxy/topology.go`, `CategorizeEndpoints`).

use std::{cmp::Ordering, collections::BTreeMap, sync::Arc};

use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::Membership,
};

use super::{
    BackendTarget, NodeInfo,
    planned_endpoints::{EndpointList, ListedEndpoint, PlannedEndpoints, PortNumbers},
};
use crate::model::{Endpoint, EndpointSlice, Family, Hints, ServiceState, Weights};

/// Identifies the endpoints of a port, regardless of the port's numbers: the slices that have the port, each
/// with the position of its port number among the port's numbers.
type EndpointSource = Vec<(usize, u16)>;

/// Selects the endpoints of a Service's ports. Ports whose endpoints come from the same slices get the same
/// list.
pub(super) struct EndpointSelector<'a> {
    slices: &'a [Arc<EndpointSlice>],
    weights: Option<&'a Weights>,
    node_info: &'a NodeInfo,
    /// The lists selected so far; `None` if the Service has only one port.
    known: Option<BTreeMap<(Family, EndpointSource), Arc<EndpointList>>>,
}

impl<'a> EndpointSelector<'a> {
    pub(super) fn new(state: &'a ServiceState, node_info: &'a NodeInfo) -> Self {
        Self {
            slices: &state.slices,
            weights: state.service.weights.as_deref(),
            node_info,
            known: (state.service.ports.len() > 1).then(BTreeMap::new),
        }
    }

    /// Selects the endpoints of the service port with a given name and protocol.
    pub(super) fn select(&mut self, family: Family, port: (&str, Protocol)) -> PlannedEndpoints {
        let found = slices_of_port(self.slices, family, port);
        let mut numbers: Vec<Port> = found.iter().map(|(_, number)| *number).collect();
        numbers.sort_unstable();
        numbers.dedup();
        let position = |number| numbers.binary_search(number).unwrap_or(0);
        let source = found
            .iter()
            .map(|(slice, number)| (*slice, u16::try_from(position(number)).unwrap_or(u16::MAX)));
        let key = (family, source.collect());
        let known = self.known.as_ref().and_then(|known| known.get(&key));
        let list = known.map_or_else(|| Arc::new(self.list(&key.1)), Arc::clone);
        if let Some(known) = &mut self.known {
            known.insert(key, Arc::clone(&list));
        }
        PlannedEndpoints::new(PortNumbers::from(&*numbers), list)
    }

    fn list(&self, source: &EndpointSource) -> EndpointList {
        let mut found: BTreeMap<(Address, u16), &Endpoint> = BTreeMap::new();
        for (slice, number) in source {
            let endpoints = self.slices.get(*slice).into_iter();
            for endpoint in endpoints.flat_map(|slice| &slice.endpoints) {
                let key = (Address::from_ip(endpoint.address), *number);
                keep_preferred(found.entry(key).or_insert(endpoint), endpoint);
            }
        }
        let found: Vec<_> = found.into_iter().collect();
        let endpoints = found.iter().map(|(_, endpoint)| *endpoint);
        let selected = select_sets(endpoints, self.weights, self.node_info);
        let endpoints = found.iter().zip(selected);
        let listed = endpoints.filter(|((_, endpoint), _)| endpoint.ready || endpoint.serving);
        listed
            .map(|((key, _), selected)| ListedEndpoint {
                address: key.0,
                number: key.1,
                weight: u8::try_from(selected.weight.max(1)).unwrap_or(u8::MAX),
                sets: selected.sets,
            })
            .collect()
    }
}

/// An endpoint's weight, and the sets for new connections that contain it.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct SelectedEndpoint {
    pub(super) weight: u32,
    /// The sets of the traffic policies that permit the endpoint.
    pub(super) permitted_sets: Membership,
    /// The same sets, except those in which the endpoint gets no connections because its weight is 0 and
    /// others have a greater weight.
    pub(super) sets: Membership,
}

/// Selects, for each of a port's endpoints, the sets that contain it.
pub(super) fn select_sets<'a, I: Iterator<Item = &'a Endpoint> + Clone>(
    endpoints: I,
    weights: Option<&Weights>,
    node_info: &NodeInfo,
) -> Vec<SelectedEndpoint> {
    let is_local = |endpoint: &Endpoint| node_info.hosts(endpoint);
    let ready = endpoints.clone().filter(|endpoint| endpoint.ready);
    let hint_filter = choose_hint_filter(ready, node_info);
    let is_hinted = |endpoint: &Endpoint| {
        let hints = endpoint.hints.as_deref();
        hint_filter.is_none_or(|matches| hints.is_some_and(|hints| matches(node_info, hints)))
    };
    let is_ready_local = |endpoint: &Endpoint| endpoint.ready && is_local(endpoint);
    let is_ready_hinted = |endpoint: &Endpoint| endpoint.ready && is_hinted(endpoint);
    // If no endpoint is ready, those that are terminating but still serving are used instead.
    let cluster_falls_back = !endpoints.clone().any(is_ready_hinted);
    let local_falls_back = !endpoints.clone().any(is_ready_local);
    let permits = |endpoint: &Endpoint| {
        let in_cluster = if cluster_falls_back {
            endpoint.is_fallback()
        } else {
            is_ready_hinted(endpoint)
        };
        let in_local = if local_falls_back {
            endpoint.is_fallback() && is_local(endpoint)
        } else {
            is_ready_local(endpoint)
        };
        let member = |is_in: bool, set| if is_in { set } else { Membership::NONE };
        member(in_cluster, Membership::CLUSTER).union(member(in_local, Membership::LOCAL))
    };
    let weigh = |endpoint: &Endpoint| {
        weights.map_or(1, |weights| {
            weights.of(endpoint.name.as_deref(), endpoint.zone.as_deref())
        })
    };
    let selected = endpoints.map(|endpoint| {
        let sets = permits(endpoint);
        SelectedEndpoint {
            weight: weigh(endpoint),
            permitted_sets: sets,
            sets,
        }
    });
    let mut selected: Vec<_> = selected.collect();
    if weights.is_some() {
        leave_out_zero_weights(&mut selected);
    }
    selected
}

/// Removes the endpoints with weight 0 from each set, unless all endpoints in the set have weight 0.
fn leave_out_zero_weights(selected: &mut [SelectedEndpoint]) {
    let weighted = selected.iter().filter(|endpoint| endpoint.weight > 0);
    let weighted = weighted.fold(Membership::NONE, |sets, it| sets.union(it.permitted_sets));
    for endpoint in selected.iter_mut().filter(|it| it.weight == 0) {
        let kept = [Membership::CLUSTER, Membership::LOCAL];
        let kept = kept
            .into_iter()
            .filter(|set| endpoint.permitted_sets.includes(*set) && !weighted.includes(*set));
        endpoint.sets = kept.fold(Membership::NONE, Membership::union);
    }
}

/// Returns the positions of the slices that have a port with the given name and protocol, each with the port
/// number. Port numbers may differ between slices.
fn slices_of_port(
    slices: &[Arc<EndpointSlice>],
    family: Family,
    (name, protocol): (&str, Protocol),
) -> Vec<(usize, Port)> {
    let slices = slices.iter().enumerate();
    let slices = slices.filter(|(_, slice)| slice.family == family);
    slices
        .flat_map(|(position, slice)| {
            let ports = slice.ports.iter();
            let matching = ports.filter(|port| *port.name == *name && port.protocol == protocol);
            matching.map(move |port| (position, Port::from_host(port.port)))
        })
        .collect()
}

/// Returns all endpoints of the service port with a given name and protocol.
pub(super) fn endpoints_of_port<'a>(
    slices: &'a [Arc<EndpointSlice>],
    family: Family,
    port: (&str, Protocol),
) -> BTreeMap<BackendTarget, &'a Endpoint> {
    let mut found: BTreeMap<BackendTarget, &Endpoint> = BTreeMap::new();
    for (slice, number) in slices_of_port(slices, family, port) {
        let endpoints = slices.get(slice).into_iter();
        for endpoint in endpoints.flat_map(|slice| &slice.endpoints) {
            let target = BackendTarget {
                address: Address::from_ip(endpoint.address),
                port: number,
            };
            keep_preferred(found.entry(target).or_insert(endpoint), endpoint);
        }
    }
    found
}

/// Replaces `known` with another endpoint that has the same address and port if the other one takes
/// precedence: an endpoint that isn't terminating does (kube-proxy `pkg/proxy/endpointslicecache.go`).
fn keep_preferred<'a>(known: &mut &'a Endpoint, other: &'a Endpoint) {
    let order = |endpoint: &Endpoint| (!endpoint.terminating, endpoint.ready, endpoint.serving);
    if order(other).cmp(&order(known)) == Ordering::Greater {
        *known = other;
    }
}

/// A function that returns true if an endpoint's hints select it for this node.
type HintFilter = fn(&NodeInfo, &Hints) -> bool;

/// Chooses which kind of topology hints to apply: those for nodes, those for zones, or none. A kind applies
/// if every ready endpoint has hints of this kind, and the hints select at least one of these endpoints for
/// this node.
fn choose_hint_filter<'a, I: Iterator<Item = &'a Endpoint>>(
    ready: I,
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
