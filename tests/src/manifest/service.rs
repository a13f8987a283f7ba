//! The manifest of a Service and its EndpointSlices.

use std::{
    fmt::{self, Display},
    net::{IpAddr, SocketAddr},
};

use super::{Protocol, comma_separated};

/// A port of a Service, and its target port.
#[derive(Clone, Copy, Debug)]
struct ServicePort {
    protocol: Protocol,
    port: u16,
    target: u16,
    node_port: Option<u16>,
}

impl ServicePort {
    fn name(&self) -> String {
        format!("{}-{}", self.protocol, self.port).to_lowercase()
    }
}

/// An endpoint of a Service.
#[derive(Clone, Copy, Debug)]
struct Endpoint {
    address: IpAddr,
    /// True if the endpoint is terminating, false if it is ready. In both cases, it is serving.
    is_terminating: bool,
    /// The name of the endpoint's node, or an empty string to omit it.
    node: &'static str,
    /// The endpoint's zone, or an empty string to omit it.
    zone: &'static str,
}

/// A Service with at most one ClusterIP per family, and its EndpointSlices.
#[derive(Clone, Debug)]
pub struct Service {
    name: String,
    type_: &'static str,
    cluster_ips: Vec<IpAddr>,
    ports: Vec<ServicePort>,
    endpoints: Vec<Endpoint>,
    annotations: Vec<(String, String)>,
    /// Additional lines of YAML. Lines that belong to the spec are indented.
    lines: Vec<String>,
    /// The node of endpoints that are added from now on.
    node: &'static str,
    /// The zone of endpoints that are added from now on.
    zone: &'static str,
}

impl Service {
    /// Creates a Service with the given ClusterIPs, and without ports and endpoints.
    #[must_use]
    pub fn new(name: &str, cluster_ips: impl IntoIterator<Item = IpAddr>) -> Self {
        Self {
            name: name.to_owned(),
            type_: "ClusterIP",
            cluster_ips: cluster_ips.into_iter().collect(),
            ports: Vec::new(),
            endpoints: Vec::new(),
            annotations: Vec::new(),
            lines: Vec::new(),
            node: "",
            zone: "",
        }
    }

    #[must_use]
    pub const fn of_type(mut self, type_: &'static str) -> Self {
        self.type_ = type_;
        self
    }

    #[must_use]
    pub fn annotated(mut self, key: &str, value: &str) -> Self {
        self.annotations.push((key.to_owned(), value.to_owned()));
        self
    }

    /// Creates a Service with one ClusterIP and one port, which is also the target port.
    #[must_use]
    pub fn cluster_ip(name: &str, frontend: SocketAddr, protocol: Protocol) -> Self {
        Self::new(name, [frontend.ip()]).port(protocol, frontend.port(), frontend.port())
    }

    /// Adds a port and its target port.
    #[must_use]
    pub fn port(mut self, protocol: Protocol, port: u16, target: u16) -> Self {
        self.ports.push(ServicePort {
            protocol,
            port,
            target,
            node_port: None,
        });
        self
    }

    /// Sets the node port of the port that was added last.
    #[must_use]
    pub fn node_port(mut self, number: u16) -> Self {
        if let Some(port) = self.ports.last_mut() {
            port.node_port = Some(number);
        }
        self
    }

    /// Adds a line of YAML to the spec.
    #[must_use]
    pub fn spec(mut self, line: &str) -> Self {
        self.lines.push(format!("  {line}\n"));
        self
    }

    /// Adds a status with load balancer addresses. `ingress` contains the items of a YAML list.
    #[must_use]
    pub fn load_balancer(mut self, ingress: &str) -> Self {
        let line = format!("status: {{ loadBalancer: {{ ingress: [{ingress}] }} }}\n");
        self.lines.push(line);
        self
    }

    /// Sets the node of endpoints that are added from now on.
    #[must_use]
    pub const fn on_node(mut self, node: &'static str) -> Self {
        self.node = node;
        self
    }

    /// Sets the zone of endpoints that are added from now on.
    #[must_use]
    pub const fn in_zone(mut self, zone: &'static str) -> Self {
        self.zone = zone;
        self
    }

    #[must_use]
    pub fn backend(self, address: IpAddr) -> Self {
        self.endpoint(address, false)
    }

    #[must_use]
    pub fn backends(self, addresses: impl IntoIterator<Item = IpAddr>) -> Self {
        addresses.into_iter().fold(self, Self::backend)
    }

    /// Adds an endpoint that is terminating but is still serving.
    #[must_use]
    pub fn terminating(self, address: IpAddr) -> Self {
        self.endpoint(address, true)
    }

    fn endpoint(mut self, address: IpAddr, is_terminating: bool) -> Self {
        self.endpoints.push(Endpoint {
            address,
            is_terminating,
            node: self.node,
            zone: self.zone,
        });
        self
    }

    /// Returns the name of the manifest file for the Service and its EndpointSlices.
    #[must_use]
    pub fn file(&self) -> String {
        format!("{}.yaml", self.name)
    }

    #[must_use]
    pub fn service_yaml(&self) -> String {
        let Self {
            name,
            type_,
            cluster_ips,
            annotations,
            ..
        } = self;
        let policy = if cluster_ips.len() > 1 {
            "RequireDualStack"
        } else {
            "SingleStack"
        };
        let annotations = annotations.iter();
        let mut text = format!(
            "---\n\
             apiVersion: v1\n\
             kind: Service\n\
             metadata: {{ name: {name}, namespace: default, annotations: {{ {annotations} }} }}\n\
             spec:\n\
             \x20 type: {type_}\n\
             \x20 clusterIP: \"{first}\"\n\
             \x20 clusterIPs: [{all}]\n\
             \x20 ipFamilies: [{families}]\n\
             \x20 ipFamilyPolicy: {policy}\n\
             \x20 ports:\n",
            annotations =
                comma_separated(annotations.map(|(key, value)| format!("{key}: \"{value}\""))),
            first = comma_separated(cluster_ips.iter().take(1)),
            all = quoted(cluster_ips),
            families = comma_separated(cluster_ips.iter().map(|address| family(*address))),
        );
        for it in &self.ports {
            let node_port = it.node_port.map(|number| format!(", nodePort: {number}"));
            text.push_str(&format!(
                "  - {{ name: {}, protocol: {}, port: {}, targetPort: {}{} }}\n",
                it.name(),
                it.protocol,
                it.port,
                it.target,
                node_port.unwrap_or_default()
            ));
        }
        // The text so far ends within the spec, so lines for the spec come before lines for other sections.
        let (spec, rest): (Vec<_>, Vec<_>) =
            self.lines.iter().partition(|line| line.starts_with(' '));
        spec.into_iter()
            .chain(rest)
            .for_each(|line| text.push_str(line));
        text
    }

    /// Formats the EndpointSlice that has the address family of `like`.
    #[must_use]
    pub fn slice_yaml(&self, like: IpAddr) -> String {
        let family = family(like);
        let suffix = family.to_lowercase();
        let mut text = format!(
            "---\n\
             apiVersion: discovery.k8s.io/v1\n\
             kind: EndpointSlice\n\
             metadata:\n\
             \x20 name: {name}-{suffix}\n\
             \x20 namespace: default\n\
             \x20 labels: {{ kubernetes.io/service-name: {name} }}\n\
             addressType: {family}\n\
             ports:\n",
            name = self.name,
        );
        for it in &self.ports {
            text.push_str(&format!(
                "- {{ name: {}, protocol: {}, port: {} }}\n",
                it.name(),
                it.protocol,
                it.target
            ));
        }
        let of_family = self
            .endpoints
            .iter()
            .filter(|it| it.address.is_ipv4() == like.is_ipv4());
        let lines = of_family.map(|endpoint| {
            let Endpoint {
                address,
                is_terminating,
                node,
                zone,
            } = endpoint;
            let location = [("nodeName", node), ("zone", zone)];
            let location = location.into_iter().filter(|(_, name)| !name.is_empty());
            let location: String = location.map(|(field, name)| format!(", {field}: {name}")).collect();
            format!(
                "- {{ addresses: [\"{address}\"], conditions: {{ ready: {is_ready}, serving: true, terminating: {is_terminating} }}{location} }}\n",
                is_ready = !is_terminating,
            )
        });
        let endpoints: String = lines.collect();
        text.push_str(if endpoints.is_empty() {
            "endpoints: []\n"
        } else {
            "endpoints:\n"
        });
        text.push_str(&endpoints);
        text
    }
}

impl Display for Service {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.service_yaml())?;
        self.cluster_ips
            .iter()
            .try_for_each(|address| f.write_str(&self.slice_yaml(*address)))
    }
}

const fn family(address: IpAddr) -> &'static str {
    if address.is_ipv4() { "IPv4" } else { "IPv6" }
}

fn quoted(items: &[IpAddr]) -> String {
    comma_separated(items.iter().map(|item| format!("\"{item}\"")))
}
