//! Which of Kubernetes' own specs are run.

use anyhow::Result;
use tunnel_tests::cluster::{
    Cluster,
    ginkgo::{self, Case, Verdict},
};

/// Quick ones that need no more than a Service's own address and DNS.
const FEW: [&str; 6] = [
    "API Server should provide secure master service",
    "DNS should provide DNS for services ",
    "DNS should provide DNS for the cluster ",
    "Proxy version v1 should proxy through a service and a pod",
    "Services should serve a basic endpoint from pods",
    "Services should serve multiport endpoints from pods",
];

/// What can't be asked of two nodes on one machine without a cloud, or would break it.
const NOT_HERE: [&str; 9] = [
    "Disruptive",
    "Feature:LoadBalancer",
    "NFAcct",
    "Networking-Performance",
    "PerformanceDNS",
    "Provider:GCE",
    "SCTP",
    "Serial",
    "sctp",
];

/// Specs that the product doesn't pass yet, by a part of their names, and what is missing.
const NOT_YET: [(&str, &str); 6] = [
    (
        "Services should be able to change the type from ExternalName to NodePort",
        NODE_PORTS,
    ),
    (
        "Services should be able to create a functioning NodePort service",
        NODE_PORTS,
    ),
    (
        "Services should be able to switch session affinity for NodePort service",
        NODE_PORTS,
    ),
    (
        "Services should be able to switch session affinity for service with type clusterIP",
        AFFINITY,
    ),
    (
        "Services should have session affinity work for NodePort service",
        NODE_PORTS,
    ),
    (
        "Services should have session affinity work for service with type clusterIP",
        AFFINITY,
    ),
];
const NODE_PORTS: &str = "NodePorts are not built yet";
const AFFINITY: &str = "session affinity is not built yet";

/// What a spec of Kubernetes' own came to, measured by what the product is known not to pass yet. A
/// spec that passes in spite of that is a failure, so that the list stays true.
pub(crate) fn judge(mut case: Case, is_product: bool) -> Case {
    let mut known = NOT_YET.iter().filter(|_| is_product);
    if let Some((_, missing)) = known.find(|(name, _)| case.name.contains(name)) {
        (case.verdict, case.message) = match case.verdict {
            Verdict::Failed => (Verdict::NotYet, (*missing).to_owned()),
            Verdict::Passed => (
                Verdict::Failed,
                "it passes now: take it from the list in upstream.rs".to_owned(),
            ),
            Verdict::NotYet | Verdict::Skipped => return case,
        };
    }
    case
}

/// How many of them.
#[derive(Clone, Debug)]
pub(crate) enum Range {
    /// The quick ones.
    Few,
    /// Those of the network whose names match.
    Matching(String),
    /// Those of the network that every cluster must pass.
    Conformance,
}

impl Range {
    fn focus(&self) -> Vec<String> {
        match self {
            Self::Few => FEW.map(|name| format!("sig-network. .*{name}")).to_vec(),
            Self::Matching(expression) => vec![format!("sig-network.*({expression})")],
            Self::Conformance => vec!["sig-network.*Conformance".to_owned()],
        }
    }
}

/// Runs them; they come sorted, as they run in any order.
pub(crate) fn run(cluster: &Cluster, range: &Range) -> Result<Vec<Case>> {
    let mut cases = ginkgo::run(cluster, &range.focus(), &NOT_HERE)?;
    cases.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(cases)
}
