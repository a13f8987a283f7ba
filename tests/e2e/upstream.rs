//! Selects and runs Kubernetes' e2e tests, and compares their results with the known failures.

mod known_failures;

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_cluster::{
    Cluster,
    ginkgo::{self, SpecResult, SpecSelection, Verdict},
    packet_capture::CountsByNodePort,
};

use self::known_failures::{KNOWN_FAILURES, NODE_PORTS, NODE_PORTS_OR_LOCAL};

/// The prefix that the names of all network tests have.
const NETWORK_PREFIX: &str = "[sig-network] ";

/// Fast tests that need only ClusterIPs and DNS.
const FEW: [&str; 6] = [
    "API Server should provide secure master service",
    "DNS should provide DNS for services ",
    "DNS should provide DNS for the cluster ",
    "Proxy version v1 should proxy through a service and a pod",
    "Services should serve a basic endpoint from pods",
    "Services should serve multiport endpoints from pods",
];

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

/// Checks a test's result against the list of known failures. If a listed test fails, the result becomes a
/// known failure; if the missing feature is node ports, captured packets must confirm the cause. If a listed
/// test passes, that counts as a failure, so that the list stays correct, unless the test may pass by chance.
pub(crate) fn apply_known_failures(
    mut result: SpecResult,
    is_culvert: bool,
    counts: &CountsByNodePort,
) -> SpecResult {
    let Some(feature) = missing_feature(&result.name).filter(|_| is_culvert) else {
        return result;
    };
    let unanswered = unanswered_ports(&result, counts).join("\n");
    let is_confirmed = !CONFIRMED_BY_CAPTURE.contains(&feature) || !unanswered.is_empty();
    (result.verdict, result.message) = match result.verdict {
        Verdict::KnownFailure | Verdict::Skipped => return result,
        Verdict::Passed if feature == NODE_PORTS_OR_LOCAL => return result,
        Verdict::Passed => (
            Verdict::Failed,
            "the spec passes now: remove it from the list in upstream/known_failures.rs".to_owned(),
        ),
        Verdict::Failed if is_confirmed => (
            Verdict::KnownFailure,
            format!("not supported yet: {feature}\n{unanswered}"),
        ),
        Verdict::Failed => (
            Verdict::Failed,
            format!(
                "expected to fail for want of {feature}, but every packet to them was answered: {}",
                result.message
            ),
        ),
    };
    result
}

/// The features for which captured packets must confirm that they are the cause of a failure.
const CONFIRMED_BY_CAPTURE: [&str; 2] = [NODE_PORTS, NODE_PORTS_OR_LOCAL];

/// The source port that Kubernetes' conntrack tests use. These tests do not log the node port.
const CONNTRACK_SOURCE_PORT: u16 = 12_345;

/// Returns the node ports that the test's log mentions and that never answered, with their packet counts. For
/// a conntrack test, also returns the node ports that never answered and that received packets only from
/// [`CONNTRACK_SOURCE_PORT`].
fn unanswered_ports(result: &SpecResult, counts: &CountsByNodePort) -> Vec<String> {
    let log = &result.log;
    let is_conntrack = result.name.contains("Conntrack");
    let unanswered = counts.iter().filter(|(_, counts)| counts.answered == 0);
    let of_spec = unanswered.filter(|((at, _), counts)| {
        let (ip, port) = (at.ip(), at.port());
        let only_conntrack = counts.source_ports.iter().eq([&CONNTRACK_SOURCE_PORT]);
        (is_conntrack && only_conntrack)
            || [
                format!("{at}"),
                format!("{ip} {port}"),
                format!("{ip} on port {port}"),
                format!("{ip}:{port}"),
                format!("host={ip}&port={port}"),
                format!("host=[{ip}]&port={port}"),
            ]
            .iter()
            .any(|text| log.contains(text))
    });
    of_spec
        .map(|((at, protocol), counts)| format!("{at}/{protocol}: {counts}"))
        .collect()
}

/// Returns the feature that a test needs and Culvert lacks, if the test is a known failure.
fn missing_feature(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix(NETWORK_PREFIX)?;
    let mut known = KNOWN_FAILURES.iter();
    let (feature, _) = known.find(|(_, names)| names.contains(&name))?;
    Some(feature)
}

/// A set of Kubernetes' e2e tests.
#[derive(Clone, Debug)]
pub(crate) enum SpecSet {
    /// A few fast tests.
    Few,
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
            Self::Few => (FEW.map(named).to_vec(), 4, 45),
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
            Self::Few => Some(FEW.len()),
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

/// Runs a set of tests. Returns the results, sorted by name, and the counts of the packets that nodes sent to
/// each other's node ports.
pub(crate) fn run(cluster: &Cluster, set: &SpecSet) -> Result<(Vec<SpecResult>, CountsByNodePort)> {
    let capture = cluster.capture_packets()?;
    let mut results = ginkgo::run(cluster, &set.selection())?;
    let counts = capture.end()?;
    if let Some(count) = set.count() {
        let found = results.len();
        ensure!(
            found >= count,
            "only {found} of the {count} specs of this set ran"
        );
    }
    results.sort_by(|one, other| one.name.cmp(&other.name));
    Ok((results, counts))
}

#[cfg(test)]
mod tests {
    use regex_lite::Regex;
    use tunnel_cluster::packet_capture::PacketCounts;

    use super::*;

    fn result(name: &str, verdict: Verdict) -> SpecResult {
        SpecResult {
            log: "Running 'nc -v 172.30.1.1 31000'; dial?host=fd00:30:1::1&port=31001".to_owned(),
            ..SpecResult::new(name, verdict, Duration::ZERO, "no answer".to_owned())
        }
    }

    /// Builds packet counts from a list of node ports, each given as its address, its number of requests and
    /// its number of answers.
    fn counts(ports: &[(&str, u64, u64)]) -> CountsByNodePort {
        let entry = |&(at, requests, answered): &(&str, u64, u64)| {
            let counts = PacketCounts {
                requests,
                answered,
                refused: requests - answered,
                source_ports: [12_345].into(),
            };
            ((at.parse().unwrap(), "TCP"), counts)
        };
        ports.iter().map(entry).collect()
    }

    const KNOWN: &str =
        "[sig-network] Services should have session affinity work for NodePort service";

    #[test]
    fn a_listed_spec_must_fail_and_its_message_names_the_missing_feature() {
        let counts = counts(&[
            ("172.30.1.1:31000", 3, 0),
            ("[fd00:30:1::1]:31001", 2, 0),
            ("172.30.1.1:31002", 9, 0),
        ]);
        let failed = apply_known_failures(result(KNOWN, Verdict::Failed), true, &counts);
        let passed = apply_known_failures(result(KNOWN, Verdict::Passed), true, &counts);

        assert_eq!(failed.verdict, Verdict::KnownFailure);
        assert_eq!(
            failed.message,
            "not supported yet: node ports of other nodes\n\
             172.30.1.1:31000/TCP: 3 requests, 3 refused, 0 answered\n\
             [fd00:30:1::1]:31001/TCP: 2 requests, 2 refused, 0 answered"
        );
        assert_eq!(passed.verdict, Verdict::Failed);
    }

    #[test]
    fn a_failure_is_known_only_if_it_is_listed_and_captured_packets_confirm_it() {
        let elsewhere = "[sig-network] Networking Granular Checks: Services should function for pod-Service: http";
        let conntrack = "[sig-network] Conntrack should be able to preserve UDP traffic when server pod cycles for a NodePort service";
        let longer = format!("{KNOWN}s");
        let none = CountsByNodePort::new();
        let answered = counts(&[("172.30.1.1:31000", 3, 3)]);
        let lost = counts(&[("172.30.1.1:31000", 3, 0)]);
        let unnamed = counts(&[("172.30.1.1:31999", 3, 0)]);
        let mut from_others = unnamed.clone();
        for counts in from_others.values_mut() {
            counts.source_ports = [40_000].into();
        }
        let (passed, failed, known) = (Verdict::Passed, Verdict::Failed, Verdict::KnownFailure);
        for (claim, name, verdict, counts, expected) in [
            ("no packet was sent", KNOWN, failed, &none, failed),
            ("its node ports answer", KNOWN, failed, &answered, failed),
            ("its client is there", elsewhere, passed, &none, passed),
            ("its packets were lost", elsewhere, failed, &lost, known),
            ("its packets came", elsewhere, failed, &none, failed),
            ("its port sent", conntrack, failed, &unnamed, known),
            ("another port sent", conntrack, failed, &from_others, failed),
            ("another name", &longer, failed, &lost, failed),
        ] {
            let result = apply_known_failures(result(name, verdict), true, counts);

            assert_eq!(result.verdict, expected, "{claim}");
            let reason = if expected == failed { "no answer" } else { "" };
            let message = &result.message;
            assert!(message.contains(reason), "{claim}: {message}");
        }
        let other_proxy = apply_known_failures(result(KNOWN, passed), false, &none);
        assert_eq!(other_proxy.verdict, passed);
    }

    #[test]
    fn each_known_failure_is_listed_once() {
        let mut names: Vec<_> = KNOWN_FAILURES
            .iter()
            .flat_map(|(_, names)| *names)
            .collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();

        assert_eq!(names.len(), all);
    }

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
