use super::*;
use crate::model::TrafficPolicy;

/// Returns the counts for the internal and external policy of a Service that has a cluster IP, an external
/// IP, and an endpoint on each of these nodes.
fn counts(family: Family, policies: [TrafficPolicy; 2], nodes: &[&str]) -> [usize; 2] {
    let (cluster_ip, external_ip, net) = match family {
        Family::V4 => ("10.96.0.1", "192.0.2.1", "10.1.0."),
        Family::V6 => ("fd96::1", "2001:db8::1", "fd01::"),
    };
    let [internal_policy, external_policy] = policies;
    let web = Service {
        external_ips: vec![ip(external_ip)],
        internal_policy,
        external_policy,
        ..service_named("web", &[cluster_ip])
    };
    let at = |(last, node): (u8, &&str)| Endpoint {
        node: Some((**node).into()),
        ..endpoint(&format!("{net}{last}"))
    };
    let endpoints = (1..).zip(nodes).map(at).collect();
    let web = state(web, vec![slice("a", family, ("http", 8080), endpoints)]);
    let mut gaps = count_no_local_endpoints(&plan_service(&web, &node_info()));
    let NoLocalEndpoints { internal, external } = std::mem::take(gaps.get_mut(family));
    assert_eq!(
        [gaps.v4, gaps.v6],
        [NoLocalEndpoints::default(); 2],
        "of {family:?}"
    );
    [internal, external]
}

#[test]
fn a_port_with_policy_local_and_only_remote_endpoints_is_counted() {
    use TrafficPolicy::{Cluster, Local};

    let elsewhere: &[&str] = &["node-b"];
    for family in [Family::V4, Family::V6] {
        for (policies, nodes, wanted) in [
            ([Local, Local], elsewhere, [1, 1]),
            ([Local, Cluster], elsewhere, [1, 0]),
            ([Cluster, Local], elsewhere, [0, 1]),
            ([Cluster, Cluster], elsewhere, [0, 0]),
            ([Local, Local], &["node-a", "node-b"], [0, 0]),
            // A service port without endpoints is not counted.
            ([Local, Local], &[], [0, 0]),
        ] {
            let found = counts(family, policies, nodes);
            assert_eq!(found, wanted, "{policies:?} {nodes:?}");
        }
    }
}
