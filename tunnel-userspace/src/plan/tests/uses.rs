//! The cause that is shown for each endpoint.

use super::*;
use crate::model::{Hints, TrafficPolicy, Weights};

/// Changes a ready endpoint to one of another kind.
type Kind = fn(Endpoint) -> Endpoint;

const READY: Kind = |endpoint| endpoint;
const UNREADY: Kind = |endpoint| Endpoint {
    ready: false,
    serving: false,
    ..endpoint
};
/// An endpoint that is terminating, and still serves.
const GOING: Kind = |endpoint| Endpoint {
    ready: false,
    terminating: true,
    ..endpoint
};
const HERE: Kind = |endpoint| Endpoint {
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

/// Returns a Service in which the endpoint `web-0` has weight 0, and each other this weight.
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

/// Returns the causes for endpoints of these kinds, in the order of their addresses.
fn told(family: Family, service: &Service, kinds: &[(Kind, Why)]) -> Vec<Why> {
    let (cluster_ip, net) = match family {
        Family::V4 => ("10.96.0.10", "10.1.0."),
        Family::V6 => ("fd96::10", "fd01::"),
    };
    let web = Service {
        cluster_ips: fixture::ips(&[cluster_ip]),
        ..service.clone()
    };
    let made = (1..).zip(kinds);
    let made = made.map(|(last, (make, _))| make(endpoint(&format!("{net}{last}"))));
    let slice = slice("a", family, ("http", 8080), made.collect());
    let web = state(web, vec![slice]);
    let port = ("http", Protocol::TCP);
    let uses = uses(&web, &web, family, port, &only_plan(&web), &here());
    let is_local = service.internal_policy == TrafficPolicy::Local;
    for it in &uses {
        let is_used = matches!(it.why, Why::Ready | Why::LastResort);
        let sets = [is_used && !is_local, is_used && is_local];
        assert_eq!([it.cluster, it.local], sets, "{it:?}");
    }
    uses.iter().map(|it| it.why).collect()
}

#[test]
fn each_endpoint_is_told_with_the_reason() {
    use Why::{Going, HintedElsewhere, LastResort, NotReady, OnOtherNode, Ready, Weightless};

    let web = service_named("web", &[]);
    let local = Service {
        internal_policy: TrafficPolicy::Local,
        ..web.clone()
    };
    let gone: Kind = |endpoint| UNREADY(GOING(endpoint));
    let hinted_here: Kind = |endpoint| HERE(FOR_ANOTHER_NODE(endpoint));
    let cases: [(_, _, &[(Kind, Why)]); 9] = [
        (
            "by its conditions",
            &web,
            &[
                (READY, Ready),
                (UNREADY, NotReady),
                (GOING, Going),
                (gone, NotReady),
            ],
        ),
        (
            "one that is going is the last resort where no other is ready",
            &web,
            &[(UNREADY, NotReady), (GOING, LastResort)],
        ),
        (
            "hints keep one away",
            &web,
            &[(FOR_THIS_NODE, Ready), (FOR_ANOTHER_NODE, HintedElsewhere)],
        ),
        (
            "hints keep one of this node away",
            &web,
            &[(FOR_THIS_NODE, Ready), (hinted_here, HintedElsewhere)],
        ),
        (
            "what only the policy Local would use goes by its conditions where none is Local",
            &web,
            &[
                (READY, Ready),
                (|it| HERE(GOING(it)), Going),
                (|it| HERE(UNREADY(it)), NotReady),
            ],
        ),
        (
            "one is on another node where every policy is Local",
            &local,
            &[(HERE, Ready), (READY, OnOtherNode)],
        ),
        (
            "all are on other nodes where every policy is Local, if they serve",
            &local,
            &[
                (READY, OnOtherNode),
                (GOING, OnOtherNode),
                (UNREADY, NotReady),
            ],
        ),
        (
            "one has no weight",
            &weighted(1),
            &[(NAMED, Weightless), (READY, Ready)],
        ),
        (
            "one has no weight, as nobody has",
            &weighted(0),
            &[(NAMED, Ready), (READY, Ready)],
        ),
    ];
    for (claim, service, kinds) in cases {
        let wanted: Vec<Why> = kinds.iter().map(|(_, why)| *why).collect();
        for family in [Family::V4, Family::V6] {
            assert_eq!(told(family, service, kinds), wanted, "{claim}, {family:?}");
        }
    }
}
