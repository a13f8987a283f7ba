//! Generates Services.

use k8s_openapi::{
    api::core::v1::{
        ClientIPConfig, LoadBalancerIngress, LoadBalancerStatus, Service, ServicePort, ServiceSpec,
        ServiceStatus, SessionAffinityConfig,
    },
    apimachinery::pkg::apis::meta::v1::{ObjectMeta, Time},
    jiff::Timestamp,
};

use super::{Generator, LOAD_BALANCER_IPS, add_label};

/// Addresses for `externalIPs`: unowned ones, ones that belong to load balancers and nodes, a cluster IP,
/// and addresses that are never served.
const EXTERNAL_IPS: [&str; 15] = [
    "198.51.100.1",
    "198.51.100.001",
    "198.51.100.2",
    "2001:db8:e::1",
    "203.0.113.1",
    "203.0.113.2",
    "2001:db8:f::1",
    "192.168.0.10",
    "fd00::10",
    "172.17.0.1",
    "10.96.0.1",
    "127.0.0.1",
    "::1",
    "169.254.169.254",
    "224.0.0.1",
];

/// Ranges for `loadBalancerSourceRanges` that contain nodes, pods or other clients. Some have whitespace
/// around them.
const SOURCE_RANGES: [&str; 11] = [
    "192.168.0.0/24",
    " 192.168.000.0/16 ",
    "10.244.0.0/16",
    "\t10.0.0.0/8",
    "192.0.2.7/24",
    "203.0.113.0/24",
    "0.0.0.0/0",
    "fd00::/64",
    " fd24::/16",
    "2001:db8::/32 ",
    "::/0",
];

/// Values for the annotation `openyurt.io/topologyKeys`: those that OpenYurt recognises, and some that it
/// doesn't.
const TOPOLOGY_KEYS: [&str; 9] = [
    "kubernetes.io/hostname",
    "kubernetes.io/hostname",
    "openyurt.io/nodepool",
    "openyurt.io/nodepool",
    "kubernetes.io/zone",
    "kubernetes.io/zone,*",
    " openyurt.io/nodepool",
    "*",
    "",
];

pub(super) fn generate(generator: &mut Generator<'_>, number: u16) -> Service {
    let type_ = generator.pick([
        "ClusterIP",
        "ClusterIP",
        "NodePort",
        "NodePort",
        "LoadBalancer",
        "LoadBalancer",
        "LoadBalancer",
        "ExternalName",
    ]);
    let mut spec = ServiceSpec {
        type_: Some(type_.to_owned()),
        ..ServiceSpec::default()
    };
    set_addresses(generator, &mut spec, number);
    spec.ports = Some(ports(generator, type_));
    set_policies(generator, &mut spec, type_);
    set_affinity(generator, &mut spec);
    let status = if type_ == "LoadBalancer" {
        let ranges = generator.pick([2, 6, 100]);
        spec.load_balancer_source_ranges = Some(generator.subset(SOURCE_RANGES, ranges));
        status(generator)
    } else {
        ServiceStatus::default()
    };
    Service {
        metadata: metadata(generator, number),
        spec: Some(spec),
        status: Some(status),
    }
}

/// Generates a Service's metadata. The same names occur in two namespaces, and there are so few creation
/// times that many are equal.
fn metadata(generator: &mut Generator<'_>, number: u16) -> ObjectMeta {
    let seconds = generator.pick([None, Some(1_700_000_000), Some(1_700_000_060)]);
    let created = seconds.and_then(|seconds| Timestamp::from_second(seconds).ok());
    let mut metadata = ObjectMeta {
        namespace: Some(if number.is_multiple_of(2) { "a" } else { "b" }.to_owned()),
        name: Some(format!("service-{}", number / 2)),
        creation_timestamp: created.map(Time),
        ..ObjectMeta::default()
    };
    if generator.one_in(14) {
        let key = "service.kubernetes.io/service-proxy-name";
        let value = generator.pick(["other", ""]);
        add_label(&mut metadata, key, value);
    }
    if generator.one_in(14) {
        add_label(&mut metadata, "service.kubernetes.io/headless", "");
    }
    if generator.one_in(3) {
        let value = generator.pick(TOPOLOGY_KEYS);
        let annotations = metadata.annotations.get_or_insert_default();
        annotations.insert("openyurt.io/topologyKeys".to_owned(), value.to_owned());
    }
    metadata
}

fn set_addresses(generator: &mut Generator<'_>, spec: &mut ServiceSpec, number: u16) {
    let host = number + 1;
    let third = if generator.one_in(12) { "000.0" } else { "0." };
    let v4 = format!("10.96.{third}{host}");
    let v6 = format!("fd96::{host}");
    let (families, addresses) = match generator.rng.u8(0..10) {
        0..4 => (vec!["IPv4"], vec![v4]),
        4 => (vec!["IPv6"], vec![v6]),
        5..8 => (vec!["IPv4", "IPv6"], vec![v4, v6]),
        _ => (vec!["IPv6", "IPv4"], vec![v6, v4]),
    };
    let external_name = spec.type_.as_deref() == Some("ExternalName");
    let headless = spec.type_.as_deref() == Some("ClusterIP") && generator.one_in(6);
    if external_name && !generator.one_in(3) {
        spec.external_name = Some("example.org".to_owned());
        spec.cluster_ip = generator.pick([None, Some("")]).map(str::to_owned);
        return;
    }
    let addresses = if headless {
        vec!["None".to_owned()]
    } else {
        addresses
    };
    spec.cluster_ip = addresses.first().cloned();
    // Objects in files, and objects from before dual-stack support, have only `clusterIP`.
    if addresses.len() == 1 && generator.one_in(10) {
        return;
    }
    spec.cluster_ips = Some(addresses);
    spec.ip_families = Some(families.into_iter().map(str::to_owned).collect());
}

fn ports(generator: &mut Generator<'_>, type_: &str) -> Vec<ServicePort> {
    let wanted = generator.pick([1, 1, 2, 3]);
    let allocates = match type_ {
        "NodePort" => true,
        "LoadBalancer" => !generator.one_in(4),
        _ => false,
    };
    let mut ports = Vec::<ServicePort>::new();
    for number in 0..wanted {
        let port = generator.pick([53, 80, 80, 443, 30_001]);
        let protocol = generator.pick(["TCP", "TCP", "TCP", "UDP", "UDP", "SCTP"]);
        let twin = ports.iter().find(|other| other.port == port);
        if twin.is_some_and(|other| other.protocol.as_deref() == Some(protocol)) {
            continue;
        }
        // Two ports with the same number but different protocols may share a node port.
        let shared = twin.and_then(|other| other.node_port);
        let node_port = allocates.then(|| generator.node_port(shared));
        let missing = generator.pick([None, Some(0)]);
        ports.push(ServicePort {
            name: port_name(generator, wanted, number),
            port,
            protocol: Some(protocol.to_owned()),
            node_port: node_port.or(missing),
            ..ServicePort::default()
        });
    }
    // Two ports with the same number must differ in protocol. The loop compares a port only with the first
    // port of the same number, so a third one may still equal the second.
    ports.sort_by(|a, b| (a.port, &a.protocol).cmp(&(b.port, &b.protocol)));
    ports.dedup_by(|a, b| (a.port, &a.protocol) == (b.port, &b.protocol));
    ports
}

/// Returns a port's name. A port may go without a name only if it is the Service's only one.
fn port_name(generator: &mut Generator<'_>, wanted: usize, number: usize) -> Option<String> {
    if wanted > 1 {
        return Some(format!("p{number}"));
    }
    generator
        .pick([None, Some(""), Some("p0")])
        .map(str::to_owned)
}

impl Generator<'_> {
    fn node_port(&mut self, shared: Option<i32>) -> i32 {
        if let Some(shared) = shared.filter(|_| self.rng.bool()) {
            return shared;
        }
        self.node_ports += 1;
        self.node_ports
    }
}

/// Sets external IPs, traffic policies and the health check node port. The external traffic policy requires
/// an external address.
fn set_policies(generator: &mut Generator<'_>, spec: &mut ServiceSpec, type_: &str) {
    let internal = generator.pick([None, Some("Cluster"), Some("Cluster"), Some("Local")]);
    spec.internal_traffic_policy = internal.map(str::to_owned);
    if type_ != "ExternalName" {
        let one_in = generator.pick([3, 5, 100]);
        spec.external_ips = Some(generator.subset(EXTERNAL_IPS, one_in));
    }
    let external_ips = spec.external_ips.as_deref().unwrap_or_default();
    let external = match type_ {
        "NodePort" | "LoadBalancer" => true,
        "ClusterIP" => !external_ips.is_empty(),
        _ => false,
    };
    if !external {
        return;
    }
    let policy = generator.pick([None, Some("Cluster"), Some("Local"), Some("Local")]);
    spec.external_traffic_policy = policy.map(str::to_owned);
    if type_ == "LoadBalancer" && policy == Some("Local") {
        generator.health_check_node_ports += 1;
        let port = generator.health_check_node_ports;
        spec.health_check_node_port =
            generator.pick([Some(port), Some(port), Some(port), Some(0), None]);
    }
}

fn set_affinity(generator: &mut Generator<'_>, spec: &mut ServiceSpec) {
    let affinity = generator.pick([None, Some("None"), Some("ClientIP"), Some("ClientIP")]);
    spec.session_affinity = affinity.map(str::to_owned);
    if affinity != Some("ClientIP") {
        return;
    }
    let timeout_seconds = generator.pick([None, Some(1), Some(60), Some(86_400)]);
    let client_ip = Some(ClientIPConfig { timeout_seconds });
    let config = SessionAffinityConfig { client_ip };
    spec.session_affinity_config = generator.rng.bool().then_some(config);
}

fn status(generator: &mut Generator<'_>) -> ServiceStatus {
    let one_in = generator.pick([2, 3, 100]);
    let addresses = generator.subset(LOAD_BALANCER_IPS, one_in);
    let mut modes = || generator.pick([None, Some("VIP"), Some("VIP"), Some("Proxy")]);
    let at = |address| LoadBalancerIngress {
        ip: Some(address),
        ip_mode: modes().map(str::to_owned),
        ..LoadBalancerIngress::default()
    };
    let mut ingress: Vec<_> = addresses.into_iter().map(at).collect();
    if generator.one_in(6) {
        ingress.push(LoadBalancerIngress {
            hostname: Some("lb.example.org".to_owned()),
            ..LoadBalancerIngress::default()
        });
    }
    ServiceStatus {
        load_balancer: Some(LoadBalancerStatus {
            ingress: Some(ingress),
        }),
        ..ServiceStatus::default()
    }
}
