//! The guard on real uplinks: by a link where the kernel has them, else by a filter.

use std::{
    collections::BTreeMap,
    fs::File,
    io::{ErrorKind, Write as _},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use nix::sched::{CloneFlags, setns};
use tunnel_common::{addr::Address, reason::Reason, steering::Prefix};
use tunnel_tests::{node::Node, wait};
use tunnel_userspace::{
    bpf::{self, Counters, DataPath, Features, Guard, Pins, Switches},
    net::Keeper as _,
    reconcile::Sizes,
};

/// The index and name of the host's uplink.
const UPLINK: (u32, &str) = (2, "uplink");

const SIZES: Sizes = Sizes {
    fronts: 1,
    slots: 1,
    backends: 1,
    steering: 1,
};

fn load(node: &Node, pins: &Pins, tcx: bool) -> Result<(Guard, Counters)> {
    let network = Address::from_ip("198.19.0.0".parse()?);
    let switches = Switches {
        own_mark: 0,
        prefixes: vec![Prefix::new(network, 16).context("a range")?],
    };
    let features = Features {
        tcx,
        ..bpf::probe()?
    };
    let mut data_path = DataPath::load(pins, SIZES, features, &switches)?;
    let (_maps, counters) = data_path.take_maps()?;
    ensure!(node.bpffs().exists());
    Ok((data_path.into_guard(), counters))
}

/// Does something in the host's network namespace, on a thread of its own.
fn on_host<T: Send>(node: &Node, work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
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

fn uplinks() -> BTreeMap<u32, String> {
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
fn both_kinds_of_guard_keep_outsiders_out_are_replaced_and_go_with_cleanup() -> Result<()> {
    for tcx in [true, false] {
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
            let (mut guard, counters) = load(&node, &pins, tcx)?;
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
    }
    Ok(())
}

#[test]
fn a_filter_that_somebody_took_off_is_put_back() -> Result<()> {
    let node = Node::new()?;
    node.host()
        .run(&["ip", "route", "add", "local", "198.19.0.0/16", "dev", "lo"])?;
    let pins = Pins::hold(&node.bpffs())?;
    let (mut guard, _counters) = load(&node, &pins, false)?;
    on_host(&node, || Ok(guard.keep(&uplinks(), false)?))?;
    node.host()
        .run(&["tc", "qdisc", "del", "dev", UPLINK.1, "clsact"])?;
    ensure!(knock(&node) == ErrorKind::ConnectionRefused, "unguarded");

    on_host(&node, || Ok(guard.keep(&uplinks(), true)?))?;

    ensure!(knock(&node) == ErrorKind::TimedOut, "guarded again");
    Ok(())
}

#[test]
fn a_guard_ends_where_a_link_is_no_uplink_any_more() -> Result<()> {
    for tcx in [true, false] {
        let node = Node::new()?;
        node.host()
            .run(&["ip", "route", "add", "local", "198.19.0.0/16", "dev", "lo"])?;
        let pins = Pins::hold(&node.bpffs())?;
        let (mut guard, _counters) = load(&node, &pins, tcx)?;
        on_host(&node, || {
            guard.keep(&uplinks(), false)?;
            guard.keep(&BTreeMap::new(), false)?;
            Ok(guard.tidy(&BTreeMap::new())?)
        })?;

        ensure!(knock(&node) == ErrorKind::ConnectionRefused, "tcx {tcx}");
        ensure!(!guard.is_anywhere(), "tcx {tcx}");
    }
    Ok(())
}

#[test]
fn a_new_uplink_is_guarded_while_the_daemon_runs() -> Result<()> {
    let node = Node::new()?;
    let mut config = File::options().append(true).open(node.config_path())?;
    config.write_all(
        b"tunnel:\n  steering: {}\n  gateway: {}\n  identity: { files: { ca: a, cert: b, key: c } }\n",
    )?;
    node.start()?;
    let uplinks = || -> Result<String> { Ok(node.status()?["network"]["uplinks"].to_string()) };
    ensure!(uplinks()? == "[\"uplink\"]", "{}", uplinks()?);

    node.host().run(&[
        "ip", "link", "add", "second", "type", "veth", "peer", "name", "other",
    ])?;

    wait::until(Duration::from_secs(5), || {
        uplinks().is_ok_and(|uplinks| uplinks.contains("second") && uplinks.contains("other"))
    })?;
    node.host().run(&["ip", "link", "del", "second"])?;
    wait::until(Duration::from_secs(5), || {
        uplinks().is_ok_and(|uplinks| uplinks == "[\"uplink\"]")
    })
}

#[test]
fn a_route_that_is_taken_away_comes_back_and_one_of_another_is_left_alone() -> Result<()> {
    let node = Node::new()?;
    let mut config = File::options().append(true).open(node.config_path())?;
    config.write_all(
        b"tunnel:\n  steering: {}\n  gateway: {}\n  identity: { files: { ca: a, cert: b, key: c } }\n",
    )?;
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
    let problem = || -> Result<String> { Ok(node.status()?["network"]["problem"].to_string()) };
    ensure!(
        problem()?.contains("198.19.0.0/16 is already routed by another (protocol 99)"),
        "{}",
        problem()?
    );

    node.host().run(&[
        "ip",
        "route",
        "del",
        "local",
        "198.19.0.0/16",
        "table",
        "local",
    ])?;

    let ours = || {
        node.host()
            .run(&["ip", "route", "show", "table", "local", "proto", "176"])
    };
    let is_there = || ours().is_ok_and(|routes| routes.contains("198.19.0.0/16"));
    wait::until(Duration::from_secs(5), is_there)?;
    node.host().run(&[
        "ip",
        "route",
        "del",
        "local",
        "198.19.0.0/16",
        "table",
        "local",
    ])?;
    wait::until(Duration::from_secs(5), is_there)
}
