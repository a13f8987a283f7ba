//! Edge nodes that claim the addresses of others.

use super::{super::held_addresses::RESERVATION, *};
use crate::model::{LinkNetwork, Service, ServiceState};

/// Returns the names of the Nodes to which each address is steered, once for all of their ports.
fn owners(steering: &SteeringReconciler<Memory>) -> Vec<String> {
    let targets = steering.targets.borrow();
    let kubelets = targets.values().filter(|target| target.port == 10_250);
    let describe = |target: &crate::model::SteeringTarget| {
        let owner = if target.is_disputed {
            "nobody"
        } else {
            &*target.node
        };
        format!("{} {owner}", target.address)
    };
    kubelets.map(describe).collect()
}

/// Returns a reconciler for the maps and the holders that `steering` leaves behind.
fn restart(steering: SteeringReconciler<Memory>, now: Duration) -> SteeringReconciler<Memory> {
    let holders = AddressHolders::clone(&steering.holders().borrow());
    let mut next = adopt(steering.maps, 16, now);
    next.restore_holders(SavedHolders {
        holders,
        problem: None,
    });
    next
}

fn thief() -> NodeChange {
    node("0", &[&address_of("a")])
}

#[test]
fn a_node_keeps_its_address_when_another_claims_it_also_after_a_restart() {
    let mut steering = steering_with(16, ["a"]);
    apply(&mut steering, vec![thief()], NOW);
    assert_eq!(owners(&steering), ["10.0.0.1 a"]);
    let index = steering.keys.clone();

    let mut steering = restart(steering, NOW);
    let both = [nodes(["a"]), vec![thief()]].concat();
    apply(&mut steering, both, NOW);

    assert_eq!(owners(&steering), ["10.0.0.1 a"]);
    assert_eq!(steering.keys, index);
    let noted: Vec<_> = steering.warnings_about("a");
    assert_eq!(noted.len(), 1, "the victim's Event");
    assert_eq!(
        steering.warnings_about("0").len(),
        1,
        "the attacker's Event"
    );
}

#[test]
fn holders_that_cannot_be_read_are_shown() {
    let mut steering = adopt(Memory::default(), 16, NOW);
    steering.restore_holders(SavedHolders {
        holders: AddressHolders::new(),
        problem: Some("the file is damaged".to_owned()),
    });
    apply(&mut steering, nodes(["a"]), NOW);

    let view = steering.view();

    assert!(view.unconfirmed[0].starts_with("node-addresses.json: the file is damaged; "));
    assert_eq!(view.problems, Vec::<String>::new());
}

#[test]
fn nobody_gets_an_address_that_two_nodes_have_in_the_first_list() {
    let mut steering = adopt(Memory::default(), 16, NOW);
    let both = [nodes(["a"]), vec![thief()]].concat();
    apply(&mut steering, both, NOW);
    assert_eq!(owners(&steering), ["10.0.0.1 nobody"]);
    assert_eq!(steering.reason_counts[&Reason::AddressDisputed], 2);

    // The address belongs to the one that remains.
    apply(&mut steering, vec![removed("0")], NOW);
    assert_eq!(owners(&steering), ["10.0.0.1 a"]);
    apply(&mut steering, vec![thief()], NOW);
    assert_eq!(owners(&steering), ["10.0.0.1 a"]);
}

#[test]
fn a_node_that_is_deleted_and_created_again_keeps_its_address() {
    let mut steering = steering_with(16, ["a"]);
    apply(&mut steering, vec![removed("a")], NOW);
    apply(&mut steering, vec![thief()], NOW);
    assert_eq!(owners(&steering), ["10.0.0.1 nobody"]);
    assert!(
        steering.is_incomplete(),
        "waits for the end of the reservation"
    );

    apply(&mut steering, nodes(["a"]), NOW + RESERVATION / 2);

    assert_eq!(owners(&steering), ["10.0.0.1 a"]);
    assert!(!steering.is_incomplete());
}

#[test]
fn an_address_of_a_deleted_node_is_free_after_its_reservation_and_not_while_a_node_may_be_missing()
{
    let mut steering = steering_with(16, ["a"]);
    apply_incomplete(&mut steering, vec![removed("a"), thief()]);
    steering.sync(NOW + RESERVATION * 2);
    assert_eq!(owners(&steering), ["10.0.0.1 nobody"]);

    // An invalid object of another kind makes no difference.
    let mut steering = restart(steering, NOW);
    steering.update(&ClusterUpdate {
        complete: false,
        ..update(vec![thief()])
    });
    steering.sync(NOW);
    steering.sync(NOW + RESERVATION - Duration::from_secs(1));
    assert_eq!(owners(&steering), ["10.0.0.1 nobody"]);
    steering.sync(NOW + RESERVATION);
    assert_eq!(owners(&steering), ["10.0.0.1 0"]);
}

#[test]
fn an_address_that_a_node_no_longer_lists_is_kept_for_it_for_some_time() {
    let mut steering = steering_with(16, ["a"]);
    apply(&mut steering, vec![thief()], NOW);

    // The kubelet registers again.
    apply(&mut steering, vec![node("a", &[])], NOW);
    assert_eq!(owners(&steering), ["10.0.0.1 nobody"]);
    let warned = ["a", "0"].map(|node| steering.warnings_about(node).len());
    assert_eq!(
        warned,
        [2, 1],
        "the Nodes' Events, and that `a` has no address"
    );
    apply(&mut steering, nodes(["a"]), NOW + RESERVATION / 2);
    assert_eq!(owners(&steering), ["10.0.0.1 a"]);

    // The time starts again.
    let moved = NOW + RESERVATION;
    apply(&mut steering, vec![node("a", &["10.0.0.9"])], moved);
    assert_eq!(owners(&steering), ["10.0.0.1 nobody", "10.0.0.9 a"]);
    steering.sync(moved + RESERVATION - Duration::from_secs(1));
    assert_eq!(owners(&steering), ["10.0.0.1 nobody", "10.0.0.9 a"]);
    steering.sync(moved + RESERVATION);
    assert_eq!(owners(&steering), ["10.0.0.1 0", "10.0.0.9 a"]);
    assert_eq!(steering.holders().borrow().len(), 2);
}

#[test]
fn a_node_that_changes_its_address_all_the_time_holds_few() {
    let mut steering = steering_with(16, ["a", "b"]);
    for last in 10..60 {
        let changed = node("b", &[&format!("10.0.0.{last}")]);
        apply(&mut steering, vec![changed], NOW);
    }

    let holders = steering.holders();
    let holders = holders.borrow();
    let of_b = holders.values().filter(|holder| &***holder == "b");
    assert_eq!(of_b.count(), 9, "its address, and eight earlier ones");
    assert_eq!(&*holders[&fixture::ip(&address_of("b"))], "b");
}

#[test]
fn changes_of_services_own_addresses_and_networks_free_and_refuse_addresses() {
    let mut steering = steering_with(16, ["a"]);
    let address = fixture::ip(&address_of("a"));
    let expect = |steering: &mut SteeringReconciler<Memory>, wanted: usize, claim: &str| {
        assert!(steering.has_changed(), "{claim}");
        steering.sync(NOW);
        assert_eq!(owners(steering).len(), wanted, "{claim}");
    };
    let service = |state| ClusterUpdate {
        services: vec![(ObjectName::new("shop", "web"), state)],
        ..update(Vec::new())
    };
    let taken = Service {
        cluster_ips: vec![address],
        ..Service::named(ObjectName::new("shop", "web"))
    };
    let taken = ServiceState {
        service: Arc::new(taken),
        slices: Vec::new(),
    };
    steering.update(&service(Some(taken)));
    expect(&mut steering, 0, "a cluster IP");
    steering.update(&service(None));
    expect(&mut steering, 1, "no cluster IP");

    steering.set_own_addresses(Arc::new([address].into()));
    expect(&mut steering, 0, "an address of this node");
    steering.set_own_addresses(Arc::default());
    expect(&mut steering, 1, "no address of this node");

    let mut networks = LinkNetworks::default();
    networks.insert(LinkNetwork {
        address,
        length: 32,
        link: "veth1".to_owned(),
        leads_to_pods: true,
    });
    steering.set_networks(&Arc::new(networks.clone()));
    expect(&mut steering, 0, "a pod's address");
    networks.insert(LinkNetwork {
        address: fixture::ip("10.9.9.9"),
        length: 32,
        link: "veth2".to_owned(),
        leads_to_pods: true,
    });
    steering.set_networks(&Arc::new(networks));
    assert!(!steering.has_changed(), "another pod's address");
}

impl SteeringReconciler<Memory> {
    /// Returns the texts of the problems with a Node.
    fn warnings_about(&self, node: &str) -> Vec<&str> {
        let problems = self.known_problems.iter();
        let of_node = problems.filter(|problem| {
            let name = problem.node.as_ref().map(|name| &*name.name);
            name == Some(node)
        });
        of_node.map(|problem| &*problem.text).collect()
    }
}

#[test]
fn a_node_that_changes_its_address_all_the_time_leaves_indices_to_others() {
    let mut steering = steering_with(256, ["a"]);
    for number in 0..600_u16 {
        let [upper, lower] = number.to_be_bytes();
        let changed = node("hostile", &[&format!("10.1.{upper}.{lower}")]);
        apply(&mut steering, vec![changed], NOW);
    }
    assert!(steering.is_incomplete());
    let view = steering.view();
    assert_eq!(view.unprogrammed, 0, "the daemon stays ready");
    assert_eq!(steering.warnings_about("hostile").len(), 1);

    let honest = ["b", "c", "d", "e", "f"];
    apply(&mut steering, nodes(honest), NOW);
    let steered = owners(&steering);
    for name in honest {
        assert!(steered.contains(&format!("{} {name}", address_of(name))));
    }

    // The indices have waited long enough.
    steering.sync(NOW + QUARANTINE + Duration::from_secs(1));
    assert_eq!(steering.warnings_about("hostile"), Vec::<&str>::new());
    let last = "10.1.2.87 hostile".to_owned();
    assert!(owners(&steering).contains(&last), "{:?}", owners(&steering));
}
