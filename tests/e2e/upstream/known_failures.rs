//! Lists those of Kubernetes' e2e tests that fail because Culvert does not support a feature yet.

/// The missing features, each with the names of the tests that need it. The names are complete except for the
/// prefix `[sig-network] ` and the labels.
pub(super) const KNOWN_FAILURES: [(&str, &[&str]); 1] = [(
    "kube-proxy's conntrack time-outs (an hour of CLOSE_WAIT)",
    &["KubeProxy should set TCP CLOSE_WAIT timeout"],
)];
