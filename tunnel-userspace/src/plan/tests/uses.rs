//! What people are told of each endpoint.

use std::net::Ipv6Addr;

use super::*;
use crate::model::{Hints, TrafficPolicy, Weights};

/// What becomes of each endpoint of a Service, the same in each family.
fn told(web: Service, endpoints: Vec<Endpoint>) -> Vec<(String, [bool; 2], Why)> {
    let v6 = |endpoint: &Endpoint| Endpoint {
        address: in_v6(endpoint.address),
        ..endpoint.clone()
    };
    let over_v6 = Service {
        cluster_ips: web.cluster_ips.iter().copied().map(in_v6).collect(),
        ..web.clone()
    };
    let endpoints_v6 = endpoints.iter().map(v6).collect();
    let v4 = told_in(Family::V4, web, endpoints);
    let v6 = told_in(Family::V6, over_v6, endpoints_v6);
    let without_place = |(_, sets, why): &(String, [bool; 2], Why)| (*sets, *why);
    let both = [&v4, &v6].map(|told| told.iter().map(without_place).collect::<Vec<_>>());
    assert_eq!(both[0], both[1], "IPv4 and IPv6");
    v4
}

/// An IPv4 address as the end of an IPv6 one.
fn in_v6(address: IpAddr) -> IpAddr {
    match address {
        IpAddr::V4(v4) => {
            let [.., last] = v4.octets();
            Ipv6Addr::new(0xfd00, 0x10, 0, 0, 0, 0, 0, last.into()).into()
        }
        IpAddr::V6(_) => address,
    }
}

fn told_in(
    family: Family,
    web: Service,
    endpoints: Vec<Endpoint>,
) -> Vec<(String, [bool; 2], Why)> {
    let web = state(web, vec![slice("a", family, ("http", 8080), endpoints)]);
    let plan = only_plan(&web);
    let port = ("http", Protocol::TCP);
    let uses = uses(&web, &web, family, port, &plan, &here());
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

/// One that is for the clients of a node.
fn hinted(address: &str, node: &str) -> Endpoint {
    Endpoint {
        hints: Some(Arc::new(Hints {
            nodes: vec![node.into()],
            zones: vec![],
        })),
        ..endpoint(address)
    }
}

/// The endpoint of this node.
fn of_this_node(endpoint: Endpoint) -> Endpoint {
    Endpoint {
        node: Some("node-a".into()),
        ..endpoint
    }
}

/// A Service whose every policy is Local.
fn local() -> Service {
    Service {
        internal_policy: TrafficPolicy::Local,
        ..web()
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
    let endpoints = vec![hinted("10.1.0.1", "node-a"), hinted("10.1.0.2", "node-b")];

    assert_eq!(whys(web(), endpoints), [Why::Ready, Why::HintedElsewhere]);
}

#[test]
fn one_on_another_node_is_told_where_every_policy_is_local() {
    let endpoints = vec![of_this_node(endpoint("10.1.0.1")), endpoint("10.1.0.2")];

    assert_eq!(
        told(local(), endpoints),
        [
            ("10.1.0.1:8080".to_owned(), [false, true], Why::Ready),
            ("10.1.0.2:8080".to_owned(), [false, false], Why::OnOtherNode),
        ]
    );
}

#[test]
fn what_only_the_policy_local_would_use_is_told_by_its_condition_where_none_is_local() {
    let endpoints = vec![
        endpoint("10.1.0.1"),
        of_this_node(going("10.1.0.2", true)),
        of_this_node(unready("10.1.0.3")),
    ];

    assert_eq!(
        whys(web(), endpoints),
        [Why::Ready, Why::Going, Why::NotReady]
    );
}

#[test]
fn one_of_this_node_that_hints_keep_away_is_told_so() {
    let endpoints = vec![
        hinted("10.1.0.1", "node-a"),
        of_this_node(hinted("10.1.0.2", "node-b")),
    ];

    assert_eq!(whys(web(), endpoints), [Why::Ready, Why::HintedElsewhere]);
}

#[test]
fn where_every_policy_is_local_all_that_is_elsewhere_is_told_so_if_it_serves() {
    let endpoints = vec![
        endpoint("10.1.0.1"),
        going("10.1.0.2", true),
        unready("10.1.0.3"),
    ];

    assert_eq!(
        whys(local(), endpoints),
        [Why::OnOtherNode, Why::OnOtherNode, Why::NotReady]
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
