//! Tests the status of endpoints and the reason for it.

use super::*;
use crate::model::{Hints, TrafficPolicy, Weights};

/// A function that turns a ready endpoint into one of another kind.
type Kind = fn(Endpoint) -> Endpoint;

const READY: Kind = |endpoint| endpoint;
const UNREADY: Kind = |endpoint| Endpoint {
    ready: false,
    serving: false,
    ..endpoint
};
/// An endpoint that is terminating but still serving.
const TERMINATING: Kind = |endpoint| Endpoint {
    ready: false,
    terminating: true,
    ..endpoint
};
const LOCAL: Kind = |endpoint| Endpoint {
    node: Some("node-a".into()),
    ..endpoint
};
const FOR_THIS_NODE: Kind = |endpoint| hinted(endpoint, "node-a");
const FOR_ANOTHER_NODE: Kind = |endpoint| hinted(endpoint, "node-b");
const NAMED: Kind = |endpoint| Endpoint {
    name: Some("web-0".into()),
    ..endpoint
};

fn hinted(endpoint: Endpoint, node: &str) -> Endpoint {
    let hints = Hints {
        nodes: vec![node.into()],
        zones: vec![],
    };
    Endpoint {
        hints: Some(Arc::new(hints)),
        ..endpoint
    }
}

/// Returns a Service that gives weight 0 to the endpoint `web-0`, and the weight `others` to all others.
fn weighted(others: u32) -> Service {
    let weights = Weights {
        names: [("web-0".into(), 0)].into(),
        others: Some(others),
        ..Weights::default()
    };
    Service {
        weights: Some(Arc::new(weights)),
        ..service_named("web", &[])
    }
}

/// Creates endpoints of the given kinds and returns the reasons for their statuses, in order of address.
fn reasons(
    family: Family,
    service: &Service,
    kinds: &[(Kind, EndpointReason)],
) -> Vec<EndpointReason> {
    let (cluster_ip, net) = match family {
        Family::V4 => ("10.96.0.10", "10.1.0."),
        Family::V6 => ("fd96::10", "fd01::"),
    };
    let web = Service {
        cluster_ips: fixture::ips(&[cluster_ip]),
        ..service.clone()
    };
    let endpoints = (1..).zip(kinds);
    let endpoints = endpoints.map(|(last, (kind, _))| kind(endpoint(&format!("{net}{last}"))));
    let slice = slice("a", family, ("http", 8080), endpoints.collect());
    let web = state(web, vec![slice]);
    let port = ("http", Protocol::TCP);
    let statuses = endpoint_statuses(&web, &web, family, port, &only_plan(&web), &node_info());
    let is_local = service.internal_policy == TrafficPolicy::Local;
    for it in &statuses {
        let is_used = matches!(
            it.reason,
            EndpointReason::Ready | EndpointReason::TerminatingFallback
        );
        let sets = [is_used && !is_local, is_used && is_local];
        assert_eq!([it.cluster, it.local], sets, "{it:?}");
    }
    statuses.iter().map(|it| it.reason).collect()
}

#[test]
fn each_endpoint_has_a_status_with_its_reason() {
    use EndpointReason::{
        ExcludedByHints, NotReady, OnOtherNode, Ready, Terminating, TerminatingFallback, ZeroWeight,
    };

    let web = service_named("web", &[]);
    let local = Service {
        internal_policy: TrafficPolicy::Local,
        ..web.clone()
    };
    let not_serving: Kind = |endpoint| UNREADY(TERMINATING(endpoint));
    let hinted_here: Kind = |endpoint| LOCAL(FOR_ANOTHER_NODE(endpoint));
    let cases: [(_, _, &[(Kind, EndpointReason)]); 9] = [
        (
            "the reason is the condition of the endpoint",
            &web,
            &[
                (READY, Ready),
                (UNREADY, NotReady),
                (TERMINATING, Terminating),
                (not_serving, NotReady),
            ],
        ),
        (
            "a terminating endpoint is active if no other is ready",
            &web,
            &[(UNREADY, NotReady), (TERMINATING, TerminatingFallback)],
        ),
        (
            "hints exclude an endpoint",
            &web,
            &[(FOR_THIS_NODE, Ready), (FOR_ANOTHER_NODE, ExcludedByHints)],
        ),
        (
            "hints exclude an endpoint of this node",
            &web,
            &[(FOR_THIS_NODE, Ready), (hinted_here, ExcludedByHints)],
        ),
        (
            "without a policy Local, the reason for an endpoint of this node is its condition",
            &web,
            &[
                (READY, Ready),
                (|it| LOCAL(TERMINATING(it)), Terminating),
                (|it| LOCAL(UNREADY(it)), NotReady),
            ],
        ),
        (
            "with policy Local, an endpoint on another node is inactive",
            &local,
            &[(LOCAL, Ready), (READY, OnOtherNode)],
        ),
        (
            "with policy Local, serving endpoints on other nodes are inactive",
            &local,
            &[
                (READY, OnOtherNode),
                (TERMINATING, OnOtherNode),
                (UNREADY, NotReady),
            ],
        ),
        (
            "an endpoint with weight 0 is inactive",
            &weighted(1),
            &[(NAMED, ZeroWeight), (READY, Ready)],
        ),
        (
            "weights are ignored if all are 0",
            &weighted(0),
            &[(NAMED, Ready), (READY, Ready)],
        ),
    ];
    for (claim, service, kinds) in cases {
        let wanted: Vec<EndpointReason> = kinds.iter().map(|(_, reason)| *reason).collect();
        for family in [Family::V4, Family::V6] {
            assert_eq!(
                reasons(family, service, kinds),
                wanted,
                "{claim}, {family:?}"
            );
        }
    }
}
