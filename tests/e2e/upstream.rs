//! Selects and runs Kubernetes' e2e tests.

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_cluster::{
    Cluster,
    ginkgo::{self, SpecResult, SpecSelection},
};

/// Substrings that select tests about Services by name.
const WIDER: [&str; 12] = [
    "Services",
    "Traffic Distribution",
    "Conntrack",
    "Connectivity Pod",
    "Service CIDR",
    "IPv6DualStack",
    "Topology Hints",
    "KubeProxy should set",
    "Networking Granular",
    "Networking should check",
    "Proxy version",
    "EndpointSliceMirr",
];

/// Substrings that exclude tests by name: those that need several machines or a cloud, or that would disturb
/// the local machine.
const EXCLUDED: [&str; 9] = [
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

/// A set of Kubernetes' e2e tests.
#[derive(Clone, Debug)]
pub(crate) enum SpecSet {
    /// The network tests whose names match a regular expression.
    Matching(String),
    /// The network tests in the conformance suite.
    Conformance,
    /// The network tests about Services, except those in the conformance suite.
    Wider,
}

impl SpecSet {
    fn selection(&self) -> SpecSelection {
        let named = |name: &str| format!("sig-network. .*{name}");
        let mut skip = EXCLUDED.map(str::to_owned).to_vec();
        let (focus, concurrent, minutes) = match self {
            Self::Matching(expression) => (vec![format!("sig-network.*({expression})")], 4, 45),
            Self::Conformance => (vec!["sig-network.*Conformance".to_owned()], 4, 45),
            Self::Wider => {
                skip.push("\\[Conformance\\]".to_owned());
                (WIDER.map(named).to_vec(), 6, 90)
            }
        };
        SpecSelection {
            focus,
            skip,
            concurrent,
            limit: Duration::from_secs(minutes * 60),
        }
    }

    /// Returns the number of tests in the set, if it is known, so that missing tests are noticed.
    const fn count(&self) -> Option<usize> {
        match self {
            Self::Matching(_) => None,
            Self::Conformance => Some(47),
            Self::Wider => Some(95),
        }
    }

    /// Returns true if Culvert's own tests run along with this set. `Wider` leaves them to other runs.
    pub(crate) const fn includes_culvert_specs(&self) -> bool {
        !matches!(self, Self::Wider)
    }
}

/// Runs a set of tests. Returns the results, sorted by name.
pub(crate) fn run(cluster: &Cluster, set: &SpecSet) -> Result<Vec<SpecResult>> {
    let mut results = ginkgo::run(cluster, &set.selection())?;
    if let Some(count) = set.count() {
        let found = results.len();
        ensure!(
            found >= count,
            "only {found} of the {count} specs of this set ran"
        );
    }
    results.sort_by(|one, other| one.name.cmp(&other.name));
    Ok(results)
}

#[cfg(test)]
mod tests {
    use regex_lite::Regex;

    use super::*;

    #[test]
    fn the_wider_set_leaves_out_conformance_specs() {
        let SpecSelection { focus, skip, .. } = SpecSet::Wider.selection();
        let matches = |expressions: &[String], name: &str| {
            let mut expressions = expressions.iter();
            expressions.any(|it| Regex::new(it).unwrap().is_match(name))
        };
        let is_run = |name: &str| matches(&focus, name) && !matches(&skip, name);

        let inside = "[sig-network] Services should check NodePort out-of-range";
        assert!(is_run(inside));
        for outside in [
            "[sig-network] Services should delete a collection [Conformance]",
            "[sig-network] Services should be able to use SCTP",
            "[sig-network] DNS should provide DNS for the cluster",
            "[sig-node] Services",
        ] {
            assert!(!is_run(outside), "{outside}");
        }
    }
}
