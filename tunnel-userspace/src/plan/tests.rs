mod uses;

use proptest::prelude::*;

use super::*;
use crate::model::{
    Endpoint, EndpointSlice, Service,
    fixture::{self, ip},
};

fn target(text: &str, port: u16) -> Target {
    Target {
        address: Address::from_ip(ip(text)),
        port: Port::from_host(port),
    }
}

fn front(text: &str, port: u16) -> FrontKey {
    let target = target(text, port);
    FrontKey::new(target.address, target.port, Protocol::TCP)
}

fn service_named(name: &str, ips: &[&str]) -> Service {
    Service {
        cluster_ips: ips.iter().copied().map(ip).collect(),
        ports: vec![fixture::http(80)],
        ..Service::named(ObjectName::new("default", name))
    }
}

fn here() -> Here {
    Here::new("node-a".into(), model::Algorithm::Random)
}

fn endpoint(address: &str) -> Endpoint {
    fixture::endpoint(ip(address))
}

fn slice(name: &str, family: Family, port: (&str, u16), endpoints: Vec<Endpoint>) -> EndpointSlice {
    let service = ObjectName::new("default", "web");
    fixture::slice(name, &service, family, &[port], endpoints)
}

fn state(service: Service, slices: Vec<EndpointSlice>) -> ServiceState {
    ServiceState {
        service: Arc::new(service),
        slices: slices.into_iter().map(Arc::new).collect(),
    }
}

fn only_plan(state: &ServiceState) -> PortPlan {
    let plans = service(state, &here());
    assert_eq!(plans.len(), 1);
    PortPlan::clone(plans.values().next().expect("a plan"))
}

#[test]
fn the_algorithm_of_the_node_is_for_services_that_name_none() {
    let algorithm = |own| {
        let web = Service {
            algorithm: own,
            ..service_named("web", &["10.96.0.10"])
        };
        let default = Here {
            algorithm: model::Algorithm::RoundRobin,
            ..here()
        };
        let plans = service(&state(web, Vec::new()), &default);
        plans
            .values()
            .map(|plan| plan.algorithm)
            .collect::<Vec<_>>()
    };

    assert_eq!(algorithm(None), [Algorithm::ROUND_ROBIN]);
    assert_eq!(
        algorithm(Some(model::Algorithm::Random)),
        [Algorithm::RANDOM]
    );
}

fn claim(claims: &mut Claims, name: &str, created: Option<i64>, ips: &[&str]) -> Vec<String> {
    let mut service = service_named(name, ips);
    service.created = created;
    let state = state(service, Vec::new());
    let plan = super::service(&state, &here());
    let moved = claims.replace(&state.service.name, super::claims(&state, &plan));
    moved.into_iter().map(|name| name.to_string()).collect()
}

fn owner(claims: &Claims, ip: &str) -> Option<String> {
    claims
        .owner(&front(ip, 80))
        .map(|name| name.service.name.to_string())
}

#[test]
fn the_older_service_owns_an_address_that_two_claim() {
    let mut claims = Claims::default();
    claim(&mut claims, "young", Some(20), &["10.96.0.1"]);

    assert_eq!(
        claim(&mut claims, "old", Some(10), &["10.96.0.1"]),
        ["default/young"]
    );
    assert_eq!(owner(&claims, "10.96.0.1").as_deref(), Some("old"));
    assert!(claim(&mut claims, "undated", None, &["10.96.0.1"]).is_empty());
}

#[test]
fn the_loser_is_planned_when_the_winner_leaves() {
    let mut claims = Claims::default();
    claim(&mut claims, "a", None, &["10.96.0.1"]);
    claim(&mut claims, "b", None, &["10.96.0.1"]);
    assert_eq!(owner(&claims, "10.96.0.1").as_deref(), Some("a"));

    assert_eq!(claim(&mut claims, "a", None, &["10.96.0.2"]), ["default/b"]);
    assert_eq!(owner(&claims, "10.96.0.1").as_deref(), Some("b"));
}

proptest! {
    #[test]
    fn whoever_comes_in_whatever_order_the_owner_is_the_same(
        order in Just(vec![("a", None), ("b", Some(5)), ("c", Some(9)), ("d", Some(5))]).prop_shuffle(),
    ) {
        let mut claims = Claims::default();
        for (name, created) in order {
            claim(&mut claims, name, created, &["10.96.0.1"]);
        }
        prop_assert_eq!(owner(&claims, "10.96.0.1"), Some("b".to_owned()));
    }

    #[test]
    fn a_restricted_plan_never_grows(known in proptest::collection::btree_set(0..8_u16, 0..8)) {
        let targets: Vec<_> = (0..8).map(|port| target("10.1.0.1", port)).collect();
        let plan = PortPlan {
            cluster: targets.clone(),
            serving: targets,
            ..PortPlan::nothing()
        };
        let is_known = |target: &Target| known.contains(&target.port.to_host());
        let restricted = plan.restricted_to(|_| false, is_known, false);
        prop_assert_eq!(restricted.cluster.len(), known.len());
        prop_assert_eq!(restricted.serving.len(), known.len());
    }
}
