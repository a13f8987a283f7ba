use std::{
    io,
    sync::{Mutex, MutexGuard, PoisonError},
};

use super::*;
use crate::model::{ServiceState, fixture::ip};

/// The maps in memory, which the test shares with their owner.
#[derive(Clone, Debug, Default)]
struct Memory(Arc<Mutex<Content>>);

#[derive(Debug, Default)]
struct Content {
    values: BTreeMap<Address, u32>,
    ranges: BTreeMap<u32, ServiceRange>,
    /// True if writes are refused.
    is_refusing: bool,
}

impl Memory {
    fn lock(&self) -> MutexGuard<'_, Content> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn writable(&self) -> Result<MutexGuard<'_, Content>, WriteError> {
        let content = self.lock();
        if content.is_refusing {
            return Err(WriteError {
                map: "services",
                source: io::ErrorKind::OutOfMemory.into(),
            });
        }
        Ok(content)
    }

    /// Returns the values as text.
    fn values(&self) -> Vec<String> {
        let content = self.lock();
        let values = content.values.iter().map(|(address, value)| match *value {
            CLUSTER_IP => format!("{address} cluster IP"),
            LEFT_ALONE => format!("{address} left alone"),
            other => format!("{address} {other}"),
        });
        values.collect()
    }

    /// Returns the ranges as text, without the unused ones.
    fn ranges(&self) -> Vec<String> {
        let content = self.lock();
        let used = content
            .ranges
            .values()
            .filter(|range| range.kind != RangeKind::UNUSED);
        let texts = used.map(|range| {
            let SourceRange { first, last } = range.addresses;
            let is_cidr = range.kind == RangeKind::SERVICE_CIDR;
            format!("{first}-{last}{}", if is_cidr { " only" } else { "" })
        });
        texts.collect()
    }
}

impl AddressMaps for Memory {
    fn addresses(&self) -> Result<Vec<(Address, u32)>, ReadError> {
        Ok(self.lock().values.clone().into_iter().collect())
    }

    fn write_addresses(&mut self, values: &[(Address, u32)]) -> Result<(), WriteError> {
        self.writable()?.values.extend(values.iter().copied());
        Ok(())
    }

    fn remove_address(&mut self, address: &Address) -> Result<(), WriteError> {
        self.writable()?.values.remove(address);
        Ok(())
    }

    fn write_range(&mut self, index: u32, range: &ServiceRange) -> Result<(), WriteError> {
        self.writable()?.ranges.insert(index, *range);
        Ok(())
    }
}

fn adopt(maps: &Memory) -> ClusterAddresses {
    ClusterAddresses::adopt(Box::new(maps.clone()), 100).expect("readable")
}

fn name(name: &str) -> ObjectName {
    ObjectName::new("default", name)
}

/// Returns an update with a Service that has these cluster IPs, or that is removed if there are none.
fn service(of: &str, ips: &[&str], is_of_other_proxy: bool) -> ClusterUpdate {
    let service = Service {
        cluster_ips: ips.iter().copied().map(ip).collect(),
        is_of_other_proxy,
        ..Service::named(name(of))
    };
    let state = ServiceState {
        service: Arc::new(service),
        slices: Vec::new(),
    };
    ClusterUpdate {
        services: vec![(name(of), (!ips.is_empty()).then_some(state))],
        complete: true,
        ..ClusterUpdate::default()
    }
}

/// Returns an update with a ServiceCIDR, or one that is removed.
fn cidr(range: Option<(&str, u8)>) -> ClusterUpdate {
    let cidr = range.map(|(network, length)| {
        Arc::new(ServiceCidr {
            name: name("cidr"),
            cidrs: vec![(ip(network), length)],
        })
    });
    ClusterUpdate {
        service_cidrs: vec![(name("cidr"), cidr)],
        complete: true,
        ..ClusterUpdate::default()
    }
}

#[test]
fn cluster_ips_are_written_as_long_as_a_service_has_them() {
    let maps = Memory::default();
    let mut addresses = adopt(&maps);
    addresses.update(&service("web", &["10.96.0.1", "fd00::1"], false));
    addresses.update(&service("dns", &["10.96.0.10"], false));
    addresses.update(&service("other", &["10.96.0.20"], true));
    addresses.sync();
    assert_eq!(
        maps.values(),
        [
            "10.96.0.1 cluster IP",
            "10.96.0.10 cluster IP",
            "10.96.0.20 left alone",
            "fd00::1 cluster IP"
        ]
    );
    assert_eq!(maps.ranges(), ["fd00::1-fd00::1", "10.96.0.1-10.96.0.20"]);

    addresses.update(&service("web", &["10.96.0.2"], false));
    addresses.update(&service("dns", &[], false));
    addresses.update(&service("other", &["10.96.0.20"], false));
    addresses.sync();
    assert_eq!(
        maps.values(),
        ["10.96.0.2 cluster IP", "10.96.0.20 cluster IP"]
    );
    assert_eq!(maps.ranges(), ["10.96.0.2-10.96.0.20"]);

    addresses.update(&service("web", &[], false));
    addresses.update(&service("other", &[], false));
    addresses.sync();
    assert_eq!(maps.values(), [""; 0]);
    assert_eq!(maps.ranges(), [""; 0]);
    assert!(addresses.entries.is_empty());
}

#[test]
fn addresses_of_this_node_in_a_service_cidr_are_left_alone() {
    let maps = Memory::default();
    let mut addresses = adopt(&maps);
    addresses.update(&service("dns", &["10.96.0.10"], false));
    let own = ["10.96.0.10", "10.96.0.11", "192.0.2.1"].map(ip);
    addresses.set_own_addresses(Arc::new(own.into()));
    addresses.sync();
    assert_eq!(maps.values(), ["10.96.0.10 left alone"]);

    addresses.update(&cidr(Some(("10.96.0.0", 24))));
    addresses.sync();
    assert_eq!(
        maps.values(),
        ["10.96.0.10 left alone", "10.96.0.11 left alone"]
    );
    assert_eq!(maps.ranges(), ["10.96.0.0-10.96.0.255 only"]);

    addresses.set_own_addresses(Arc::new([ip("192.0.2.1")].into()));
    addresses.sync();
    assert_eq!(maps.values(), ["10.96.0.10 cluster IP"]);

    addresses.update(&cidr(None));
    addresses.sync();
    assert_eq!(maps.ranges(), ["10.96.0.10-10.96.0.10"]);
}

#[test]
fn a_new_process_removes_what_is_left_and_a_failed_write_is_repeated() {
    let maps = Memory::default();
    let mut first = adopt(&maps);
    first.update(&service("web", &["10.96.0.1"], false));
    first.update(&service("gone", &["10.96.0.2"], false));
    first.sync();

    let mut second = adopt(&maps);
    second.update(&service("web", &["10.96.0.1"], false));
    second.update(&service("new", &["10.96.0.3"], false));
    maps.lock().is_refusing = true;
    second.sync();
    assert!(second.is_incomplete());
    maps.lock().is_refusing = false;
    second.sync();
    assert!(!second.is_incomplete());
    let expected = ["10.96.0.1 cluster IP", "10.96.0.3 cluster IP"];
    assert_eq!(maps.values(), expected);

    assert!(!second.audit());
    maps.lock().values.clear();
    assert!(second.audit());
    second.sync();
    assert_eq!(maps.values(), expected);
}

#[test]
fn nothing_is_dropped_without_knowledge_of_all_objects_and_no_address_is_forgotten() {
    let maps = Memory::default();
    let mut first = adopt(&maps);
    first.update(&service("other", &["10.96.0.1"], true));
    first.update(&cidr(Some(("10.96.0.0", 24))));
    first.sync();
    assert_eq!(maps.ranges(), ["10.96.0.0-10.96.0.255 only"]);

    // Its source does not know the Service yet.
    let mut second = adopt(&maps);
    second.update(&ClusterUpdate {
        complete: false,
        ..cidr(Some(("10.96.0.0", 24)))
    });
    second.sync();
    assert_eq!(maps.ranges(), ["10.96.0.0-10.96.0.255"]);
    assert_eq!(maps.values(), ["10.96.0.1 left alone"]);

    second.update(&cidr(Some(("10.96.0.0", 24))));
    second.sync();
    assert_eq!(maps.ranges(), ["10.96.0.0-10.96.0.255 only"]);
    assert_eq!(maps.values(), [""; 0]);
}

#[test]
fn addresses_that_must_be_left_alone_come_first_and_nothing_is_dropped_without_room_for_them() {
    let maps = Memory::default();
    let mut addresses = ClusterAddresses::adopt(Box::new(maps.clone()), 2).expect("readable");
    addresses.update(&cidr(Some(("10.96.0.0", 24))));
    addresses.update(&service("web", &["10.96.0.1"], false));
    addresses.update(&service("other", &["10.96.0.2"], true));
    addresses.set_own_addresses(Arc::new([ip("10.96.0.3")].into()));
    addresses.sync();
    let left_alone = ["10.96.0.2 left alone", "10.96.0.3 left alone"];
    assert_eq!(maps.values(), left_alone);
    assert_eq!(maps.ranges(), ["10.96.0.0-10.96.0.255 only"]);

    addresses.update(&service("more", &["10.96.0.4"], true));
    addresses.sync();
    assert_eq!(maps.values(), left_alone);
    assert_eq!(maps.ranges(), ["10.96.0.0-10.96.0.255"]);

    addresses.update(&service("other", &[], false));
    addresses.sync();
    addresses.sync();
    assert_eq!(
        maps.values(),
        ["10.96.0.3 left alone", "10.96.0.4 left alone"]
    );
    assert_eq!(maps.ranges(), ["10.96.0.0-10.96.0.255 only"]);
}

#[test]
fn implausible_and_surplus_service_cidrs_are_ignored() {
    let maps = Memory::default();
    let mut addresses = adopt(&maps);
    addresses.update(&cidr(Some(("0.0.0.0", 0))));
    addresses.sync();
    assert_eq!(maps.ranges(), [""; 0]);

    for number in 0..20 {
        let network = format!("10.{number}.0.0");
        let mut update = cidr(Some((&network, 16)));
        update.service_cidrs[0].0 = name(&network);
        addresses.update(&update);
    }
    addresses.update(&service("web", &["10.200.0.1", "fd00::1"], false));
    addresses.sync();
    assert_eq!(maps.ranges().len(), 16);
    assert_eq!(
        maps.ranges()[..2],
        ["fd00::1-fd00::1", "10.200.0.1-10.200.0.1"]
    );
}

#[test]
fn no_more_addresses_are_written_than_there_is_room_for() {
    let maps = Memory::default();
    let mut addresses = ClusterAddresses::adopt(Box::new(maps.clone()), 2).expect("readable");
    for last in 1..5 {
        let ip = format!("10.96.0.{last}");
        addresses.update(&service(&ip, &[&ip], false));
    }
    addresses.sync();
    assert_eq!(maps.values().len(), 2);
}
