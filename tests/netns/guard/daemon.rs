//! Tests that the daemon maintains its guards and routes while uplinks appear, disappear and are renamed.

use std::{ffi::OsString, fs, io::ErrorKind, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{Array, Map, MapData};
use tunnel_common::steering::SteeringRecord;
use tunnel_tests::{
    culvert_instance::InstanceSettings,
    edge_node::{EDGE_V4, EdgeNode},
    feature::{self, Feature},
    node::Node,
    wait,
};
use tunnel_userspace::bpf::detach_pinned_link;

use super::probe_from_outside;
use crate::support::{ensure_eq, local_routes, maps_directory, run};

/// The time limit for the daemon's reaction to a change in the network.
pub(crate) const FOLLOW_TIMEOUT: Duration = Duration::from_secs(5);

const TUNNEL: &str =
    "tunnel:\n  steering: {}\n  gateway: {}\n  identity: { files: { ca: a, cert: b, key: c } }\n";

/// Creates a node whose config enables steering and has been modified by `change`, but does not start the
/// daemon.
pub(crate) fn steering_node(change: impl Fn(&str) -> String) -> Result<Node> {
    let node = Node::new()?;
    configure(&node, change)?;
    node.apply(EdgeNode::node())?;
    Ok(node)
}

fn configure(node: &Node, change: impl Fn(&str) -> String) -> Result<()> {
    let config = fs::read_to_string(node.config_path())?;
    let plain = config.split("tunnel:").next().unwrap_or_default();
    fs::write(node.config_path(), change(&format!("{plain}{TUNNEL}")))?;
    Ok(())
}

/// Returns how many guard links are pinned.
pub(crate) fn guards(node: &Node) -> Result<usize> {
    let links = fs::read_dir(node.bpffs().join("links"))?;
    let names = links.flatten().map(|link| link.file_name());
    let is_guard = |name: &OsString| name.to_string_lossy().starts_with("guard-");
    Ok(names.filter(is_guard).count())
}

pub(crate) fn network_status(node: &Node) -> Result<serde_json::Value> {
    Ok(node.status()?["network"].take())
}

/// Adds a veth pair to the host; its ends are named `name` and `other`.
fn add_veth(node: &Node, name: &str) -> Result<()> {
    let command = format!("ip link add {name} type veth peer name other");
    run(node.host(), &command).map(drop)
}

/// Tries to connect from the host to the edge node's kubelet, and returns the kind of error.
fn dial_edge(node: &Node) -> ErrorKind {
    let connected = node.host().connect((EDGE_V4, 10_250));
    connected.map_or_else(|error| error.kind(), |_| ErrorKind::Other)
}

#[test]
fn a_new_uplink_is_guarded_while_the_daemon_runs() -> Result<()> {
    let node = steering_node(str::to_owned)?;
    node.start()?;
    let uplinks = || -> Result<String> { Ok(network_status(&node)?["uplinks"].to_string()) };
    ensure!(uplinks()? == "[\"uplink\"]", "{}", uplinks()?);

    add_veth(&node, "second")?;

    wait::until(FOLLOW_TIMEOUT, || {
        uplinks().is_ok_and(|uplinks| uplinks.contains("second") && uplinks.contains("other"))
    })?;
    run(node.host(), "ip link del second")?;
    wait::until(FOLLOW_TIMEOUT, || {
        uplinks().is_ok_and(|uplinks| uplinks == "[\"uplink\"]")
    })
}

#[test]
fn an_uplink_that_loses_its_default_route_stays_guarded() -> Result<()> {
    let node = steering_node(str::to_owned)?;
    node.start()?;

    for family in ["-4", "-6"] {
        run(node.host(), &format!("ip {family} route del default"))?;
    }
    // Once the daemon reports a change made later, it has also processed the removal of the routes.
    add_veth(&node, "late")?;
    let has_late =
        || network_status(&node).is_ok_and(|view| view["uplinks"].to_string().contains("late"));
    wait::until(FOLLOW_TIMEOUT, has_late)?;

    let view = network_status(&node)?;
    ensure!(view["uplinks"].to_string().contains("\"uplink\""), "{view}");
    let route = "route add 198.19.0.0/16 via 192.0.2.1\n";
    node.outside().ip(route)?;
    ensure_eq(
        "from outside",
        probe_from_outside(&node),
        ErrorKind::TimedOut,
    )?;
    Ok(())
}

#[test]
fn a_guard_that_is_detached_is_attached_again() -> Result<()> {
    let node = steering_node(str::to_owned)?;
    node.start()?;
    node.outside()
        .ip("route add 198.19.0.0/16 via 192.0.2.1\n")?;
    let guard = || {
        let links = fs::read_dir(node.bpffs().join("links")).ok()?.flatten();
        let mut paths = links.map(|link| link.path());
        paths.find(|path| path.to_string_lossy().contains("/guard-"))
    };
    let pin = guard().context("no guard is pinned")?;

    // The pin of a filter is that of its program, which can't be detached.
    if feature::is_supported(Feature::Tcx)? {
        detach_pinned_link(&pin)?;
        let seen = probe_from_outside(&node);
        ensure!(seen != ErrorKind::TimedOut, "packets are still dropped");
    }
    fs::remove_file(&pin)?;

    wait::until(FOLLOW_TIMEOUT, || guard().as_ref() == Some(&pin))?;
    ensure_eq(
        "from outside",
        probe_from_outside(&node),
        ErrorKind::TimedOut,
    )
}

#[test]
fn an_unknown_uplink_name_adds_no_route_and_connects_are_refused_at_once() -> Result<()> {
    let named = |name: &'static str| {
        move |config: &str| {
            config.replace("service:\n", &format!("service:\n  uplinks: [{name}]\n"))
        }
    };
    let node = steering_node(named("nowhere"))?;
    let host = node.host();
    node.start()?;

    let problem = network_status(&node)?["problem"].to_string();
    ensure!(
        problem.contains("service.uplinks names nowhere"),
        "{problem}"
    );
    ensure_eq("routes", local_routes(host, 176)?, "")?;
    ensure_eq("dialled", dial_edge(&node), ErrorKind::ConnectionRefused)?;
    ensure!(
        node.reason_count("steering_no_route")? > 0,
        "steering_no_route isn't counted"
    );

    // The guard stays attached to an uplink that has been renamed.
    node.stop()?;
    configure(&node, |config| config.replace("[nowhere]", "[uplink]"))?;
    node.start()?;
    add_veth(&node, "late")?;
    for change in ["uplink down", "uplink name renamed", "renamed up"] {
        run(host, &format!("ip link set {change}"))?;
    }
    let has_problem = || {
        network_status(&node).is_ok_and(|view| view["problem"].to_string().contains("names uplink"))
    };
    wait::until(FOLLOW_TIMEOUT, has_problem)?;
    ensure_eq(
        "from outside",
        probe_from_outside(&node),
        ErrorKind::TimedOut,
    )?;
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the daemon compares numbers"]
fn a_daemon_restarts_with_full_steering_maps() -> Result<()> {
    let usual = format!(
        "steering: {}",
        InstanceSettings::from_environment()?.maps.steering
    );
    let node = steering_node(|config| config.replace(&usual, "steering: 2"))?;
    node.start()?;
    let steered = || -> Result<String> { Ok(node.status()?["programmed"]["steering"].to_string()) };
    ensure!(steered()?.contains("\"entries\":2"), "{}", steered()?);
    ensure!(steered()?.contains("bpf.maps.steering"), "{}", steered()?);

    node.kill9()?;
    node.start()?;

    ensure!(steered()?.contains("\"entries\":2"), "{}", steered()?);
    Ok(())
}

#[test]
fn routes_of_an_earlier_config_are_replaced_and_are_removed_with_the_section() -> Result<()> {
    let marked = |protocol: u8| {
        move |config: &str| {
            config.replace(
                "steering: {}",
                &format!("steering: {{ routeProtocol: {protocol} }}"),
            )
        }
    };
    let node = steering_node(marked(180))?;
    let host = node.host();
    node.start()?;
    ensure_eq("routes", local_routes(host, 180)?.lines().count(), 2)?;
    node.stop()?;

    configure(&node, marked(181))?;
    node.start()?;
    ensure_eq("former routes", local_routes(host, 180)?, "")?;
    ensure_eq("routes", local_routes(host, 181)?.lines().count(), 2)?;
    node.stop()?;

    configure(&node, |config| {
        config
            .split("tunnel:")
            .next()
            .unwrap_or_default()
            .to_owned()
    })?;
    node.start()?;
    ensure_eq("routes", local_routes(host, 181)?, "")?;
    ensure_eq("guards", guards(&node)?, 0)?;
    ensure_eq("routed families", routed_families(&node)?.get(&1, 0)?, 0)
}

/// Opens the map whose second entry contains the families whose steering prefix has a route.
fn routed_families(node: &Node) -> Result<Array<MapData, u64>> {
    let pin = node.bpffs().join(maps_directory("/host"));
    Ok(Map::Array(MapData::from_pin(pin)?).try_into()?)
}

#[test]
fn nothing_is_steered_to_prefixes_of_another_config_before_they_have_routes() -> Result<()> {
    let node = steering_node(str::to_owned)?;
    node.start()?;
    let host = routed_families(&node)?;
    let both = SteeringRecord::ROUTED_V4 | SteeringRecord::ROUTED_V6;
    ensure_eq("routed families", host.get(&1, 0)?, both)?;
    node.stop()?;
    configure(&node, |config| {
        config.replace(
            "steering: {}",
            "steering: { prefixes: [198.18.0.0/16, \"fd00:c01f::/64\"] }",
        )
    })?;

    // The routes appear only at the end of the start.
    let is_disabled = || host.get(&1, 0).is_ok_and(|families| families == 0);
    thread::scope(|scope| {
        let disabled = scope.spawn(|| wait::until_briefly(FOLLOW_TIMEOUT, is_disabled));
        node.start()?;
        disabled.join().ok().context("the observer panicked")?
    })?;

    ensure_eq("routed families", host.get(&1, 0)?, both)
}

#[test]
fn a_deleted_route_is_added_again_and_a_foreign_one_is_left_alone() -> Result<()> {
    let node = steering_node(str::to_owned)?;
    let host = node.host();
    run(host, "ip route add local 198.19.0.0/16 dev lo proto 99")?;
    node.start()?;
    let problem = || -> Result<String> { Ok(network_status(&node)?["problem"].to_string()) };
    ensure!(
        problem()?.contains("198.19.0.0/16 is already routed by another program (protocol 99)"),
        "{}",
        problem()?
    );
    ensure_eq("dialled", dial_edge(&node), ErrorKind::ConnectionRefused)?;
    ensure!(
        local_routes(host, 176)?.contains("fd00:c01e::/64"),
        "the IPv6 prefix has no local route"
    );

    let delete = "ip route del local 198.19.0.0/16 table local";
    run(host, delete)?;

    let is_there = || local_routes(host, 176).is_ok_and(|routes| routes.contains("198.19.0.0/16"));
    wait::until(FOLLOW_TIMEOUT, is_there)?;
    run(host, delete)?;
    wait::until(FOLLOW_TIMEOUT, is_there)
}
