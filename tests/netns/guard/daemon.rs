//! The guards and routes that the daemon maintains, while uplinks appear, disappear and are renamed.

use std::{ffi::OsString, fs, io::ErrorKind, time::Duration};

use anyhow::{Result, ensure};
use tunnel_tests::{
    edge::{EDGE_V4, Edge},
    instance::Settings,
    node::Node,
    wait,
};

use super::knock;
use crate::support::{local_routes, run, same};

/// The time limit for the daemon to follow a change of the network.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

const TUNNEL: &str =
    "tunnel:\n  steering: {}\n  gateway: {}\n  identity: { files: { ca: a, cert: b, key: c } }\n";

/// Creates a node whose config enables steering, modified by `change`, without starting the daemon.
pub(crate) fn steering(change: impl Fn(&str) -> String) -> Result<Node> {
    let node = Node::new()?;
    configure(&node, change)?;
    node.apply(Edge::node())?;
    Ok(node)
}

fn configure(node: &Node, change: impl Fn(&str) -> String) -> Result<()> {
    let config = fs::read_to_string(node.config_path())?;
    let plain = config.split("tunnel:").next().unwrap_or_default();
    fs::write(node.config_path(), change(&format!("{plain}{TUNNEL}")))?;
    Ok(())
}

/// Returns the number of pinned guard links.
pub(crate) fn guards(node: &Node) -> Result<usize> {
    let links = fs::read_dir(node.bpffs().join("links"))?;
    let names = links.flatten().map(|link| link.file_name());
    let is_guard = |name: &OsString| name.to_string_lossy().starts_with("guard-");
    Ok(names.filter(is_guard).count())
}

pub(crate) fn network(node: &Node) -> Result<serde_json::Value> {
    Ok(node.status()?["network"].take())
}

/// Adds a veth pair to the host: one end with this name, the other named `other`.
fn add_veth(node: &Node, name: &str) -> Result<()> {
    let command = format!("ip link add {name} type veth peer name other");
    run(node.host(), &command).map(drop)
}

/// Connects from the host to the kubelet of the edge node; returns the error.
fn dial(node: &Node) -> ErrorKind {
    let connected = node.host().connect((EDGE_V4, 10_250));
    connected.map_or_else(|error| error.kind(), |_| ErrorKind::Other)
}

#[test]
fn a_new_uplink_is_guarded_while_the_daemon_runs() -> Result<()> {
    let node = steering(str::to_owned)?;
    node.start()?;
    let uplinks = || -> Result<String> { Ok(network(&node)?["uplinks"].to_string()) };
    ensure!(uplinks()? == "[\"uplink\"]", "{}", uplinks()?);

    add_veth(&node, "second")?;

    wait::until(PATIENCE, || {
        uplinks().is_ok_and(|uplinks| uplinks.contains("second") && uplinks.contains("other"))
    })?;
    run(node.host(), "ip link del second")?;
    wait::until(PATIENCE, || {
        uplinks().is_ok_and(|uplinks| uplinks == "[\"uplink\"]")
    })
}

#[test]
fn an_uplink_that_loses_its_default_route_stays_guarded() -> Result<()> {
    let node = steering(str::to_owned)?;
    node.start()?;

    for family in ["-4", "-6"] {
        run(node.host(), &format!("ip {family} route del default"))?;
    }
    // Once the daemon reports a later change, it has processed the loss of the routes, too.
    add_veth(&node, "late")?;
    let has_late = || network(&node).is_ok_and(|view| view["uplinks"].to_string().contains("late"));
    wait::until(PATIENCE, has_late)?;

    let view = network(&node)?;
    ensure!(view["uplinks"].to_string().contains("\"uplink\""), "{view}");
    let route = "route add 198.19.0.0/16 via 192.0.2.1\n";
    node.outside().ip(route)?;
    same("from outside", knock(&node), ErrorKind::TimedOut)?;
    Ok(())
}

#[test]
fn a_name_that_no_link_has_makes_no_route_and_connects_are_refused_at_once() -> Result<()> {
    let named = |name: &'static str| {
        move |config: &str| {
            config.replace("service:\n", &format!("service:\n  uplinks: [{name}]\n"))
        }
    };
    let node = steering(named("nowhere"))?;
    let host = node.host();
    node.start()?;

    let problem = network(&node)?["problem"].to_string();
    ensure!(
        problem.contains("service.uplinks names nowhere"),
        "{problem}"
    );
    same("routes", local_routes(host, 176)?, "")?;
    same("dialled", dial(&node), ErrorKind::ConnectionRefused)?;
    ensure!(node.reason("steering_no_route")? > 0, "steering_no_route isn't counted");

    // The guard stays on an uplink that is renamed.
    node.stop()?;
    configure(&node, |config| config.replace("[nowhere]", "[uplink]"))?;
    node.start()?;
    add_veth(&node, "late")?;
    for change in ["uplink down", "uplink name renamed", "renamed up"] {
        run(host, &format!("ip link set {change}"))?;
    }
    let has_problem =
        || network(&node).is_ok_and(|view| view["problem"].to_string().contains("names uplink"));
    wait::until(PATIENCE, has_problem)?;
    same("from outside", knock(&node), ErrorKind::TimedOut)?;
    Ok(())
}

#[test]
#[ignore = "no kernel decides it: the daemon compares numbers"]
fn full_steering_maps_stop_no_restart() -> Result<()> {
    let usual = format!("steering: {}", Settings::from_environment()?.maps.steering);
    let node = steering(|config| config.replace(&usual, "steering: 2"))?;
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
fn routes_of_an_earlier_config_are_replaced_and_go_with_the_section() -> Result<()> {
    let marked = |protocol: u8| {
        move |config: &str| {
            config.replace(
                "steering: {}",
                &format!("steering: {{ routeProtocol: {protocol} }}"),
            )
        }
    };
    let node = steering(marked(180))?;
    let host = node.host();
    node.start()?;
    same("routes", local_routes(host, 180)?.lines().count(), 2)?;
    node.stop()?;

    configure(&node, marked(181))?;
    node.start()?;
    same("former routes", local_routes(host, 180)?, "")?;
    same("routes", local_routes(host, 181)?.lines().count(), 2)?;
    node.stop()?;

    configure(&node, |config| {
        config
            .split("tunnel:")
            .next()
            .unwrap_or_default()
            .to_owned()
    })?;
    node.start()?;
    same("routes", local_routes(host, 181)?, "")?;
    same("guards", guards(&node)?, 0)
}

#[test]
fn a_route_that_is_taken_away_comes_back_and_one_of_another_is_left_alone() -> Result<()> {
    let node = steering(str::to_owned)?;
    let host = node.host();
    run(host, "ip route add local 198.19.0.0/16 dev lo proto 99")?;
    node.start()?;
    let problem = || -> Result<String> { Ok(network(&node)?["problem"].to_string()) };
    ensure!(
        problem()?.contains("198.19.0.0/16 is already routed by another program (protocol 99)"),
        "{}",
        problem()?
    );
    same("dialled", dial(&node), ErrorKind::ConnectionRefused)?;
    ensure!(
        local_routes(host, 176)?.contains("fd00:c01e::/64"),
        "the IPv6 prefix has no local route"
    );

    let delete = "ip route del local 198.19.0.0/16 table local";
    run(host, delete)?;

    let is_there = || local_routes(host, 176).is_ok_and(|routes| routes.contains("198.19.0.0/16"));
    wait::until(PATIENCE, is_there)?;
    run(host, delete)?;
    wait::until(PATIENCE, is_there)
}
