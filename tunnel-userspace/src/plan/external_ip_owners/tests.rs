use super::*;
use crate::model::fixture::{self, ips};

const PAIRS: [(&str, &str); 2] = [
    ("198.51.100.1", "198.51.100.2"),
    ("2001:db8::1", "2001:db8::2"),
];

fn name(name: &str) -> ObjectName {
    ObjectName::new("default", name)
}

/// Returns a Service with external IPs and load balancer addresses. Nodes translate the load balancer
/// addresses in `served`, but not those in `unserved`.
fn service(external: &[&str], served: &[&str], unserved: &[&str]) -> Service {
    Service {
        external_ips: ips(external),
        load_balancer_ips: ips(served),
        unserved_ips: ips(unserved),
        ..Service::named(name("any"))
    }
}

fn node(internal: &[&str], other: &[&str]) -> Node {
    Node {
        internal_ips: ips(internal),
        other_ips: ips(other),
        ..fixture::node("node-a")
    }
}

fn changed(owners: &mut ExternalIpOwners) -> Vec<String> {
    let services = owners.take_changed_services().into_iter();
    services.map(|name| name.name.to_string()).collect()
}

#[test]
fn an_external_ip_is_served_while_a_load_balancer_or_a_node_owns_it() {
    for (address, other) in PAIRS {
        let wanting = service(&[address], &[], &[]);
        let of_service = |owners: &mut ExternalIpOwners, service: &Service| {
            owners.set_service(&name("owner"), Some(service));
        };
        let of_node = |owners: &mut ExternalIpOwners, node: &Node| {
            owners.set_node(&ObjectName::new("", "node-a"), Some(node));
        };
        let mut owners = ExternalIpOwners::new(ExternalIps::Owned);
        owners.set_service(&name("web"), Some(&wanting));
        let served = |owners: &ExternalIpOwners| owners.unowned_ips(&wanting).next().is_none();
        assert!(!served(&owners));

        of_service(&mut owners, &service(&[], &[address], &[]));
        assert!(served(&owners) && changed(&mut owners) == ["web"]);
        of_service(&mut owners, &service(&[], &[other], &[]));
        assert!(!served(&owners) && changed(&mut owners) == ["web"]);
        of_service(&mut owners, &service(&[], &[], &[address]));
        assert!(served(&owners) && changed(&mut owners) == ["web"]);
        owners.set_service(&name("owner"), None);
        assert!(!served(&owners) && changed(&mut owners) == ["web"]);

        of_node(&mut owners, &node(&[address], &[]));
        assert!(served(&owners) && changed(&mut owners) == ["web"]);
        of_node(&mut owners, &node(&[other], &[address]));
        assert!(served(&owners) && changed(&mut owners).is_empty());
        owners.set_node(&ObjectName::new("", "node-a"), None);
        assert!(!served(&owners) && changed(&mut owners) == ["web"]);
    }
}

#[test]
fn an_address_of_two_owners_is_owned_until_both_give_it_up() {
    for (address, _) in PAIRS {
        let wanting = service(&[address], &[], &[]);
        let owner = service(&[], &[address], &[address]);
        let mut owners = ExternalIpOwners::new(ExternalIps::Owned);
        owners.set_service(&name("web"), Some(&wanting));
        owners.set_service(&name("one"), Some(&owner));
        owners.set_service(&name("two"), Some(&owner));
        owners.set_service(&name("two"), Some(&owner));
        assert_eq!(changed(&mut owners), ["web"]);

        owners.set_service(&name("one"), None);
        assert!(changed(&mut owners).is_empty());
        assert_eq!(owners.unowned_ips(&wanting).count(), 0);

        owners.set_service(&name("two"), None);
        assert_eq!(changed(&mut owners), ["web"]);
        assert_eq!(owners.unowned_ips(&wanting).count(), 1);
        assert!(owners.owned.by_address.is_empty() && owners.owned.by_object.is_empty());
    }
}

#[test]
fn only_services_with_an_affected_external_ip_are_returned() {
    for (address, other) in PAIRS {
        let mut owners = ExternalIpOwners::new(ExternalIps::Owned);
        owners.set_service(&name("one"), Some(&service(&[address], &[], &[])));
        owners.set_service(&name("two"), Some(&service(&[address, other], &[], &[])));
        owners.set_service(&name("three"), Some(&service(&[other], &[], &[])));
        let owner = service(&[], &[address], &[]);

        owners.set_service(&name("owner"), Some(&owner));
        assert_eq!(changed(&mut owners), ["one", "two"]);

        owners.set_service(&name("two"), Some(&service(&[other], &[], &[])));
        owners.set_service(&name("owner"), None);
        assert_eq!(changed(&mut owners), ["one"]);

        owners.set_service(&name("owner"), Some(&owner));
        owners.set_service(&name("owner"), None);
        assert!(changed(&mut owners).is_empty(), "the address changed back");

        for deleted in ["one", "two", "three"] {
            owners.set_service(&name(deleted), None);
        }
        assert!(
            owners.external_ips.by_object.is_empty() && owners.external_ips.by_address.is_empty()
        );
    }
}
