mod endpoint_status;
mod no_local_endpoints;

use proptest::prelude::*;

use super::*;
use crate::model::{
    Endpoint, EndpointSlice, Service,
    fixture::{self, ip},
};

fn target(text: &str, port: u16) -> BackendTarget {
    BackendTarget {
        address: Address::from_ip(ip(text)),
        port: Port::from_host(port),
    }
}

fn frontend(text: &str, port: u16) -> FrontendKey {
    let target = target(text, port);
    FrontendKey::new(target.address, target.port, Protocol::TCP)
}

fn service_named(name: &str, ips: &[&str]) -> Service {
    Service {
        cluster_ips: ips.iter().copied().map(ip).collect(),
        ports: vec![fixture::http(80)],
        ..Service::named(ObjectName::new("default", name))
    }
}

fn node_info() -> NodeInfo {
    NodeInfo {
        name: "node-a".into(),
        ..NodeInfo::default()
    }
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
    let plans = plan_service(state, &node_info());
    assert_eq!(plans.len(), 1);
    PortPlan::clone(plans.values().next().expect("a plan"))
}

#[test]
fn the_default_algorithm_applies_to_services_that_select_none() {
    let algorithm = |own| {
        let web = Service {
            algorithm: own,
            ..service_named("web", &["10.96.0.10"])
        };
        let default = NodeInfo {
            default_algorithm: model::Algorithm::RoundRobin,
            ..node_info()
        };
        let plans = plan_service(&state(web, Vec::new()), &default);
        let plan = plans.values().next().expect("a plan");
        plan.algorithm
    };

    assert_eq!(algorithm(None), Algorithm::ROUND_ROBIN);
    let named = algorithm(Some(model::Algorithm::Random));
    assert_eq!(named, Algorithm::RANDOM);
}

fn claim(claims: &mut FrontendOwners, name: &str, created: Option<i64>, ip: &str) {
    let service = Service {
        created,
        ..service_named(name, &[ip])
    };
    let state = state(service, Vec::new());
    let plan = plan_service(&state, &node_info());
    claims.set_claims(&state.service.name, frontend_claims(&state, &plan));
}

proptest! {
    #[test]
    fn the_owner_of_a_frontend_does_not_depend_on_the_order_of_updates(
        order in Just(vec![("a", None), ("b", Some(5)), ("c", Some(9)), ("d", Some(5))]).prop_shuffle(),
    ) {
        let mut claims = FrontendOwners::default();
        for (name, created) in order {
            claim(&mut claims, name, created, "10.96.0.1");
        }
        let owner = claims.owner(&frontend("10.96.0.1", 80));
        prop_assert_eq!(owner.map(|name| &*name.service.name), Some("b"));
    }
}

/// Returns the members of a set in a plan, as the last octets of their addresses and their weights.
fn members(plan: &PortPlan, set: Membership) -> Vec<(u8, u32)> {
    let endpoints = plan.endpoints.iter();
    let members = endpoints.filter(|endpoint| endpoint.sets.includes(set));
    let octet = |endpoint: &PlannedEndpoint| match endpoint.target.address.to_ip() {
        IpAddr::V4(ip) => ip.octets()[3],
        IpAddr::V6(ip) => ip.octets()[15],
    };
    members.map(|it| (octet(&it), it.weight)).collect()
}

#[test]
fn an_endpoint_with_weight_0_is_in_no_set_unless_all_have_weight_0() {
    let plan = |weights: &[u32]| {
        let named = (1..).zip(weights).map(|(number, weight)| {
            let name: Arc<str> = format!("web-{number}").into();
            let last = Endpoint {
                name: Some(Arc::clone(&name)),
                node: (number > 1).then(|| "node-a".into()),
                ..endpoint(&format!("10.1.0.{number}"))
            };
            (last, (name, *weight))
        });
        let (endpoints, names): (Vec<_>, _) = named.unzip();
        let weights = model::Weights {
            names,
            ..model::Weights::default()
        };
        let web = Service {
            weights: Some(Arc::new(weights)),
            ..service_named("web", &["10.96.0.10"])
        };
        let slices = vec![slice("a", Family::V4, ("http", 8080), endpoints)];
        only_plan(&state(web, slices))
    };

    let some = plan(&[5, 0, 3]);
    assert_eq!(members(&some, Membership::CLUSTER), [(1, 5), (3, 3)]);
    assert_eq!(members(&some, Membership::LOCAL), [(3, 3)]);
    let all = plan(&[0, 0]);
    assert_eq!(members(&all, Membership::CLUSTER), [(1, 1), (2, 1)]);
    // The only endpoint of this node has weight 0, so the set for policy Local ignores the weights.
    let local = plan(&[5, 0]);
    assert_eq!(members(&local, Membership::CLUSTER), [(1, 5)]);
    assert_eq!(members(&local, Membership::LOCAL), [(2, 1)]);
}

#[test]
fn ports_with_the_same_endpoints_share_a_list() {
    let port = |name: &str, port| ServicePort {
        name: name.into(),
        ..fixture::http(port)
    };
    let web = Service {
        ports: vec![port("a", 80), port("b", 81), port("c", 82)],
        ..service_named("web", &["10.96.0.10"])
    };
    let service = web.name.clone();
    let endpoints = || vec![endpoint("10.1.0.1"), endpoint("10.1.0.2")];
    let both = &[("a", 8080), ("b", 8081), ("c", 8082)];
    let first = fixture::slice("first", &service, Family::V4, both, endpoints());
    let more = vec![endpoint("10.1.0.3")];
    let second = fixture::slice("second", &service, Family::V4, &[("c", 9090)], more);

    let plans = plan_service(&state(web, vec![first, second]), &node_info());

    let [a, b, c] = &plans.values().collect::<Vec<_>>()[..] else {
        panic!("three ports");
    };
    assert!(a.endpoints.shares_list_with(&b.endpoints));
    let targets = |plan: &PortPlan| {
        plan.endpoints
            .iter()
            .map(|it| it.target)
            .collect::<Vec<_>>()
    };
    assert_eq!(
        targets(b),
        [target("10.1.0.1", 8081), target("10.1.0.2", 8081)]
    );
    let of_c = [("10.1.0.1", 8082), ("10.1.0.2", 8082), ("10.1.0.3", 9090)];
    assert_eq!(targets(c), of_c.map(|(ip, port)| target(ip, port)));
}

#[test]
fn sctp_ports_are_planned_only_if_packets_are_translated() {
    let mut web = service_named("web", &["10.96.0.10"]);
    web.ports[0].protocol = Protocol::SCTP;
    let state = state(web, Vec::new());
    for translates_packets in [true, false] {
        let info = NodeInfo {
            translates_packets,
            ..node_info()
        };
        let planned = plan_service(&state, &info);
        assert_eq!(planned.is_empty(), !translates_packets);
    }
}
