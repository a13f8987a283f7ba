//! Which of Kubernetes' own specs are run.

use anyhow::Result;
use tunnel_tests::cluster::{
    Cluster,
    ginkgo::{self, Case},
};

/// Quick ones that need no more than a Service's own address and DNS.
const FEW: [&str; 7] = [
    "API Server should provide secure master service",
    "DNS should provide DNS for services ",
    "DNS should provide DNS for the cluster ",
    "Proxy version v1 should proxy through a service and a pod",
    "Services should have session affinity work for service with type clusterIP",
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
