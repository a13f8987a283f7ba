//! Generates a Service's EndpointSlices.

use k8s_openapi::{
    api::{
        core::v1::Service,
        discovery::v1::{
            Endpoint, EndpointConditions, EndpointHints, EndpointPort, EndpointSlice, ForNode,
            ForZone,
        },
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{Generator, ZONES, add_label};

/// Properties that all of a Service's endpoints share, so that rules about all endpoints often apply.
#[derive(Clone, Copy)]
struct SharedProperties {
    /// True if no endpoint is ready.
    none_ready: bool,
    /// One in this many endpoints lacks node hints.
    unhinted_nodes: u32,
    /// One in this many endpoints lacks zone hints.
    unhinted_zones: u32,
}

/// More than the number of endpoints in any generated cluster, so that hardly any endpoint lacks its hint.
const NONE_LACKS: u32 = 1_000;
const ALL_LACK: u32 = 1;

pub(super) fn generate(generator: &mut Generator<'_>, service: &Service) -> Vec<EndpointSlice> {
    let shared = SharedProperties {
        none_ready: generator.one_in(4),
        unhinted_nodes: generator.pick([ALL_LACK, ALL_LACK, NONE_LACKS, 4]),
        unhinted_zones: generator.pick([ALL_LACK, NONE_LACKS, NONE_LACKS, 4]),
    };
    let mut slices = Vec::new();
    for number in 0..generator.rng.usize(0..=4) {
        slices.push(slice(generator, service, shared, number));
    }
    if generator.one_in(2) {
        let overlapping = slices
            .first()
            .and_then(|from| overlapping_slice(generator, from));
        slices.extend(overlapping);
    }
    slices
}

fn slice(
    generator: &mut Generator<'_>,
    service: &Service,
    shared: SharedProperties,
    number: usize,
) -> EndpointSlice {
    let address_type = address_type(generator, service);
    let count = generator.rng.usize(0..=4);
    let endpoints = (0..count).map(|_| endpoint(generator, address_type, shared));
    EndpointSlice {
        endpoints: Some(endpoints.collect()),
        metadata: metadata(generator, service, number),
        address_type: address_type.to_owned(),
        ports: Some(ports(generator, service)),
    }
}

fn metadata(generator: &mut Generator<'_>, service: &Service, number: usize) -> ObjectMeta {
    let name = service.metadata.name.clone().unwrap_or_default();
    let namespace = service.metadata.namespace.clone().unwrap_or_default();
    let mut metadata = ObjectMeta {
        // The name is unique across namespaces, since some slices move to another namespace.
        name: Some(format!("{name}-{namespace}{number}")),
        namespace: service.metadata.namespace.clone(),
        ..ObjectMeta::default()
    };
    if !generator.one_in(25) {
        add_label(&mut metadata, "kubernetes.io/service-name", &name);
    }
    if generator.one_in(25) {
        metadata.namespace = Some(generator.pick(["a", "b", "c"]).to_owned());
    }
    if generator.one_in(12) {
        add_label(&mut metadata, "service.kubernetes.io/headless", "");
    }
    if generator.one_in(25) {
        // This label has no effect on a slice; only the headless label does.
        let key = "service.kubernetes.io/service-proxy-name";
        add_label(&mut metadata, key, "other");
    }
    metadata
}

/// Returns an address type, usually that of one of the Service's families.
fn address_type(generator: &mut Generator<'_>, service: &Service) -> &'static str {
    match generator.rng.u8(0..20) {
        0 | 1 => return "FQDN",
        2 => return generator.pick(["IPv4", "IPv6"]),
        _ => {}
    }
    let spec = service.spec.as_ref();
    let families = spec.and_then(|spec| spec.ip_families.as_deref());
    let cluster_ip = spec.and_then(|spec| spec.cluster_ip.as_deref());
    let single_ipv6 = cluster_ip.is_some_and(|address| address.contains(':'));
    match families.map_or(1, <[String]>::len) {
        2 => generator.pick(["IPv4", "IPv6"]),
        _ if single_ipv6 => "IPv6",
        _ => "IPv4",
    }
}

fn ports(generator: &mut Generator<'_>, service: &Service) -> Vec<EndpointPort> {
    let spec = service.spec.as_ref();
    let wanted = spec.and_then(|spec| spec.ports.as_deref());
    let mut ports = Vec::new();
    for (number, port) in wanted.unwrap_or_default().iter().enumerate() {
        if generator.one_in(8) {
            continue;
        }
        let right = Some(port.name.clone().unwrap_or_default());
        let name = match generator.rng.u8(0..20) {
            // Names must be unique, so only the first port may go without one.
            0 if number == 0 => None,
            1 => Some(format!("other{number}")),
            _ => right,
        };
        let protocol = if generator.one_in(15) {
            Some("UDP".to_owned())
        } else {
            port.protocol.clone()
        };
        // An absent protocol means TCP.
        let implied = protocol.as_deref() == Some("TCP") && generator.one_in(10);
        ports.push(EndpointPort {
            name,
            protocol: protocol.filter(|_| !implied),
            port: match generator.rng.u8(0..20) {
                0 => generator.pick([None, Some(0)]),
                1..10 => Some(9090),
                _ => Some(8080),
            },
            ..EndpointPort::default()
        });
    }
    if generator.one_in(10) {
        ports.push(EndpointPort {
            name: Some("metrics".to_owned()),
            port: Some(9100),
            protocol: Some("TCP".to_owned()),
            ..EndpointPort::default()
        });
    }
    ports
}

fn endpoint(
    generator: &mut Generator<'_>,
    address_type: &str,
    shared: SharedProperties,
) -> Endpoint {
    generator.endpoints += 1;
    let number = generator.endpoints;
    let mut addresses = vec![match address_type {
        "IPv4" if generator.one_in(20) => format!("10.244.001.{number:03}"),
        "IPv4" => format!("10.244.0.{number}"),
        "IPv6" => format!("fd24::{number:x}"),
        _ => format!("pod-{number}.example.org"),
    }];
    if generator.one_in(10) {
        addresses.extend(host_address(generator, address_type));
        addresses.rotate_right(1);
    }
    let node_name = match generator.rng.u8(0..10) {
        0 => None,
        1 => Some("gone".to_owned()),
        _ => generator.node().metadata.name.clone(),
    };
    Endpoint {
        addresses,
        conditions: conditions(generator, shared),
        node_name,
        hints: hints(generator, shared),
        ..Endpoint::default()
    }
}

/// Returns a node's address, for an endpoint in the node's network namespace. Each address is returned only
/// once, so that no two endpoints with different properties share it.
fn host_address(generator: &mut Generator<'_>, address_type: &str) -> Option<String> {
    let number = generator.rng.usize(0..generator.nodes.len()) + 10;
    let address = match address_type {
        "IPv4" => format!("192.168.0.{number}"),
        "IPv6" => format!("fd00::{number}"),
        _ => return None,
    };
    let free = generator.host_addresses.insert(address.clone());
    free.then_some(address)
}

/// Generates any combination of conditions, most often one that real pods have.
fn conditions(
    generator: &mut Generator<'_>,
    shared: SharedProperties,
) -> Option<EndpointConditions> {
    let any = [None, Some(true), Some(false)];
    let (mut ready, serving, terminating) = match generator.rng.u8(0..8) {
        0..3 => (Some(true), Some(true), Some(false)),
        3 => (Some(false), Some(true), Some(true)),
        _ => (
            generator.pick(any),
            generator.pick(any),
            generator.pick(any),
        ),
    };
    if shared.none_ready {
        ready = Some(false);
    }
    let conditions = EndpointConditions {
        ready,
        serving,
        terminating,
    };
    let all_absent = conditions == EndpointConditions::default();
    (!all_absent || generator.rng.bool()).then_some(conditions)
}

fn hints(generator: &mut Generator<'_>, shared: SharedProperties) -> Option<EndpointHints> {
    let mut hints = EndpointHints::default();
    if !generator.one_in(shared.unhinted_nodes) {
        let name = generator.node().metadata.name.clone().unwrap_or_default();
        hints.for_nodes = Some(vec![ForNode { name }]);
    }
    if !generator.one_in(shared.unhinted_zones) {
        let one = generator.pick(ZONES);
        let mut zones = generator.subset(ZONES, 5);
        if !zones.iter().any(|zone| zone == one) {
            zones.push(one.to_owned());
        }
        let zones = zones.into_iter().map(|name| ForZone { name });
        hints.for_zones = Some(zones.collect());
    }
    let empty = hints == EndpointHints::default();
    (!empty || generator.one_in(5)).then_some(hints)
}

/// Generates a slice that shares some endpoints with another slice. A shared endpoint either has the same
/// conditions in both slices or is terminating in exactly one of them.
fn overlapping_slice(generator: &mut Generator<'_>, from: &EndpointSlice) -> Option<EndpointSlice> {
    let mut slice = from.clone();
    let name = slice.metadata.name.as_mut()?;
    // The new slice's name sorts either before or after the other's.
    *name = format!("{}{name}", generator.pick(["a", "z"]));
    let mut endpoints = slice.endpoints.take()?;
    endpoints.retain(|_| generator.rng.bool());
    for endpoint in &mut endpoints {
        if generator.one_in(3) {
            continue;
        }
        let before = endpoint.conditions.clone().unwrap_or_default();
        let was_terminating = before.terminating == Some(true);
        let running = generator.pick([None, Some(false)]);
        let mut after = conditions(generator, WITHOUT_HINTS).unwrap_or_default();
        after.terminating = if was_terminating { running } else { Some(true) };
        endpoint.conditions = Some(after);
        endpoint.node_name = generator
            .pick([endpoint.node_name.clone().as_deref(), None])
            .map(str::to_owned);
    }
    slice.endpoints = Some(endpoints);
    Some(slice)
}

const WITHOUT_HINTS: SharedProperties = SharedProperties {
    none_ready: false,
    unhinted_nodes: ALL_LACK,
    unhinted_zones: ALL_LACK,
};
