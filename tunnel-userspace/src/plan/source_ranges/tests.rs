use std::net::Ipv4Addr;

use proptest::prelude::*;

use super::*;
use crate::model::{
    ObjectName, Service,
    fixture::{self, ip, ips},
};

fn service(ranges: &[&str], load_balancer_ips: &[&str]) -> Service {
    let mut service = Service::named(ObjectName::new("shop", "web"));
    service.source_ranges = ranges
        .iter()
        .map(|range| {
            let (ip, length) = range.split_once('/').expect("a range");
            (fixture::ip(ip), length.parse().expect("a length"))
        })
        .collect();
    service.load_balancer_ips = ips(load_balancer_ips);
    service
}

fn node_info(primary: &[&str], addresses: &[&str]) -> NodeInfo {
    NodeInfo {
        primary_ips: ips(primary).into_iter().collect(),
        link_addresses: ips(addresses).into_iter().collect(),
        ..NodeInfo::default()
    }
}

fn sources(ranges: &[&str], family: Family) -> Vec<String> {
    let node_info = node_info(&[], &[]);
    let sources = allowed_clients(&service(ranges, &[]), family, &node_info);
    let texts = sources.iter();
    let texts = texts.map(|range| format!("{} {}", range.first, range.last));
    texts.collect()
}

#[test]
fn source_ranges_may_end_at_the_last_address_of_a_family() {
    let v4 = sources(&["255.255.255.255/32", "128.0.0.0/1"], Family::V4);
    assert_eq!(v4, ["128.0.0.0 255.255.255.255"]);
    let v6 = sources(&["ffff::/16", "8000::/1"], Family::V6);
    assert_eq!(v6, ["8000:: ffff:ffff:ffff:ffff:ffff:ffff:ffff:ffff"]);
}

#[test]
fn the_host_connects_from_its_primary_address_or_from_a_local_vip() {
    let service = service(&["10.0.0.0/24"], &["192.0.2.7"]);
    let vip = ip("192.0.2.7");
    let admits = |node_info: &NodeInfo| {
        admits_host(
            &allowed_clients(&service, Family::V4, node_info),
            vip,
            node_info,
        )
    };

    assert_eq!(admits(&node_info(&["10.0.0.1"], &["10.0.0.1"])), Some(true));
    assert_eq!(
        admits(&node_info(&["10.0.1.1"], &["10.0.1.1"])),
        Some(false)
    );
    assert_eq!(
        admits(&node_info(&["10.0.0.1"], &["192.0.2.7"])),
        Some(true)
    );
    assert_eq!(
        admits(&node_info(&["10.0.1.1"], &["192.0.2.7"])),
        Some(false)
    );
    assert_eq!(admits(&node_info(&["fd00::1"], &["10.0.0.1"])), None);
}

fn range_of(ip: u32, length: u8) -> (IpAddr, u8) {
    (Ipv4Addr::from_bits(ip).into(), length)
}

proptest! {
    #[test]
    fn merged_ranges_contain_the_same_addresses(
        // There are only a few different networks, so that some overlap or are adjacent.
        ranges in prop::collection::vec((0..64_u32, 26..=32_u8), 1..12),
        probe in 0..64_u32,
    ) {
        let address_of = |number: u32| 0x0a00_0000 + number * 4;
        let mut service = service(&[], &[]);
        service.source_ranges = ranges.iter().map(|(at, length)| range_of(address_of(*at), *length)).collect();
        let found = allowed_clients(&service, Family::V4, &node_info(&[], &[]));

        prop_assert!(found.is_sorted_by(|one, next| to_bits(one.last) + 1 < to_bits(next.first)));
        for address in address_of(probe)..address_of(probe) + 4 {
            let is_in = ranges.iter().any(|(at, length)| {
                let open = u32::MAX.checked_shr((*length).into()).unwrap_or(0);
                address_of(*at) & !open == address & !open
            });
            let ip = IpAddr::V4(Ipv4Addr::from_bits(address));
            prop_assert_eq!(found.iter().any(|range| contains(range, ip)), is_in, "{}", ip);
        }
    }
}
