//! Builds the manifests for the objects that Culvert's own e2e tests use.

use std::net::IpAddr;

/// The namespace that contains all of the tests' objects.
pub(crate) const NAMESPACE: &str = "specs";

/// The image that all pods run.
const IMAGE: &str = "culvert.test/agnhost:1";

/// Returns the Namespace object.
pub(crate) fn namespace() -> String {
    format!("apiVersion: v1\nkind: Namespace\nmetadata: {{name: {NAMESPACE}}}\n")
}

/// Returns a pod that runs on the given node. Tests open sockets and run commands in it.
pub(crate) fn client(name: &str, node: &str) -> String {
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {NAMESPACE}, labels: {{app: {name}}}}}
spec:
  nodeName: {node}
  terminationGracePeriodSeconds: 0
  containers:
  - {{name: it, image: \"{IMAGE}\", imagePullPolicy: IfNotPresent, args: [netexec]}}
"
    )
}

/// Returns a Deployment whose pods respond to HTTP requests and datagrams on port 8080 with their names. A
/// terminating pod keeps serving for 5 s, so that every proxy has time to remove it.
pub(crate) fn deployment(name: &str, replicas: usize) -> String {
    format!(
        "apiVersion: apps/v1
kind: Deployment
metadata: {{name: {name}, namespace: {NAMESPACE}}}
spec:
  replicas: {replicas}
  selector: {{matchLabels: {{app: {name}}}}}
  strategy: {{rollingUpdate: {{maxUnavailable: 0, maxSurge: 2}}}}
  template:
    metadata: {{labels: {{app: {name}}}}}
    spec:
      terminationGracePeriodSeconds: 15
      topologySpreadConstraints:
      - maxSkew: 1
        topologyKey: kubernetes.io/hostname
        whenUnsatisfiable: ScheduleAnyway
        labelSelector: {{matchLabels: {{app: {name}}}}}
      containers:
      - name: it
        image: \"{IMAGE}\"
        imagePullPolicy: IfNotPresent
        args: [netexec, --http-port=8080, --udp-port=8080]
        readinessProbe: {{httpGet: {{path: /hostname, port: 8080}}, periodSeconds: 1}}
        lifecycle: {{preStop: {{sleep: {{seconds: 5}}}}}}
"
    )
}

/// Returns a dual-stack Service that exposes port 80 for each of the protocols.
pub(crate) fn service(name: &str, protocols: &[&str]) -> String {
    let ports = protocols.iter().map(|protocol| {
        let port = protocol.to_lowercase();
        format!("  - {{name: {port}, protocol: {protocol}, port: 80, targetPort: 8080}}\n")
    });
    format!(
        "apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: {NAMESPACE}}}
spec:
  ipFamilyPolicy: RequireDualStack
  selector: {{app: {name}}}
  ports:
{}",
        ports.collect::<String>()
    )
}

/// Returns a pod on the given node, which responds like those of [`deployment`] on port 8080, or on port 18080 if it is
/// in the host's network.
pub(crate) fn server(name: &str, node: &str, in_host_network: bool) -> String {
    let port = if in_host_network { 18_080 } else { 8080 };
    format!(
        "apiVersion: v1
kind: Pod
metadata: {{name: {name}, namespace: {NAMESPACE}, labels: {{app: {name}}}}}
spec:
  nodeName: {node}
  hostNetwork: {in_host_network}
  terminationGracePeriodSeconds: 0
  containers:
  - name: it
    image: \"{IMAGE}\"
    imagePullPolicy: IfNotPresent
    args: [netexec, --http-port={port}, --udp-port={port}]
    ports:
    - {{name: tcp, protocol: TCP, containerPort: {port}}}
    - {{name: udp, protocol: UDP, containerPort: {port}}}
"
    )
}

/// A Service that clients outside reach.
pub(crate) struct ExternalService<'a> {
    pub(crate) name: &'a str,
    /// The name of the [`server`].
    pub(crate) server: &'a str,
    /// The value of `externalTrafficPolicy`.
    pub(crate) policy: &'a str,
    pub(crate) external_ips: [IpAddr; 2],
    /// The port for both protocols.
    pub(crate) node_port: u16,
}

impl ExternalService<'_> {
    /// Returns the dual-stack Service, which exposes port 80 for TCP and UDP.
    pub(crate) fn manifest(&self) -> String {
        let Self {
            name,
            server,
            policy,
            external_ips: [v4, v6],
            node_port,
        } = self;
        let port = |protocol: &str, target| {
            format!(
                "  - {{name: {target}, protocol: {protocol}, port: 80, targetPort: {target}, nodePort: {node_port}}}\n"
            )
        };
        format!(
            "apiVersion: v1
kind: Service
metadata: {{name: {name}, namespace: {NAMESPACE}}}
spec:
  type: LoadBalancer
  ipFamilyPolicy: RequireDualStack
  externalTrafficPolicy: {policy}
  externalIPs: [\"{v4}\", \"{v6}\"]
  selector: {{app: {server}}}
  ports:
{}{}",
            port("TCP", "tcp"),
            port("UDP", "udp")
        )
    }
}
