//! Tests of the selected objects, by configuration.

use super::*;

#[test]
fn more_is_read_where_it_matters_who_has_an_address_or_where_a_node_is() {
    let scope = || Scope {
        node: "node-a".to_owned(),
        ..Scope::default()
    };
    let (owners, pools) = (true, true);
    let steering = Some(Steering {
        labels: BTreeSet::from(["edge".to_owned()]),
        config_map: ObjectName::new("kube-system", "ports"),
    });
    let served = Some("!service.kubernetes.io/service-proxy-name");
    let own = Some("metadata.name=node-a");
    // The expected label selector of Services, field selector of Nodes, and kept labels of other Nodes.
    for (what, scope, services, nodes, kept) in [
        ("neither", scope(), served, own, vec![ZONE]),
        (
            "owners",
            Scope { owners, ..scope() },
            None,
            None,
            vec![ZONE],
        ),
        (
            "pools",
            Scope { pools, ..scope() },
            served,
            None,
            vec![NODE_POOL, ZONE],
        ),
        (
            "steering",
            Scope {
                steering,
                ..scope()
            },
            served,
            None,
            vec!["edge", ZONE],
        ),
    ] {
        let selections = scope.selections();
        let of = |kind| selections.iter().find(|one| one.kind == kind).expect(what);

        assert_eq!(of(Kind::Service).labels.as_deref(), services, "{what}");
        assert_eq!(
            of(Kind::Service).fields.as_deref(),
            Some("spec.clusterIP!=None")
        );
        assert_eq!(of(Kind::Node).fields.as_deref(), nodes, "{what}");
        assert!(scope.node_filter().labels.iter().eq(&kept), "{what}");
    }
}
