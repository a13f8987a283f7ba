//! Tests of the generated clusters: they are reproducible and valid, their results don't depend on the order
//! of objects, and together they cover every corner case.

use std::collections::{BTreeMap, BTreeSet};

use fastrand::Rng;
use k8s_openapi::apimachinery::pkg::apis::meta::v1::ObjectMeta;

use crate::{
    AddressKind, Cluster, ConnectionSource, Frontend, LocalNode, OwnAddresses, Policy,
    TopologyKeys, Verdict, frontends, health_check_node_ports, is_masqueraded, is_pod_masqueraded,
    random, verdict,
};

const SEEDS: u64 = 400;

fn clusters() -> impl Iterator<Item = (Cluster, LocalNode)> {
    (0..SEEDS).map(|seed| random::cluster(&mut Rng::with_seed(seed)))
}

#[test]
fn one_seed_gives_one_cluster() {
    for seed in 0..50 {
        let [one, two] = [seed; 2].map(|seed| random::cluster(&mut Rng::with_seed(seed)));
        assert_eq!(format!("{one:?}"), format!("{two:?}"));
    }
}

#[test]
fn names_and_ports_are_unique_as_the_api_server_demands() {
    for (cluster, _) in clusters() {
        let id = |metadata: &ObjectMeta| (metadata.namespace.clone(), metadata.name.clone());
        unique(cluster.services.iter().map(|service| id(&service.metadata)));
        unique(cluster.slices.iter().map(|slice| id(&slice.metadata)));
        let mut node_ports = Vec::new();
        let mut health_checks = Vec::new();
        for service in &cluster.services {
            let spec = service.spec.as_ref().unwrap();
            let ports = spec.ports.iter().flatten();
            unique(ports.clone().map(|port| port.name.clone()));
            unique(ports.clone().map(|port| (port.port, port.protocol.clone())));
            let used = ports.filter(|port| port.node_port.unwrap_or(0) != 0);
            node_ports.extend(used.map(|port| (port.node_port, port.protocol.clone())));
            health_checks.extend(spec.health_check_node_port.filter(|port| *port != 0));
        }
        unique(node_ports);
        unique(health_checks);
        for slice in &cluster.slices {
            unique(slice.ports.iter().flatten().map(|port| port.name.clone()));
        }
    }
}

#[track_caller]
fn unique<T: Ord>(items: impl IntoIterator<Item = T>) {
    let mut seen = BTreeSet::new();
    assert!(items.into_iter().all(|item| seen.insert(item)));
}

#[test]
fn neither_the_order_of_objects_nor_the_names_of_slices_decide_anything() {
    for (cluster, here) in clusters() {
        let expected = (
            frontends(&cluster, &here),
            health_check_node_ports(&cluster, &here),
        );
        let mut other = cluster;
        other.services.reverse();
        other.slices.reverse();
        let count = other.slices.len();
        for is_rising in [false, true] {
            for (number, slice) in other.slices.iter_mut().enumerate() {
                let place = if is_rising { number } else { count - number };
                slice.metadata.name = Some(format!("{place:03}"));
            }
            assert_eq!(frontends(&other, &here), expected.0);
            assert_eq!(health_check_node_ports(&other, &here), expected.1);
        }
    }
}

#[test]
fn every_corner_case_is_in_some_cluster() {
    let mut seen = BTreeMap::<String, u64>::new();
    let mut record = |what: String| *seen.entry(what).or_default() += 1;
    for (cluster, here) in clusters() {
        let all = frontends(&cluster, &here);
        for frontend in all.values() {
            for source in random::sources(frontend) {
                record(verdict_of(frontend, &source, &here));
                masquerades(frontend, &source, &here).for_each(&mut record);
            }
            for trait_ in traits(frontend) {
                record(format!("{:?}, {trait_}", frontend.kind));
            }
        }
        for slice in &cluster.slices {
            for endpoint in slice.endpoints.iter().flatten() {
                let given = endpoint.conditions.clone().unwrap_or_default();
                record(conditions(given.ready, given.serving, given.terminating));
            }
        }
        for conflict in conflicts(&cluster, &here) {
            record(conflict);
        }
        let unfiltered = LocalNode {
            topology_keys: TopologyKeys::Ignore,
            ..here.clone()
        };
        let serving_all = LocalNode {
            own_addresses: OwnAddresses::Serve,
            ..here.clone()
        };
        for (what, other) in [
            (
                "an address of the node is refused",
                frontends(&cluster, &serving_all),
            ),
            ("hints decide", frontends(&without_hints(&cluster), &here)),
            (
                "a moved slice decides",
                frontends(&without_moved_slices(&cluster), &here),
            ),
            ("topology keys decide", frontends(&cluster, &unfiltered)),
        ] {
            if all != other {
                record(what.to_owned());
            }
        }
        for check in health_check_node_ports(&cluster, &here).into_values() {
            for (family, count) in check.local_ready {
                record(format!("health check {family:?}, {}", count > 0));
            }
        }
    }
    let mut missing = expected_corners();
    missing.retain(|expected| seen.get(expected).is_none_or(|count| *count < 3));
    assert!(
        missing.is_empty(),
        "corner cases that occur less than 3 times: {missing:#?} in {seen:#?}"
    );
}

/// Describes whether packets from a source are masqueraded on their way to each endpoint.
fn masquerades(
    frontend: &Frontend,
    source: &ConnectionSource,
    here: &LocalNode,
) -> impl Iterator<Item = String> {
    let sender = match source {
        ConnectionSource::Outside(ip) => Some((*ip, false)),
        ConnectionSource::PodPacket(ip) => Some((*ip, true)),
        ConnectionSource::NodeSocket | ConnectionSource::PodSocket(_) => None,
    };
    sender.into_iter().flat_map(move |(ip, is_pod)| {
        frontend.cluster.iter().map(move |backend| {
            let (of, is_masqueraded) = if is_pod {
                let is_masqueraded = is_pod_masqueraded(frontend, ip, backend.ip(), here);
                ("pod masqueraded", is_masqueraded)
            } else {
                let is_masqueraded = is_masqueraded(frontend, ip, backend.ip(), here);
                ("masqueraded", is_masqueraded)
            };
            format!("{:?}, {of}: {is_masqueraded}", frontend.kind)
        })
    })
}

fn verdict_of(frontend: &Frontend, source: &ConnectionSource, here: &LocalNode) -> String {
    let result = match verdict(frontend, source, here) {
        Verdict::To(set) if set == frontend.cluster && set == frontend.local => "both sets",
        Verdict::To(set) if set == frontend.cluster => "the cluster set",
        Verdict::To(_) => "the local set",
        Verdict::Refused => "refused",
        Verdict::Dropped => "dropped",
        Verdict::Untouched => "untouched",
    };
    let source = match source {
        ConnectionSource::NodeSocket => "node",
        ConnectionSource::PodSocket(_) => "pod",
        ConnectionSource::PodPacket(_) => "packet of a pod",
        ConnectionSource::Outside(_) => "outside",
    };
    let restricted = if frontend.source_ranges.is_empty() {
        ""
    } else {
        ", ranges"
    };
    format!(
        "{:?}, {:?}{restricted}, {source}: {result}",
        frontend.kind, frontend.policy
    )
}

fn conditions(ready: Option<bool>, serving: Option<bool>, terminating: Option<bool>) -> String {
    format!("ready {ready:?}, serving {serving:?}, terminating {terminating:?}")
}

/// Returns, for each pair of Services that claim the same key, the kinds of address with which they claim it.
fn conflicts(cluster: &Cluster, here: &LocalNode) -> Vec<String> {
    let mut claims = BTreeMap::<_, Vec<AddressKind>>::new();
    for service in &cluster.services {
        let mut alone = cluster.clone();
        alone.services = vec![service.clone()];
        for (key, frontend) in frontends(&alone, here) {
            claims.entry(key).or_default().push(frontend.kind);
        }
    }
    let mut conflicts = Vec::new();
    for mut kinds in claims.into_values() {
        kinds.sort();
        for pair in kinds.windows(2) {
            conflicts.push(format!("{:?} before {:?}", pair[0], pair[1]));
        }
    }
    conflicts
}

fn without_hints(cluster: &Cluster) -> Cluster {
    let mut cluster = cluster.clone();
    for slice in &mut cluster.slices {
        for endpoint in slice.endpoints.iter_mut().flatten() {
            endpoint.hints = None;
        }
    }
    cluster
}

fn without_moved_slices(cluster: &Cluster) -> Cluster {
    let mut cluster = cluster.clone();
    cluster.slices.retain(|slice| {
        let name = slice.metadata.name.as_deref().unwrap();
        name.starts_with("service-")
    });
    cluster
}

fn traits(frontend: &Frontend) -> impl Iterator<Item = &'static str> {
    let lacks_local = !frontend.local.is_subset(&frontend.cluster);
    let traits = [
        (frontend.address.is_ipv4(), "IPv4"),
        (frontend.address.is_ipv6(), "IPv6"),
        (frontend.affinity != 0, "affinity"),
        (frontend.cluster.len() > 1, "several backends"),
        (frontend.cluster.is_empty(), "no backend"),
        (lacks_local, "local backends that the cluster set lacks"),
    ];
    let traits = traits.into_iter().filter(|(has_it, _)| *has_it);
    traits.map(|(_, word)| word)
}

fn expected_corners() -> Vec<String> {
    let kinds = [
        AddressKind::ClusterIp,
        AddressKind::LoadBalancerIp,
        AddressKind::ExternalIp,
        AddressKind::NodePort,
    ];
    let mut expected: Vec<String> = [
        "ClusterIp, Local, pod: dropped",
        "NodePort, Local, pod: untouched",
        "NodePort, Local, packet of a pod: the cluster set",
        "ExternalIp, Local, packet of a pod: the cluster set",
        "ClusterIp before ExternalIp",
        "LoadBalancerIp before LoadBalancerIp",
        "LoadBalancerIp before ExternalIp",
        "ExternalIp before ExternalIp",
        "ExternalIp before NodePort",
        "hints decide",
        "topology keys decide",
        "a moved slice decides",
        "health check Ipv4, true",
        "health check Ipv4, false",
        "health check Ipv6, true",
        "health check Ipv6, false",
    ]
    .map(str::to_owned)
    .into();
    for kind in kinds {
        for corner in [
            "IPv4",
            "IPv6",
            "affinity",
            "several backends",
            "no backend",
            "local backends that the cluster set lacks",
            "Cluster, outside: the cluster set",
            "Local, outside: the local set",
            "Local, outside: dropped",
            "masqueraded: true",
            "masqueraded: false",
            "pod masqueraded: true",
            "pod masqueraded: false",
            "Local, packet of a pod: the local set",
            "Local, packet of a pod: dropped",
        ] {
            expected.push(format!("{kind:?}, {corner}"));
        }
        for policy in [Policy::Cluster, Policy::Local] {
            for source in ["node", "pod", "outside"] {
                expected.push(format!("{kind:?}, {policy:?}, {source}: refused"));
            }
        }
    }
    for source in ["node", "pod", "outside"] {
        for result in ["dropped", "refused", "the cluster set"] {
            expected.push(format!(
                "LoadBalancerIp, Cluster, ranges, {source}: {result}"
            ));
        }
    }
    let any = [None, Some(true), Some(false)];
    for ready in any {
        for serving in any {
            expected.extend(any.map(|terminating| conditions(ready, serving, terminating)));
        }
    }
    expected
}
