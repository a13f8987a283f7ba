//! The guard on real uplinks: by a link where the kernel has them, else by a filter.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::ErrorKind,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sched::{CloneFlags, setns};
use tunnel_common::{addr::Address, reason::Reason, steering::Prefix};
use tunnel_tests::{
    edge::{EDGE_V4, Edge},
    feature::{self, Feature},
    instance::Settings,
    node::Node,
    test_name, wait,
};
use tunnel_userspace::{
    bpf::{self, Counters, DataPath, Features, Guard, Pins, Switches},
    net::Keeper as _,
    reconcile::Sizes,
};

/// How long a change of the network may take to be followed.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

/// The index and name of the host's uplink.
pub(crate) const UPLINK: (u32, &str) = (2, "uplink");

const SIZES: Sizes = Sizes::each(16);

/// The guard of a range, by a link or by a filter.
fn load_by(pins: &Pins, tcx: bool) -> Result<(Guard, Counters)> {
    let features = bpf::probe()?;
    load(pins, Features { tcx, ..features })
}

/// The guard of a range, loaded as for these features.
pub(crate) fn load(pins: &Pins, features: Features) -> Result<(Guard, Counters)> {
    let network = Address::from_ip("198.19.0.0".parse()?);
    let switches = Switches {
        own_mark: 0,
        prefixes: vec![Prefix::new(network, 16).context("a range")?],
    };
    let data_path = DataPath::load(pins, SIZES, features, &switches, Duration::ZERO)?;
    let (_maps, counters) = data_path.open_maps()?;
    Ok((data_path.guard()?, counters))
}

/// Does something in the host's network namespace, on a thread of its own.
pub(crate) fn on_host<T: Send>(node: &Node, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let namespace = File::open(format!("/proc/{}/ns/net", node.host().pid()))?;
    std::thread::scope(|scope| {
        let there = scope.spawn(|| {
            setns(namespace, CloneFlags::CLONE_NEWNET)?;
            work()
        });
        there
            .join()
            .map_err(|_panic| anyhow::anyhow!("the thread failed"))?
    })
}

pub(crate) fn uplinks() -> BTreeMap<u32, String> {
    BTreeMap::from([(UPLINK.0, UPLINK.1.to_owned())])
}

fn dropped(counters: &Counters) -> Result<u64> {
    let counts = counters.read()?;
    let guarded = counts
        .into_iter()
        .find(|(reason, _)| *reason == Reason::Guarded);
    Ok(guarded.map_or(0, |(_, count)| count))
}

/// A connect from outside to an address that is local on the host.
fn knock(node: &Node) -> ErrorKind {
    let connected = node.outside().connect("198.19.0.1:10270");
    connected.map_or_else(|error| error.kind(), |_| ErrorKind::Other)
}

#[test]
fn a_guard_by_a_link_keeps_outsiders_out_is_replaced_and_goes_with_cleanup() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Tcx])? {
        return Ok(());
    }
    keeps_out(true)
}

#[test]
fn a_guard_by_a_filter_keeps_outsiders_out_is_replaced_and_goes_with_cleanup() -> Result<()> {
    keeps_out(false)
}

fn keeps_out(tcx: bool) -> Result<()> {
    let node = Node::new()?;
    node.host()
        .run(&["ip", "route", "add", "local", "198.19.0.0/16", "dev", "lo"])?;
    ensure!(
        knock(&node) == ErrorKind::ConnectionRefused,
        "nobody listens, unguarded"
    );
    let pins = Pins::hold(&node.bpffs())?;
    // Twice: the second takes the place of the first.
    for _ in 0..2 {
        let (mut guard, counters) = load_by(&pins, tcx)?;
        on_host(&node, || Ok(guard.keep(&uplinks(), false)?))?;
        drop(guard);
        let before = dropped(&counters)?;
        ensure!(knock(&node) == ErrorKind::TimedOut, "guarded, tcx {tcx}");
        ensure!(dropped(&counters)? > before, "not counted, tcx {tcx}");
    }
    let filters = node
        .host()
        .run(&["tc", "filter", "show", "dev", UPLINK.1, "ingress"])?;
    ensure!(
        filters.matches("guard direct-action").count() == usize::from(!tcx),
        "tcx {tcx}: {filters}"
    );

    let foreign = on_host(&node, || Ok(pins.remove()?))?;

    ensure!(foreign.is_empty(), "{foreign:?}");
    ensure!(
        knock(&node) == ErrorKind::ConnectionRefused,
        "unguarded again, tcx {tcx}"
    );
    Ok(())
}

#[test]
fn a_filter_that_somebody_took_off_is_put_back() -> Result<()> {
    let node = Node::new()?;
    node.host()
        .run(&["ip", "route", "add", "local", "198.19.0.0/16", "dev", "lo"])?;
    let pins = Pins::hold(&node.bpffs())?;
    let (mut guard, _counters) = load_by(&pins, false)?;
    on_host(&node, || Ok(guard.keep(&uplinks(), false)?))?;
    node.host()
        .run(&["tc", "qdisc", "del", "dev", UPLINK.1, "clsact"])?;
    ensure!(knock(&node) == ErrorKind::ConnectionRefused, "unguarded");

    on_host(&node, || Ok(guard.keep(&uplinks(), true)?))?;

    ensure!(knock(&node) == ErrorKind::TimedOut, "guarded again");
    Ok(())
}

#[test]
fn a_guard_by_a_link_ends_where_its_device_is_no_uplink_any_more() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Tcx])? {
        return Ok(());
    }
    ends(true)
}

#[test]
fn a_guard_by_a_filter_ends_where_its_device_is_no_uplink_any_more() -> Result<()> {
    ends(false)
}

fn ends(tcx: bool) -> Result<()> {
    let node = Node::new()?;
    node.host()
        .run(&["ip", "route", "add", "local", "198.19.0.0/16", "dev", "lo"])?;
    let pins = Pins::hold(&node.bpffs())?;
    let (mut guard, _counters) = load_by(&pins, tcx)?;
    on_host(&node, || {
        guard.keep(&uplinks(), false)?;
        guard.keep(&BTreeMap::new(), false)?;
        Ok(guard.tidy(&BTreeMap::new())?)
    })?;

    ensure!(knock(&node) == ErrorKind::ConnectionRefused, "tcx {tcx}");
    ensure!(guard.guarded().is_empty(), "tcx {tcx}");
    Ok(())
}

#[test]
fn the_note_of_a_filter_goes_after_its_device() -> Result<()> {
    let node = Node::new()?;
    let pins = Pins::hold(&node.bpffs())?;
    let (mut guard, _counters) = load_by(&pins, false)?;
    let host = node.host();
    host.run(&[
        "ip", "link", "add", "second", "index", "77", "type", "veth", "peer", "name", "other",
    ])?;
    let second = BTreeMap::from([(77, "second".to_owned())]);
    on_host(&node, || Ok(guard.keep(&second, false)?))?;
    ensure!(guard.guarded().contains(&77), "not guarded");
    host.run(&["ip", "link", "del", "second"])?;

    on_host(&node, || Ok(guard.tidy(&BTreeMap::new())?))?;

    ensure!(guard.guarded().is_empty(), "{:?}", guard.guarded());
    Ok(())
}

const TUNNEL: &str =
    "tunnel:\n  steering: {}\n  gateway: {}\n  identity: { files: { ca: a, cert: b, key: c } }\n";

/// A node that steers, with changes to its config; the daemon isn't started yet.
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

fn routes(node: &Node, protocol: &str) -> Result<String> {
    let of = |family| {
        [
            "ip", family, "route", "show", "table", "local", "proto", protocol,
        ]
    };
    Ok(node.host().run(&of("-4"))? + &node.host().run(&of("-6"))?)
}

pub(crate) fn network(node: &Node) -> Result<serde_json::Value> {
    Ok(node.status()?["network"].take())
}

/// A connect to the kubelet of the edge, from the host.
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

    node.host().run(&[
        "ip", "link", "add", "second", "type", "veth", "peer", "name", "other",
    ])?;

    wait::until(PATIENCE, || {
        uplinks().is_ok_and(|uplinks| uplinks.contains("second") && uplinks.contains("other"))
    })?;
    node.host().run(&["ip", "link", "del", "second"])?;
    wait::until(PATIENCE, || {
        uplinks().is_ok_and(|uplinks| uplinks == "[\"uplink\"]")
    })
}

#[test]
fn an_uplink_that_loses_its_default_route_stays_guarded() -> Result<()> {
    let node = steering(str::to_owned)?;
    node.start()?;

    for family in ["-4", "-6"] {
        node.host()
            .run(&["ip", family, "route", "del", "default"])?;
    }
    // Something that is followed shows that the loss was.
    node.host().run(&[
        "ip", "link", "add", "late", "type", "veth", "peer", "name", "other",
    ])?;
    let has_late = || network(&node).is_ok_and(|view| view["uplinks"].to_string().contains("late"));
    wait::until(PATIENCE, has_late)?;

    let view = network(&node)?;
    ensure!(view["uplinks"].to_string().contains("\"uplink\""), "{view}");
    node.outside()
        .run(&["ip", "route", "add", "198.19.0.0/16", "via", "192.0.2.1"])?;
    ensure!(
        knock(&node) == ErrorKind::TimedOut,
        "an outsider got an answer"
    );
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
    node.start()?;

    let problem = network(&node)?["problem"].to_string();
    ensure!(
        problem.contains("service.uplinks names nowhere"),
        "{problem}"
    );
    ensure!(
        routes(&node, "176")?.is_empty(),
        "{}",
        routes(&node, "176")?
    );
    ensure!(
        dial(&node) == ErrorKind::ConnectionRefused,
        "{:?}",
        dial(&node)
    );
    ensure!(node.reason("steering_closed")? > 0, "not counted");

    // The name of an uplink that is guarded becomes another: the guard stays.
    node.stop()?;
    configure(&node, |config| {
        config.replace("uplinks: [nowhere]", "uplinks: [uplink]")
    })?;
    node.start()?;
    node.host().run(&[
        "ip", "link", "add", "late", "type", "veth", "peer", "name", "other",
    ])?;
    node.host().run(&["ip", "link", "set", "uplink", "down"])?;
    node.host()
        .run(&["ip", "link", "set", "uplink", "name", "renamed"])?;
    node.host().run(&["ip", "link", "set", "renamed", "up"])?;
    let has_problem =
        || network(&node).is_ok_and(|view| view["problem"].to_string().contains("names uplink"));
    wait::until(PATIENCE, has_problem)?;
    ensure!(
        knock(&node) == ErrorKind::TimedOut,
        "an outsider got an answer"
    );
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
    node.start()?;
    ensure!(
        routes(&node, "180")?.lines().count() == 2,
        "{}",
        routes(&node, "180")?
    );
    node.stop()?;

    configure(&node, marked(181))?;
    node.start()?;
    ensure!(
        routes(&node, "180")?.is_empty(),
        "{}",
        routes(&node, "180")?
    );
    ensure!(
        routes(&node, "181")?.lines().count() == 2,
        "{}",
        routes(&node, "181")?
    );
    node.stop()?;

    configure(&node, |config| {
        config
            .split("tunnel:")
            .next()
            .unwrap_or_default()
            .to_owned()
    })?;
    node.start()?;
    ensure!(
        routes(&node, "181")?.is_empty(),
        "{}",
        routes(&node, "181")?
    );
    let links = fs::read_dir(node.bpffs().join("links"))?;
    let names: Vec<_> = links.flatten().map(|link| link.file_name()).collect();
    let is_guard = |name: &std::ffi::OsString| name.to_string_lossy().starts_with("guard-");
    ensure!(!names.iter().any(is_guard), "{names:?}");
    Ok(())
}

#[test]
fn a_route_that_is_taken_away_comes_back_and_one_of_another_is_left_alone() -> Result<()> {
    let node = steering(str::to_owned)?;
    let foreign = [
        "ip",
        "route",
        "add",
        "local",
        "198.19.0.0/16",
        "dev",
        "lo",
        "proto",
        "99",
    ];
    node.host().run(&foreign)?;
    node.start()?;
    let problem = || -> Result<String> { Ok(network(&node)?["problem"].to_string()) };
    ensure!(
        problem()?.contains("198.19.0.0/16 is already routed by another (protocol 99)"),
        "{}",
        problem()?
    );
    ensure!(
        dial(&node) == ErrorKind::ConnectionRefused,
        "{:?}",
        dial(&node)
    );
    ensure!(
        routes(&node, "176")?.contains("fd00:c01e::/64"),
        "the other family has its route"
    );

    let delete = [
        "ip",
        "route",
        "del",
        "local",
        "198.19.0.0/16",
        "table",
        "local",
    ];
    node.host().run(&delete)?;

    let is_there = || routes(&node, "176").is_ok_and(|routes| routes.contains("198.19.0.0/16"));
    wait::until(PATIENCE, is_there)?;
    node.host().run(&delete)?;
    wait::until(PATIENCE, is_there)
}
