//! What people are told of each endpoint.

use super::*;
use crate::model::{Hints, TrafficPolicy, Weights};

/// What becomes of each endpoint of a Service, by the last number of its address.
fn told(web: Service, endpoints: Vec<Endpoint>) -> Vec<(String, [bool; 2], Why)> {
    let web = state(web, vec![slice("a", Family::V4, ("http", 8080), endpoints)]);
    let plan = only_plan(&web);
    let port = ("http", Protocol::TCP);
    let uses = uses(&web, &web, Family::V4, port, &plan, &here());
    let told = |it: &Use<'_>| {
        let place = it.target.to_string();
        (place, [it.cluster, it.local], it.why)
    };
    uses.iter().map(told).collect()
}

fn whys(web: Service, endpoints: Vec<Endpoint>) -> Vec<Why> {
    let told = told(web, endpoints);
    told.into_iter().map(|(_, _, why)| why).collect()
}

fn web() -> Service {
    service_named("web", &["10.96.0.10"])
}

/// An endpoint that is going, and still serves or not.
fn going(address: &str, serving: bool) -> Endpoint {
    Endpoint {
        ready: false,
        serving,
        terminating: true,
        ..endpoint(address)
    }
}

fn unready(address: &str) -> Endpoint {
    Endpoint {
        ready: false,
        serving: false,
        ..endpoint(address)
    }
}

#[test]
fn each_endpoint_is_told_by_its_conditions() {
    let endpoints = vec![
        endpoint("10.1.0.1"),
        unready("10.1.0.2"),
        going("10.1.0.3", true),
        going("10.1.0.4", false),
    ];

    assert_eq!(
        whys(web(), endpoints),
        [Why::Ready, Why::NotReady, Why::Going, Why::NotReady]
    );
}

#[test]
fn one_that_is_going_is_the_last_resort_where_no_other_is_ready() {
    let endpoints = vec![unready("10.1.0.2"), going("10.1.0.3", true)];

    assert_eq!(
        told(web(), endpoints),
        [
            ("10.1.0.2:8080".to_owned(), [false, false], Why::NotReady),
            ("10.1.0.3:8080".to_owned(), [true, false], Why::LastResort),
        ]
    );
}

#[test]
fn one_that_hints_keep_away_is_told_so() {
    let hinted = |address, node: &str| Endpoint {
        hints: Some(Arc::new(Hints {
            nodes: vec![node.into()],
            zones: vec![],
        })),
        ..endpoint(address)
    };
    let endpoints = vec![hinted("10.1.0.1", "node-a"), hinted("10.1.0.2", "node-b")];

    assert_eq!(whys(web(), endpoints), [Why::Ready, Why::HintedElsewhere]);
}

#[test]
fn one_on_another_node_is_told_where_every_policy_is_local() {
    let local = Service {
        internal_policy: TrafficPolicy::Local,
        ..web()
    };
    let here = Endpoint {
        node: Some("node-a".into()),
        ..endpoint("10.1.0.1")
    };
    let endpoints = vec![here, endpoint("10.1.0.2")];

    assert_eq!(
        told(local, endpoints),
        [
            ("10.1.0.1:8080".to_owned(), [false, true], Why::Ready),
            ("10.1.0.2:8080".to_owned(), [false, false], Why::OnOtherNode),
        ]
    );
}

#[test]
fn one_without_weight_is_told_unless_nobody_has_more() {
    let weights = |others| Service {
        weights: Some(Arc::new(Weights {
            names: [("web-0".into(), 0)].into(),
            others: Some(others),
            ..Weights::default()
        })),
        ..web()
    };
    let endpoints = || {
        let named = Endpoint {
            name: Some("web-0".into()),
            ..endpoint("10.1.0.1")
        };
        vec![named, endpoint("10.1.0.2")]
    };

    assert_eq!(whys(weights(1), endpoints()), [Why::Weightless, Why::Ready]);
    assert_eq!(whys(weights(0), endpoints()), [Why::Ready, Why::Ready]);
}
