//! Generates the EndpointSlices of a Service.

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

use super::{Draw, ZONES, add_label};

/// Properties that all endpoints of a Service share, so that rules about all endpoints apply often.
#[derive(Clone, Copy)]
struct Mood {
    /// True if no endpoint is ready.
    none_ready: bool,
    /// One in this many endpoints lacks hints for nodes.
    unhinted_nodes: u32,
    /// One in this many endpoints lacks hints for zones.
    unhinted_zones: u32,
}

/// More than the endpoints of any generated cluster, so that rarely any endpoint lacks its hint.
const NONE_LACKS: u32 = 1_000;
const ALL_LACK: u32 = 1;

pub(super) fn draw(draw: &mut Draw<'_>, service: &Service) -> Vec<EndpointSlice> {
    let mood = Mood {
        none_ready: draw.chance(4),
        unhinted_nodes: draw.pick([ALL_LACK, ALL_LACK, NONE_LACKS, 4]),
        unhinted_zones: draw.pick([ALL_LACK, NONE_LACKS, NONE_LACKS, 4]),
    };
    let mut slices = Vec::new();
    for number in 0..draw.rng.usize(0..=4) {
        slices.push(slice(draw, service, mood, number));
    }
    if draw.chance(2) {
        let moved = slices.first().and_then(|from| moved(draw, from));
        slices.extend(moved);
    }
    slices
}

fn slice(draw: &mut Draw<'_>, service: &Service, mood: Mood, number: usize) -> EndpointSlice {
    let address_type = address_type(draw, service);
    let count = draw.rng.usize(0..=4);
    let endpoints = (0..count).map(|_| endpoint(draw, address_type, mood));
    EndpointSlice {
        endpoints: Some(endpoints.collect()),
        metadata: metadata(draw, service, number),
        address_type: address_type.to_owned(),
        ports: Some(ports(draw, service)),
    }
}

fn metadata(draw: &mut Draw<'_>, service: &Service, number: usize) -> ObjectMeta {
    let name = service.metadata.name.clone().unwrap_or_default();
    let namespace = service.metadata.namespace.clone().unwrap_or_default();
    let mut metadata = ObjectMeta {
        // Unique over all namespaces, since some slices move to another namespace.
        name: Some(format!("{name}-{namespace}{number}")),
        namespace: service.metadata.namespace.clone(),
        ..ObjectMeta::default()
    };
    if !draw.chance(25) {
        add_label(&mut metadata, "kubernetes.io/service-name", &name);
    }
    if draw.chance(25) {
        metadata.namespace = Some(draw.pick(["a", "b", "c"]).to_owned());
    }
    if draw.chance(12) {
        add_label(&mut metadata, "service.kubernetes.io/headless", "");
    }
    if draw.chance(25) {
        // This label has no effect on a slice; only the headless label has.
        let key = "service.kubernetes.io/service-proxy-name";
        add_label(&mut metadata, key, "other");
    }
    metadata
}

/// Returns an address type, mostly one of the Service's families.
fn address_type(draw: &mut Draw<'_>, service: &Service) -> &'static str {
    match draw.rng.u8(0..20) {
        0 | 1 => return "FQDN",
        2 => return draw.pick(["IPv4", "IPv6"]),
        _ => {}
    }
    let spec = service.spec.as_ref();
    let families = spec.and_then(|spec| spec.ip_families.as_deref());
    let cluster_ip = spec.and_then(|spec| spec.cluster_ip.as_deref());
    let single_ipv6 = cluster_ip.is_some_and(|address| address.contains(':'));
    match families.map_or(1, <[String]>::len) {
        2 => draw.pick(["IPv4", "IPv6"]),
        _ if single_ipv6 => "IPv6",
        _ => "IPv4",
    }
}

fn ports(draw: &mut Draw<'_>, service: &Service) -> Vec<EndpointPort> {
    let spec = service.spec.as_ref();
    let wanted = spec.and_then(|spec| spec.ports.as_deref());
    let mut ports = Vec::new();
    for (number, port) in wanted.unwrap_or_default().iter().enumerate() {
        if draw.chance(8) {
            continue;
        }
        let right = Some(port.name.clone().unwrap_or_default());
        let name = match draw.rng.u8(0..20) {
            // Names must be unique, so only the first port may lack its name.
            0 if number == 0 => None,
            1 => Some(format!("other{number}")),
            _ => right,
        };
        let protocol = if draw.chance(15) {
            Some("UDP".to_owned())
        } else {
            port.protocol.clone()
        };
        // An absent protocol means TCP.
        let implied = protocol.as_deref() == Some("TCP") && draw.chance(10);
        ports.push(EndpointPort {
            name,
            protocol: protocol.filter(|_| !implied),
            port: match draw.rng.u8(0..20) {
                0 => draw.pick([None, Some(0)]),
                1..10 => Some(9090),
                _ => Some(8080),
            },
            ..EndpointPort::default()
        });
    }
    if draw.chance(10) {
        ports.push(EndpointPort {
            name: Some("metrics".to_owned()),
            port: Some(9100),
            protocol: Some("TCP".to_owned()),
            ..EndpointPort::default()
        });
    }
    ports
}

fn endpoint(draw: &mut Draw<'_>, address_type: &str, mood: Mood) -> Endpoint {
    draw.endpoints += 1;
    let number = draw.endpoints;
    let mut addresses = vec![match address_type {
        "IPv4" if draw.chance(20) => format!("10.244.001.{number:03}"),
        "IPv4" => format!("10.244.0.{number}"),
        "IPv6" => format!("fd24::{number:x}"),
        _ => format!("pod-{number}.example.org"),
    }];
    if draw.chance(10) {
        addresses.extend(host_address(draw, address_type));
        addresses.rotate_right(1);
    }
    let node_name = match draw.rng.u8(0..10) {
        0 => None,
        1 => Some("gone".to_owned()),
        _ => draw.node().metadata.name.clone(),
    };
    Endpoint {
        addresses,
        conditions: conditions(draw, mood),
        node_name,
        hints: hints(draw, mood),
        ..Endpoint::default()
    }
}

/// Returns the address of a node, for an endpoint in the node's network namespace. Each address is returned
/// once, so that no two endpoints with different properties have it.
fn host_address(draw: &mut Draw<'_>, address_type: &str) -> Option<String> {
    let number = draw.rng.usize(0..draw.nodes.len()) + 10;
    let address = match address_type {
        "IPv4" => format!("192.168.0.{number}"),
        "IPv6" => format!("fd00::{number}"),
        _ => return None,
    };
    let free = draw.host_addresses.insert(address.clone());
    free.then_some(address)
}

/// Generates any combination of conditions, most often those of real pods.
fn conditions(draw: &mut Draw<'_>, mood: Mood) -> Option<EndpointConditions> {
    let any = [None, Some(true), Some(false)];
    let (mut ready, serving, terminating) = match draw.rng.u8(0..8) {
        0..3 => (Some(true), Some(true), Some(false)),
        3 => (Some(false), Some(true), Some(true)),
        _ => (draw.pick(any), draw.pick(any), draw.pick(any)),
    };
    if mood.none_ready {
        ready = Some(false);
    }
    let conditions = EndpointConditions {
        ready,
        serving,
        terminating,
    };
    let all_absent = conditions == EndpointConditions::default();
    (!all_absent || draw.rng.bool()).then_some(conditions)
}

fn hints(draw: &mut Draw<'_>, mood: Mood) -> Option<EndpointHints> {
    let mut hints = EndpointHints::default();
    if !draw.chance(mood.unhinted_nodes) {
        let name = draw.node().metadata.name.clone().unwrap_or_default();
        hints.for_nodes = Some(vec![ForNode { name }]);
    }
    if !draw.chance(mood.unhinted_zones) {
        let one = draw.pick(ZONES);
        let mut zones = draw.some(ZONES, 5);
        if !zones.iter().any(|zone| zone == one) {
            zones.push(one.to_owned());
        }
        let zones = zones.into_iter().map(|name| ForZone { name });
        hints.for_zones = Some(zones.collect());
    }
    let empty = hints == EndpointHints::default();
    (!empty || draw.chance(5)).then_some(hints)
}

/// Generates a slice that shares some endpoints with another slice: either with equal conditions, or so
/// that exactly one of the two is terminating.
fn moved(draw: &mut Draw<'_>, from: &EndpointSlice) -> Option<EndpointSlice> {
    let mut slice = from.clone();
    let name = slice.metadata.name.as_mut()?;
    // The new slice sorts before or after the other slice.
    *name = format!("{}{name}", draw.pick(["a", "z"]));
    let mut endpoints = slice.endpoints.take()?;
    endpoints.retain(|_| draw.rng.bool());
    for endpoint in &mut endpoints {
        if draw.chance(3) {
            continue;
        }
        let before = endpoint.conditions.clone().unwrap_or_default();
        let was_terminating = before.terminating == Some(true);
        let running = draw.pick([None, Some(false)]);
        let mut after = conditions(draw, NEITHER).unwrap_or_default();
        after.terminating = if was_terminating { running } else { Some(true) };
        endpoint.conditions = Some(after);
        endpoint.node_name = draw
            .pick([endpoint.node_name.clone().as_deref(), None])
            .map(str::to_owned);
    }
    slice.endpoints = Some(endpoints);
    Some(slice)
}

const NEITHER: Mood = Mood {
    none_ready: false,
    unhinted_nodes: ALL_LACK,
    unhinted_zones: ALL_LACK,
};
