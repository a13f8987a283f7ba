//! Contract 5 and the rule for `nodePortAddresses`.

use serde_json::{Value, json};

use super::{Given, endpoint, slice, web};
use crate::reference::{Entry, Kind, NodePortAddresses, Source, address::Cidr, fronts};

const ALL_V4: [&str; 4] = ["127.0.0.1", "172.17.0.1", "192.168.0.1", "192.168.9.1"];
const ALL_V6: [&str; 3] = ["::1", "fd00::1", "fd17::1"];

fn given(setting: NodePortAddresses) -> Given {
    let spec: Value = json!({
        "type": "NodePort",
        "clusterIPs": ["10.96.0.1", "fd96::1"],
        "ports": [{"port": 80, "nodePort": 30080}],
    });
    let mut given = Given::new(&[web(spec)], &[slice(&[endpoint("10.0.0.1", "there")])]);
    given.here.node_port_addresses = setting;
    given
}

/// The addresses that serve the node port.
fn served(given: &Given) -> Vec<String> {
    let fronts = fronts(&given.cluster, &given.here);
    let node_ports = fronts.values().filter(|front| front.kind == Kind::NodePort);
    node_ports.map(|front| front.address.to_string()).collect()
}

fn listed(entries: &[Entry]) -> Vec<String> {
    served(&given(NodePortAddresses::List(entries.to_vec())))
}

fn range(text: &str) -> Entry {
    Entry::Cidr(Cidr::parse(text).unwrap())
}

#[test]
fn absent_setting_serves_the_primary_addresses_and_loopback() {
    let served = served(&given(NodePortAddresses::Absent));
    assert_eq!(served, ["127.0.0.1", "192.168.0.1", "::1", "fd00::1"]);
}

#[test]
fn absent_setting_serves_loopback_where_the_node_has_no_primary_address() {
    let mut given = given(NodePortAddresses::Absent);
    given.cluster.nodes.clear();
    assert_eq!(served(&given), ["127.0.0.1", "::1"]);
}

#[test]
fn empty_list_and_the_word_all_serve_every_local_address_and_loopback() {
    let all = [&ALL_V4[..], &ALL_V6].concat();
    assert_eq!(served(&given(NodePortAddresses::All)), all);
    assert_eq!(listed(&[Entry::All]), all);
    assert_eq!(listed(&[Entry::Primary, Entry::All]), all);
}

#[test]
fn primary_is_the_first_internal_ip_of_each_family_in_the_node_object() {
    assert_eq!(listed(&[Entry::Primary]), ["192.168.0.1", "fd00::1"]);
}

#[test]
fn localhost_is_loopback_of_both_families() {
    assert_eq!(listed(&[Entry::Localhost]), ["127.0.0.1", "::1"]);
}

#[test]
fn ranges_select_addresses_of_their_family() {
    let entries = [range("172.16.0.0/12"), range("fd17::/16")];
    assert_eq!(listed(&entries), ["172.17.0.1", "fd17::1"]);
}

#[test]
fn family_without_an_entry_is_served_at_all_its_addresses() {
    assert_eq!(
        listed(&[range("172.16.0.0/12")]),
        [&["172.17.0.1"][..], &ALL_V6].concat()
    );
    assert_eq!(
        listed(&[range("fd17::/16")]),
        [&ALL_V4[..], &["fd17::1"]].concat()
    );
}

#[test]
fn family_whose_ranges_hold_no_address_of_the_node_is_not_served() {
    let entries = [range("198.51.100.0/24"), range("2001:db8::/32")];
    assert!(listed(&entries).is_empty());
}

#[test]
fn loopback_is_served_for_a_range_that_contains_it() {
    for text in ["127.0.0.0/8", "127.0.0.1/32"] {
        let entries = [range(text), range("fd17::/16")];
        assert_eq!(listed(&entries), ["127.0.0.1", "fd17::1"], "{text}");
    }
    assert_eq!(
        listed(&[range("0.0.0.0/0"), range("::1/128")]),
        [&ALL_V4[..], &["::1"]].concat()
    );
}

#[test]
fn entries_of_all_kinds_add_up() {
    let entries = [Entry::Primary, Entry::Localhost, range("172.16.0.0/12")];
    let expected = ["127.0.0.1", "172.17.0.1", "192.168.0.1", "::1", "fd00::1"];
    assert_eq!(listed(&entries), expected);
}

#[test]
fn address_of_another_node_is_never_served() {
    assert!(!served(&given(NodePortAddresses::All)).contains(&"192.168.0.2".to_owned()));
}

#[test]
fn primary_address_that_no_interface_holds_is_not_served() {
    let mut given = given(NodePortAddresses::Absent);
    let primary = super::ip("192.168.0.1");
    given
        .here
        .addresses
        .retain(|(_, address)| *address != primary);
    assert_eq!(served(&given), ["127.0.0.1", "::1", "fd00::1"]);
}

#[test]
fn new_address_is_served_as_soon_as_it_is_there() {
    let mut given = given(NodePortAddresses::List(vec![
        range("10.8.0.0/16"),
        Entry::Localhost,
    ]));
    assert_eq!(served(&given), ["127.0.0.1", "::1"]);
    given.here.addresses.push((false, super::ip("10.8.3.4")));
    assert_eq!(served(&given), ["10.8.3.4", "127.0.0.1", "::1"]);
}

#[test]
fn loopback_is_the_nodes_own() {
    let given = given(NodePortAddresses::Absent);
    let at = "127.0.0.1:30080";
    assert_eq!(
        given.all_meet(at),
        ["10.0.0.1:8080", "untouched", "untouched"]
    );
    assert_eq!(given.meets(&Source::NodeSocket, "[::1]:30080"), "refused");
}
