//! Specs of Kubernetes' own that the product doesn't pass yet.

/// What is missing, and the specs that fail for want of it: their whole names, but for `[sig-network] `
/// in front and the labels behind.
pub(super) const NOT_YET: [(&str, &[&str]); 2] = [
    (
        "NodePorts are not built yet",
        &[
            "Services should be able to change the type from ExternalName to NodePort",
            "Services should be able to create a functioning NodePort service",
            "Services should be able to switch session affinity for NodePort service",
            "Services should have session affinity work for NodePort service",
        ],
    ),
    (
        "session affinity is not built yet",
        &[
            "Services should be able to switch session affinity for service with type clusterIP",
            "Services should have session affinity work for service with type clusterIP",
        ],
    ),
];
