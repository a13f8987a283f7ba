//! External IPs and load balancer addresses that are addresses of this node.

use super::*;

/// Returns a Service with an external IP, a load balancer address and a node port.
fn exposed(name: &'static str, last: u8) -> Change<'static> {
    with(set(name, last, &[1]), |service| {
        service.external_ips = vec![ip(last + 2)];
        service.load_balancer_ips = vec![ip(last + 4)];
        service.ports[0].node_port = Some(30_000);
    })
}

/// Returns the address of a VIP.
fn ip(last: u8) -> IpAddr {
    vip(last).address.to_ip()
}

/// Returns which of the external IP, the load balancer address and the node port at each of them are served.
fn served(reconciler: &Reconciler<Memory>) -> [bool; 4] {
    let node_port = |last| FrontendKey {
        port: Port::from_host(30_000),
        ..vip(last)
    };
    let frontends = &reconciler.maps().frontend_keys;
    [vip(3), vip(5), node_port(3), node_port(5)].map(|key| frontends.contains_key(&key))
}

#[test]
fn an_address_of_this_node_is_served_only_if_the_config_says_so() {
    for (node_addresses, at_node) in [(NodeAddresses::Refuse, false), (NodeAddresses::Serve, true)]
    {
        let settings = PlanSettings {
            node_addresses,
            ..settings()
        };
        let mut reconciler = adopt_with(Memory::new(ROOMY), settings);
        apply(&mut reconciler, vec![exposed("web", 1)]);
        assert_eq!(served(&reconciler), [true, true, false, false]);

        reconciler.set_addresses([ip(3), ip(5)].into());
        settle(&mut reconciler);
        assert_eq!(served(&reconciler), [at_node, at_node, true, true]);
        assert!(reconciler.maps().frontend_keys.contains_key(&vip(1)));
        let wanted = (!at_node).then_some(Reason::NodeAddressRefused);
        assert_eq!(problem(&reconciler, "web"), wanted);

        reconciler.set_addresses([ip(5)].into());
        settle(&mut reconciler);
        assert_eq!(served(&reconciler), [true, at_node, false, true]);
        let problem = services(&reconciler, Some("web"))[0].ports[0]
            .problem
            .clone();
        let wanted = format!("{}: {}", Reason::NodeAddressRefused.meaning(), ip(5));
        assert_eq!(problem, (!at_node).then_some(wanted));

        reconciler.set_addresses(BTreeSet::new());
        settle(&mut reconciler);
        assert_eq!(served(&reconciler), [true, true, false, false]);
        assert!(reconciler.warnings(&BTreeSet::new()).is_empty());
    }
}

#[test]
fn a_load_balancer_address_of_this_node_is_refused_only_if_the_node_object_has_it() {
    let settings = PlanSettings {
        node_addresses: NodeAddresses::Refuse,
        ..settings()
    };
    let mut reconciler = adopt_with(Memory::new(ROOMY), settings);
    reconciler.set_addresses([ip(3), ip(5)].into());
    apply(&mut reconciler, vec![exposed("web", 1)]);
    // Without a Node object, all of the node's addresses are refused.
    assert_eq!(served(&reconciler), [false, false, true, true]);

    let mut in_node = |internal: &[u8], other: &[u8]| {
        let node = Node {
            internal_ips: internal.iter().map(|last| ip(*last)).collect(),
            other_ips: other.iter().map(|last| ip(*last)).collect(),
            ..fixture::node("node-a")
        };
        let name = ObjectName::new("", "node-a");
        apply_nodes(&mut reconciler, vec![(name, Some(Arc::new(node)))]);
        settle(&mut reconciler);
        served(&reconciler)
    };
    assert_eq!(in_node(&[9], &[]), [false, true, true, true]);
    assert_eq!(in_node(&[9], &[5]), [false, false, true, true]);
    assert_eq!(in_node(&[5], &[]), [false, false, true, true]);
    assert_eq!(in_node(&[3], &[]), [false, true, true, true]);
    let problem = services(&reconciler, Some("web"))[0].ports[0]
        .problem
        .clone();
    let wanted = format!("{}: {}", Reason::NodeAddressRefused.meaning(), ip(3));
    assert_eq!(problem, Some(wanted));
}

#[test]
fn a_cluster_ip_is_served_even_if_this_node_has_it() {
    let settings = PlanSettings {
        node_addresses: NodeAddresses::Refuse,
        ..settings()
    };
    let mut reconciler = adopt_with(Memory::new(ROOMY), settings);
    let both = with(set("web", 1, &[1]), |service| {
        service.external_ips = vec![ip(1)];
    });
    reconciler.set_addresses([ip(1)].into());
    apply(&mut reconciler, vec![both]);

    assert!(reconciler.maps().frontend_keys.contains_key(&vip(1)));
    assert_eq!(problem(&reconciler, "web"), None);
}
