//! Tests the guard on real uplinks, attached by a tcx link (if the kernel supports tcx) or as a tc filter.

pub(crate) mod daemon;

use std::{collections::BTreeMap, io::ErrorKind, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_common::{addr::Address, reason::Reason, steering::Prefix};
use tunnel_tests::{
    feature::{self, Feature},
    node::Node,
    test_name,
};
use tunnel_userspace::{
    bpf::{
        self, Counters, DataPath, Features, Guard, LeftPins, PacketSettings, PinDirectory,
        ProgramSettings,
    },
    net::UplinkGuard as _,
    reconcile::MapSizes,
};

use crate::support::{ensure_eq, run};

/// The index and name of the host's uplink.
pub(crate) const UPLINK: (u32, &str) = (2, "uplink");

const SIZES: MapSizes = MapSizes::uniform(16);

/// Loads the guard for 198.19.0.0/16. It will be attached by a tcx link if `tcx` is true, or else as a tc
/// filter.
fn load_with_tcx(pins: &PinDirectory, tcx: bool) -> Result<(Guard, Counters)> {
    let features = bpf::probe()?;
    load(pins, Features { tcx, ..features })
}

/// Loads the guard for 198.19.0.0/16, as for a kernel with the given features.
pub(crate) fn load(pins: &PinDirectory, features: Features) -> Result<(Guard, Counters)> {
    let data_path = load_data_path(pins, features, None)?;
    let (_maps, counters) = data_path.open_maps()?;
    Ok((data_path.guard()?, counters))
}

/// Loads all programs, with the prefix 198.19.0.0/16.
pub(crate) fn load_data_path(
    pins: &PinDirectory,
    features: Features,
    packets: Option<PacketSettings>,
) -> Result<DataPath> {
    let network = Address::from_ip("198.19.0.0".parse()?);
    let settings = ProgramSettings {
        packets,
        own_mark: 0,
        prefixes: vec![Prefix::new(network, 16).context("198.19.0.0/16 is no prefix")?],
    };
    let loaded = DataPath::load(pins, SIZES, features, &settings, Duration::ZERO);
    Ok(loaded?)
}

pub(crate) fn uplinks() -> BTreeMap<u32, String> {
    BTreeMap::from([(UPLINK.0, UPLINK.1.to_owned())])
}

/// Returns how many guard filters the uplink has.
pub(crate) fn filters(node: &Node) -> Result<usize> {
    let filters = run(node.host(), "tc filter show dev uplink ingress")?;
    Ok(filters.matches("guard direct-action").count())
}

fn dropped(counters: &Counters) -> Result<u64> {
    let counts = counters.read()?;
    let guarded = counts.iter().find(|(it, _)| *it == Reason::GuardDropped);
    Ok(guarded.map_or(0, |(_, count)| *count))
}

/// Connects from outside to an address in the guarded range, which is local to the host. Returns the kind of
/// error.
fn probe_from_outside(node: &Node) -> ErrorKind {
    let connected = node.outside().connect("198.19.0.1:10270");
    connected.map_or_else(|error| error.kind(), |_| ErrorKind::Other)
}

/// Creates a node with a local route for 198.19.0.0/16, and returns the node and its pin directory.
fn node_with_local_range() -> Result<(Node, PinDirectory)> {
    let node = Node::new()?;
    node.host().ip("route add local 198.19.0.0/16 dev lo\n")?;
    let pins = PinDirectory::lock(&node.bpffs())?;
    Ok((node, pins))
}

/// Creates a node with a local route for 198.19.0.0/16, and attaches the guard to its uplink.
fn guarded_node(tcx: bool) -> Result<(Node, PinDirectory, Guard)> {
    let (node, pins) = node_with_local_range()?;
    let (mut guard, _counters) = load_with_tcx(&pins, tcx)?;
    node.host()
        .in_network(|| Ok(guard.guard_uplinks(&uplinks(), false)?))?;
    Ok((node, pins, guard))
}

#[test]
fn a_guard_by_link_drops_outsiders_is_replaced_and_is_removed_by_cleanup() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Tcx])? {
        return Ok(());
    }
    expect_outsiders_dropped(true)
}

#[test]
fn a_guard_by_filter_drops_outsiders_is_replaced_and_is_removed_by_cleanup() -> Result<()> {
    expect_outsiders_dropped(false)
}

fn expect_outsiders_dropped(tcx: bool) -> Result<()> {
    let (node, pins) = node_with_local_range()?;
    ensure!(
        probe_from_outside(&node) == ErrorKind::ConnectionRefused,
        "an outsider should reach the host while there is no guard"
    );
    // In the second round, the new guard replaces the first one.
    for _ in 0..2 {
        let (mut guard, counters) = load_with_tcx(&pins, tcx)?;
        node.host()
            .in_network(|| Ok(guard.guard_uplinks(&uplinks(), false)?))?;
        drop(guard);
        let before = dropped(&counters)?;
        ensure!(
            probe_from_outside(&node) == ErrorKind::TimedOut,
            "an outsider passes the guard, tcx {tcx}"
        );
        ensure!(
            dropped(&counters)? > before,
            "the dropped packet isn't counted, tcx {tcx}"
        );
    }
    ensure_eq("filters", filters(&node)?, usize::from(!tcx))
        .with_context(|| format!("tcx {tcx}"))?;

    let left = node.host().in_network(|| Ok(pins.remove()?))?;

    ensure!(left == LeftPins::default(), "{left:?}");
    ensure!(
        probe_from_outside(&node) == ErrorKind::ConnectionRefused,
        "packets are still dropped after the cleanup, tcx {tcx}"
    );
    Ok(())
}

#[test]
fn a_filter_that_was_removed_is_attached_again() -> Result<()> {
    let (node, _pins, mut guard) = guarded_node(false)?;
    run(node.host(), "tc qdisc del dev uplink clsact")?;
    ensure!(
        probe_from_outside(&node) == ErrorKind::ConnectionRefused,
        "packets are dropped without a filter"
    );

    node.host()
        .in_network(|| Ok(guard.guard_uplinks(&uplinks(), true)?))?;

    ensure!(
        probe_from_outside(&node) == ErrorKind::TimedOut,
        "an outsider passes the re-attached guard"
    );
    Ok(())
}

#[test]
fn a_guard_by_link_is_detached_once_its_device_is_no_uplink() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Tcx])? {
        return Ok(());
    }
    expect_detached(true)
}

#[test]
fn a_guard_by_filter_is_detached_once_its_device_is_no_uplink() -> Result<()> {
    expect_detached(false)
}

fn expect_detached(tcx: bool) -> Result<()> {
    let (node, _pins, mut guard) = guarded_node(tcx)?;
    node.host().in_network(|| {
        guard.guard_uplinks(&BTreeMap::new(), false)?;
        Ok(guard.remove_unused(&BTreeMap::new())?)
    })?;

    ensure!(
        probe_from_outside(&node) == ErrorKind::ConnectionRefused,
        "tcx {tcx}"
    );
    ensure!(guard.guarded_links().is_empty(), "tcx {tcx}");
    Ok(())
}

#[test]
fn the_record_of_a_filter_is_removed_after_its_device() -> Result<()> {
    let node = Node::new()?;
    let pins = PinDirectory::lock(&node.bpffs())?;
    let (mut guard, _counters) = load_with_tcx(&pins, false)?;
    let host = node.host();
    run(
        host,
        "ip link add second index 77 type veth peer name other",
    )?;
    let second = BTreeMap::from([(77, "second".to_owned())]);
    node.host()
        .in_network(|| Ok(guard.guard_uplinks(&second, false)?))?;
    ensure!(
        guard.guarded_links().contains(&77),
        "the new link is not guarded"
    );
    run(host, "ip link del second")?;

    node.host()
        .in_network(|| Ok(guard.remove_unused(&BTreeMap::new())?))?;

    ensure!(
        guard.guarded_links().is_empty(),
        "{:?}",
        guard.guarded_links()
    );
    Ok(())
}
