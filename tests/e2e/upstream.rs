//! The selection of Kubernetes' own specs, and their expected results.

mod not_yet;

use std::time::Duration;

use anyhow::{Result, ensure};
use tunnel_cluster::{
    Cluster,
    ginkgo::{self, Case, Choice, Verdict},
    trace::Fates,
};

use self::not_yet::{NODE_PORTS, NODE_PORTS_ELSEWHERE, NOT_YET};

/// The prefix of the names of all network specs.
const GROUP: &str = "[sig-network] ";

/// Fast specs that need only ClusterIPs and DNS.
const FEW: [&str; 6] = [
    "API Server should provide secure master service",
    "DNS should provide DNS for services ",
    "DNS should provide DNS for the cluster ",
    "Proxy version v1 should proxy through a service and a pod",
    "Services should serve a basic endpoint from pods",
    "Services should serve multiport endpoints from pods",
];

/// Specs about Services, by parts of their names.
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

/// Specs that need several machines or a cloud, or that would disturb this machine.
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

/// Judges the result of one of Kubernetes' own specs by the list of known failures. A listed spec that
/// passes is a failure, so that the list stays correct. A spec listed for node ports of other nodes also
/// fails if no such packet was lost. If its client may be on the dialled node, a pass is accepted, too.
pub(crate) fn judge(mut case: Case, is_product: bool, fates: &Fates) -> Case {
    let Some(missing) = missing(&case.name).filter(|_| is_product) else {
        return case;
    };
    let lost = lost(&case, fates).join("\n");
    let is_shown = !IN_TRACE.contains(&missing) || !lost.is_empty();
    (case.verdict, case.message) = match case.verdict {
        Verdict::NotYet | Verdict::Skipped => return case,
        Verdict::Passed if missing == NODE_PORTS_ELSEWHERE => return case,
        Verdict::Passed => (
            Verdict::Failed,
            "it passes now: take it from the list in upstream/not_yet.rs".to_owned(),
        ),
        Verdict::Failed if is_shown => {
            (Verdict::NotYet, format!("not built yet: {missing}\n{lost}"))
        }
        Verdict::Failed => (
            Verdict::Failed,
            format!("no packet to a {missing} was lost: {}", case.message),
        ),
    };
    case
}

/// The known failures that the capture must confirm.
const IN_TRACE: [&str; 2] = [NODE_PORTS, NODE_PORTS_ELSEWHERE];

/// The source port of Kubernetes' conntrack specs, whose logs lack the node port.
const CONNTRACK_FROM: u16 = 12_345;

/// Returns the node ports without an answer that the spec names in its log, or that only conntrack specs
/// sent to, with the fates of their packets.
fn lost(case: &Case, fates: &Fates) -> Vec<String> {
    let log = &case.log;
    let is_of_conntrack = case.name.contains("Conntrack");
    let unanswered = fates.iter().filter(|(_, fate)| fate.answered == 0);
    let named = unanswered.filter(|((at, _), fate)| {
        let (ip, port) = (at.ip(), at.port());
        let is_its_like = is_of_conntrack && fate.from.iter().eq([&CONNTRACK_FROM]);
        is_its_like
            || [
                format!("{at}"),
                format!("{ip} {port}"),
                format!("{ip} on port {port}"),
                format!("{ip}:{port}"),
                format!("host={ip}&port={port}"),
                format!("host=[{ip}]&port={port}"),
            ]
            .iter()
            .any(|words| log.contains(words))
    });
    named
        .map(|((at, protocol), fate)| format!("{at}/{protocol}: {fate}"))
        .collect()
}

/// Returns the feature that the product lacks for a spec, if any.
fn missing(name: &str) -> Option<&'static str> {
    let name = name.strip_prefix(GROUP)?;
    let mut known = NOT_YET.iter();
    let (missing, _) = known.find(|(_, names)| names.contains(&name))?;
    Some(missing)
}

/// A selection of Kubernetes' own specs.
#[derive(Clone, Debug)]
pub(crate) enum Range {
    /// The fast ones.
    Few,
    /// Network specs with matching names.
    Matching(String),
    /// Network specs of the conformance suite.
    Conformance,
    /// Network specs about Services beyond the conformance suite.
    Wider,
}

impl Range {
    fn choice(&self) -> Choice {
        let named = |name: &str| format!("sig-network. .*{name}");
        let mut skip = NOT_HERE.map(str::to_owned).to_vec();
        let (focus, side_by_side, minutes) = match self {
            Self::Few => (FEW.map(named).to_vec(), 4, 45),
            Self::Matching(expression) => (vec![format!("sig-network.*({expression})")], 4, 45),
            Self::Conformance => (vec!["sig-network.*Conformance".to_owned()], 4, 45),
            Self::Wider => {
                skip.push("\\[Conformance\\]".to_owned());
                (WIDER.map(named).to_vec(), 6, 90)
            }
        };
        Choice {
            focus,
            skip,
            side_by_side,
            limit: Duration::from_secs(minutes * 60),
        }
    }

    /// Returns the number of specs in the selection, if known, so that missing ones are noticed.
    const fn count(&self) -> Option<usize> {
        match self {
            Self::Few => Some(FEW.len()),
            Self::Matching(_) => None,
            Self::Conformance => Some(47),
            Self::Wider => Some(95),
        }
    }

    /// True if Culvert's own specs run, too; those of `Wider` run with another selection.
    pub(crate) const fn has_ours(&self) -> bool {
        !matches!(self, Self::Wider)
    }
}

/// Runs a selection; returns the results, sorted since specs run in any order, and the fates of packets
/// to node ports of other nodes.
pub(crate) fn run(cluster: &Cluster, range: &Range) -> Result<(Vec<Case>, Fates)> {
    let trace = cluster.trace()?;
    let mut cases = ginkgo::run(cluster, &range.choice())?;
    let fates = trace.end()?;
    if let Some(count) = range.count() {
        let found = cases.len();
        ensure!(found >= count, "{found} of {count} specs were run");
    }
    cases.sort_by(|one, other| one.name.cmp(&other.name));
    Ok((cases, fates))
}

#[cfg(test)]
mod tests {
    use regex_lite::Regex;
    use tunnel_cluster::trace::Fate;

    use super::*;

    fn case(name: &str, verdict: Verdict) -> Case {
        Case {
            log: "Running 'nc -v 172.30.1.1 31000'; dial?host=fd00:30:1::1&port=31001".to_owned(),
            ..Case::new(name, verdict, Duration::ZERO, "no answer".to_owned())
        }
    }

    /// Builds fates from addresses of node ports, and the numbers of requests and answers.
    fn fates(ports: &[(&str, u64, u64)]) -> Fates {
        let fate = |&(at, asked, answered): &(&str, u64, u64)| {
            let fate = Fate {
                asked,
                answered,
                refused: asked - answered,
                from: [12_345].into(),
            };
            ((at.parse().unwrap(), "TCP"), fate)
        };
        ports.iter().map(fate).collect()
    }

    const KNOWN: &str =
        "[sig-network] Services should have session affinity work for NodePort service";

    #[test]
    fn a_spec_that_is_known_to_fail_must_fail_and_its_message_is_what_is_missing() {
        let fates = fates(&[
            ("172.30.1.1:31000", 3, 0),
            ("[fd00:30:1::1]:31001", 2, 0),
            ("172.30.1.1:31002", 9, 0),
        ]);
        let failed = judge(case(KNOWN, Verdict::Failed), true, &fates);
        let passed = judge(case(KNOWN, Verdict::Passed), true, &fates);

        assert_eq!(failed.verdict, Verdict::NotYet);
        assert_eq!(
            failed.message,
            "not built yet: node ports of other nodes\n\
             172.30.1.1:31000/TCP: 3 asked, 3 refused, 0 answered\n\
             [fd00:30:1::1]:31001/TCP: 2 asked, 2 refused, 0 answered"
        );
        assert_eq!(passed.verdict, Verdict::Failed);
    }

    #[test]
    fn a_spec_is_judged_by_what_is_known_of_it_and_by_what_packets_show() {
        let elsewhere = "[sig-network] Networking Granular Checks: Services should function for pod-Service: http";
        let conntrack = "[sig-network] Conntrack should be able to preserve UDP traffic when server pod cycles for a NodePort service";
        let longer = format!("{KNOWN}s");
        let none = Fates::new();
        let answered = fates(&[("172.30.1.1:31000", 3, 3)]);
        let lost = fates(&[("172.30.1.1:31000", 3, 0)]);
        let unnamed = fates(&[("172.30.1.1:31999", 3, 0)]);
        let mut from_others = unnamed.clone();
        for fate in from_others.values_mut() {
            fate.from = [40_000].into();
        }
        let (passed, failed, not_yet) = (Verdict::Passed, Verdict::Failed, Verdict::NotYet);
        for (claim, name, ended, fates, judged) in [
            ("no packet was sent", KNOWN, failed, &none, failed),
            ("its node ports answer", KNOWN, failed, &answered, failed),
            ("its client is there", elsewhere, passed, &none, passed),
            ("its packets were lost", elsewhere, failed, &lost, not_yet),
            ("its packets came", elsewhere, failed, &none, failed),
            ("its port sent", conntrack, failed, &unnamed, not_yet),
            ("another port sent", conntrack, failed, &from_others, failed),
            ("another name", &longer, failed, &lost, failed),
        ] {
            let case = judge(case(name, ended), true, fates);

            assert_eq!(case.verdict, judged, "{claim}");
            let reason = if judged == failed { "no answer" } else { "" };
            assert!(case.message.contains(reason), "{claim}: {}", case.message);
        }
        let other_proxy = judge(case(KNOWN, passed), false, &none);
        assert_eq!(other_proxy.verdict, passed);
    }

    #[test]
    fn no_spec_is_missing_for_two_reasons() {
        let mut names: Vec<_> = NOT_YET.iter().flat_map(|(_, names)| *names).collect();
        let all = names.len();
        names.sort_unstable();
        names.dedup();

        assert_eq!(names.len(), all);
    }

    #[test]
    fn the_wider_range_leaves_out_what_conformance_runs() {
        let Choice { focus, skip, .. } = Range::Wider.choice();
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
