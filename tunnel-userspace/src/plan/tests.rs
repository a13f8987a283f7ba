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
