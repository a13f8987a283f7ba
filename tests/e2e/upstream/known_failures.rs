//! Lists those of Kubernetes' e2e tests that fail because Culvert does not support a feature yet.

/// A missing feature: access to a node's node ports for clients on other nodes or outside the cluster.
pub(super) const NODE_PORTS: &str = "node ports of other nodes";

/// The same feature as [`NODE_PORTS`], for tests that pass if their client happens to run on the node that it
/// dials.
pub(super) const NODE_PORTS_OR_LOCAL: &str =
    "node ports of other nodes, where the client is on another";

/// The missing features, each with the names of the tests that need it. The names are complete except for the
/// prefix `[sig-network] ` and the labels.
pub(super) const KNOWN_FAILURES: [(&str, &[&str]); 3] = [
    (
        NODE_PORTS,
        &[
            "Conntrack should be able to cleanup conntrack entries when UDP service target port changes for a NodePort service",
            "Conntrack should be able to preserve UDP traffic when server pod cycles for a NodePort service",
            "Service CIDRs should create Services and serve on different Service CIDRs",
            "Services should be able to change the type from ExternalName to NodePort",
            "Services should be able to connect to terminating and unready endpoints if PublishNotReadyAddresses is true",
            "Services should be able to create a functioning NodePort service",
            "Services should be able to switch session affinity for NodePort service",
            "Services should fallback to local terminating endpoints when there are no ready endpoints with externalTrafficPolicy=Local",
            "Services should fallback to terminating endpoints when there are no ready endpoints with externallTrafficPolicy=Cluster",
            "Services should have session affinity timeout work for NodePort service",
            "Services should have session affinity work for NodePort service",
            "Services should implement NodePort and HealthCheckNodePort correctly when ExternalTrafficPolicy changes",
            "Services should support externalTrafficPolicy=Local for type=NodePort",
            "Services should be able to update service type to NodePort listening on same port number but different protocols",
        ],
    ),
    (
        NODE_PORTS_OR_LOCAL,
        &[
            "Networking Granular Checks: Services should function for endpoint-Service: http",
            "Networking Granular Checks: Services should function for endpoint-Service: udp",
            "Networking Granular Checks: Services should function for multiple endpoint-Services with same selector",
            "Networking Granular Checks: Services should function for node-Service: http",
            "Networking Granular Checks: Services should function for node-Service: udp",
            "Networking Granular Checks: Services should function for pod-Service: http",
            "Networking Granular Checks: Services should function for pod-Service: udp",
            "Networking Granular Checks: Services should function for service endpoints using hostNetwork",
            "Networking Granular Checks: Services should support basic nodePort: udp functionality",
            "Networking Granular Checks: Services should update nodePort: http",
            "Networking Granular Checks: Services should update nodePort: udp",
            "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should function for endpoint-Service: http",
            "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should function for endpoint-Service: udp",
            "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should function for node-Service: http",
            "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should function for node-Service: udp",
            "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should function for pod-Service: http",
            "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should function for pod-Service: udp",
            "[Feature:IPv6DualStack] Granular Checks: Services Secondary IP Family [LinuxOnly] should function for service endpoints using hostNetwork",
        ],
    ),
    (
        "kube-proxy's conntrack time-outs (an hour of CLOSE_WAIT)",
        &["KubeProxy should set TCP CLOSE_WAIT timeout"],
    ),
];
