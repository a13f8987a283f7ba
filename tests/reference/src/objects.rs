//! The proxied Services, their ports and slices, and parsers for their fields (contract §1).

use std::net::IpAddr;

use k8s_openapi::{
    api::{
        core::v1::{Service, ServicePort},
        discovery::v1::EndpointSlice,
    },
    apimachinery::pkg::apis::meta::v1::ObjectMeta,
};

use super::{
    AddressKind, Cluster, Owner, Policy, Protocol,
    address::{Family, is_servable, parse},
};

const PROXY_NAME: &str = "service.kubernetes.io/service-proxy-name";
const HEADLESS: &str = "service.kubernetes.io/headless";
pub(super) const SERVICE_NAME: &str = "kubernetes.io/service-name";

/// The timeout for session affinity that the API server sets by default, in seconds (contract §3).
const AFFINITY_SECONDS: i32 = 10_800;

/// Returns the Services that a node proxies.
pub(super) fn proxied_services(cluster: &Cluster) -> impl Iterator<Item = &Service> {
    let services = cluster.services.iter();
    services.filter(|service| is_proxied(service))
}

/// Returns true if nodes proxy the Service. Contract §1 excludes Services with the label for another proxy,
/// whatever its value ("the same since 1.36"), those of type ExternalName, even with a stored cluster IP
/// ("ExternalName"), and those whose cluster IP is `None` or empty ("headless"). The headless label on a
/// *Service* is ignored.
fn is_proxied(service: &Service) -> bool {
    let Some(spec) = &service.spec else {
        return false;
    };
    label(&service.metadata, PROXY_NAME).is_none()
        && spec.type_.as_deref() != Some("ExternalName")
        && !matches!(spec.cluster_ip.as_deref(), None | Some("" | "None"))
}

pub(super) fn label<'a>(metadata: &'a ObjectMeta, key: &str) -> Option<&'a str> {
    metadata.labels.as_ref()?.get(key).map(String::as_str)
}

/// Returns the Service's cluster IP in an address family (contract §1, "spec.clusterIPs"). An object in a
/// file may have only `clusterIP`, since no API server has set its defaults.
pub(super) fn cluster_ip(service: &Service, family: Family) -> Option<IpAddr> {
    let spec = service.spec.as_ref()?;
    let many = spec.cluster_ips.as_deref().unwrap_or_default();
    let texts = if many.is_empty() {
        spec.cluster_ip.as_slice()
    } else {
        many
    };
    let mut addresses = texts.iter().filter_map(|text| parse(text));
    addresses.find(|address| Family::of(*address) == family && is_servable(*address))
}

/// Returns the ports that are served in an address family. There are none if the Service lacks a cluster IP
/// in that family (contract §1, "service lacking one is skipped for that family").
pub(super) fn ports(service: &Service, family: Family) -> &[ServicePort] {
    if cluster_ip(service, family).is_none() {
        return &[];
    }
    let ports = service.spec.as_ref().and_then(|spec| spec.ports.as_deref());
    ports.unwrap_or_default()
}

/// Parses a protocol (contract §1, "ports[].protocol"). TCP is the API server's default.
pub(super) fn protocol(text: Option<&str>) -> Option<Protocol> {
    match text {
        None | Some("TCP") => Some(Protocol::Tcp),
        Some("UDP") => Some(Protocol::Udp),
        Some("SCTP") => Some(Protocol::Sctp),
        Some(_) => None,
    }
}

/// Converts a port number; returns `None` for 0 and for invalid numbers.
pub(super) fn port_number(number: i32) -> Option<u16> {
    u16::try_from(number).ok().filter(|number| *number != 0)
}

/// Returns the identity of a Service port (contract §1, "service port identity").
pub(super) fn owner(service: &Service, port: Option<&str>, protocol: Protocol) -> Owner {
    Owner {
        namespace: namespace(&service.metadata).to_owned(),
        service: name(&service.metadata).to_owned(),
        port: port.unwrap_or_default().to_owned(),
        protocol,
    }
}

pub(super) fn namespace(metadata: &ObjectMeta) -> &str {
    metadata.namespace.as_deref().unwrap_or_default()
}

pub(super) fn name(metadata: &ObjectMeta) -> &str {
    metadata.name.as_deref().unwrap_or_default()
}

/// Returns the affinity timeout in seconds, or 0 without affinity (contract §3, "sessionAffinity: ClientIP").
pub(super) fn affinity(service: &Service) -> u32 {
    let Some(spec) = &service.spec else {
        return 0;
    };
    if spec.session_affinity.as_deref() != Some("ClientIP") {
        return 0;
    }
    let config = spec.session_affinity_config.as_ref();
    let client_ip = config.and_then(|config| config.client_ip.as_ref());
    let timeout = client_ip.and_then(|client_ip| client_ip.timeout_seconds);
    u32::try_from(timeout.unwrap_or(AFFINITY_SECONDS)).unwrap_or(0)
}

/// Returns the traffic policy for a kind of address (contract §4.5): the internal policy for the cluster IP,
/// and the external policy for all other addresses. The default is `Cluster`.
pub(super) fn policy(service: &Service, kind: AddressKind) -> Policy {
    let text = service.spec.as_ref().and_then(|spec| match kind {
        AddressKind::ClusterIp => spec.internal_traffic_policy.as_deref(),
        AddressKind::LoadBalancerIp | AddressKind::ExternalIp | AddressKind::NodePort => {
            spec.external_traffic_policy.as_deref()
        }
    });
    match text {
        Some("Local") => Policy::Local,
        None | Some(_) => Policy::Cluster,
    }
}

/// Returns a Service's slices in an address family, sorted by name. A slice belongs to the Service if it is
/// in the Service's namespace, is labelled with the Service's name, has the family's address type, and lacks
/// the headless label (contract §1, "EndpointSlice label" and "addressType").
pub(super) fn slices<'a>(
    cluster: &'a Cluster,
    of: (&str, &str),
    family: Family,
) -> Vec<&'a EndpointSlice> {
    let (service_namespace, service_name) = of;
    let is_of_service = |slice: &&EndpointSlice| {
        label(&slice.metadata, HEADLESS).is_none()
            && label(&slice.metadata, SERVICE_NAME) == Some(service_name)
            && namespace(&slice.metadata) == service_namespace
            && slice.address_type == family.address_type()
    };
    let mut slices: Vec<_> = cluster.slices.iter().filter(is_of_service).collect();
    slices.sort_by(|a, b| name(&a.metadata).cmp(name(&b.metadata)));
    slices
}
