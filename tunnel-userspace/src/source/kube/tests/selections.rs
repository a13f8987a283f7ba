//! Tests which objects are selected, depending on the configuration.

use super::*;

#[test]
fn owned_external_ips_packets_node_pools_and_steering_select_more_objects() {
    let scope = || KubeScope {
        node: "node-a".to_owned(),
        ..KubeScope::default()
    };
    let (owners, pools) = (true, true);
    let steering = Some(SteeringScope {
        labels: BTreeSet::from(["edge".to_owned()]),
        config_map: ObjectName::new("kube-system", "ports"),
        pods: false,
    });
    let served = Some("!service.kubernetes.io/service-proxy-name");
    let own = Some("metadata.name=node-a");
    // Each case has the expected label selector for Services, the expected field selector for Nodes, and the
    // labels that should be kept on other Nodes.
    for (name, scope, services, nodes, kept) in [
        ("neither", scope(), served, own, vec![ZONE_LABEL]),
        (
            "owners",
            KubeScope {
                owned_external_ips: owners,
                ..scope()
            },
            None,
            None,
            vec![ZONE_LABEL],
        ),
        (
            "packets",
            KubeScope {
                packets: true,
                ..scope()
            },
            None,
            own,
            vec![ZONE_LABEL],
        ),
        (
            "pools",
            KubeScope {
                node_pools: pools,
                ..scope()
            },
            served,
            None,
            vec![NODE_POOL_LABEL, ZONE_LABEL],
        ),
        (
            "steering",
            KubeScope {
                steering,
                ..scope()
            },
            served,
            None,
            vec!["edge", ZONE_LABEL],
        ),
    ] {
        let selections = scope.selections();
        let of = |kind| selections.iter().find(|one| one.kind == kind).expect(name);

        assert_eq!(of(Kind::Service).labels.as_deref(), services, "{name}");
        assert_eq!(
            of(Kind::Service).fields.as_deref(),
            Some("spec.clusterIP!=None")
        );
        assert_eq!(of(Kind::Node).fields.as_deref(), nodes, "{name}");
        assert!(scope.node_filter().labels.iter().eq(&kept), "{name}");
    }
}

#[test]
fn the_pods_of_this_node_are_selected_only_if_the_config_allows_a_namespace() {
    let pods = |pods| {
        let scope = KubeScope {
            node: "node-a".to_owned(),
            steering: Some(SteeringScope {
                labels: BTreeSet::new(),
                config_map: ObjectName::new("kube-system", "ports"),
                pods,
            }),
            ..KubeScope::default()
        };
        let mut selections = scope.selections().into_iter();
        let found = selections.find(|one| one.kind == Kind::Pod);
        found.map(|it| (it.path, it.fields))
    };

    assert_eq!(pods(false), None);
    let field = Some("spec.nodeName=node-a".to_owned());
    assert_eq!(pods(true), Some(("/api/v1/pods".to_owned(), field)));
}
