//! Tests features that depend on the counts of open connections: the algorithm `least-conn`; and backend
//! indices, which are not reused while connections to the backend are open. Also tests the counts after the
//! daemon replaces the maps at its start.

use std::net::UdpSocket;

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{node::Node, sandbox::Sandbox, wait};

use crate::{
    fixture::WEB,
    migration,
    open_connections::{open_connections, set_up, total_connections},
    support::{CHANGE_TIMEOUT, DNS, Dialer, HTTP, ensure_eq, query, until_backends, until_eq},
};

const ALGORITHM: &str = "culvert.dev/algorithm";
const WEIGHTS: &str = "culvert.dev/weights";

/// Connects a UDP socket to the Service `web`, and returns the socket and the name of the server that
/// answers.
fn connected(sandbox: &Sandbox, dialer: Dialer) -> Result<(UdpSocket, String)> {
    let socket = dialer.connect_udp(sandbox, WEB, DNS)?;
    let server = query(&socket)?;
    Ok((socket, server))
}

/// Returns how many of the sockets are answered by each of the named servers.
fn by_server<const N: usize>(sockets: &[(UdpSocket, String)], names: [&str; N]) -> [usize; N] {
    names.map(|name| sockets.iter().filter(|(_, server)| server == name).count())
}

#[test]
fn of_two_backends_the_one_with_fewer_connections_is_chosen() -> Result<()> {
    let scene = set_up()?;
    let two = scene.addresses(&["one", "two"])?;
    let service = WEB.service("web").annotated(ALGORITHM, "least-conn");
    scene.node.apply(service.backends(two))?;
    until_backends(&scene.node, "web", 2)?;
    let names = ["one", "two"];

    for dialer in Dialer::UDP {
        let connect = |_| connected(&scene.client, dialer);
        let mut held = (0..20).map(connect).collect::<Result<Vec<_>>>()?;
        ensure_eq("both", by_server(&held, names), [10, 10])?;
        held.retain(|(_, server)| server == "one");
        // A process that another test is starting may hold the closed sockets for a moment.
        until_eq("connections", 10, || total_connections(&scene.node))?;
        // Now `one` has ten connections and `two` has none, so the next ten connections go to `two`.
        let more = (0..10).map(connect).collect::<Result<Vec<_>>>()?;
        ensure_eq("the emptier one", by_server(&more, names), [0, 10])?;
    }
    for dialer in Dialer::TCP {
        let connect = |_| dialer.connect(&scene.client, WEB, HTTP);
        let held = (0..20).map(connect).collect::<Result<Vec<_>, _>>()?;
        let counts = open_connections(&scene.node, "web")?;
        let counts: Vec<u64> = counts.into_values().filter(|count| *count > 0).collect();
        ensure_eq(&format!("{dialer:?}"), counts, vec![10, 10])?;
        drop(held);
    }
    Ok(())
}

#[test]
fn open_connections_are_distributed_by_weight() -> Result<()> {
    const ROUNDS: usize = 24;
    let scene = set_up()?;
    // A small backend set is stored in the frontend's record, a larger one in slots. The first set has 2 + 1
    // slots, the second one 3 + 1 + 1.
    for (weights, south, expected) in [
        ("zone:north=2", &["two"][..], [2, 1, 0]),
        ("zone:north=3", &["two", "three"], [3, 1, 1]),
    ] {
        let service = WEB.service("web").annotated(ALGORITHM, "wlc");
        let mut service = service.annotated(WEIGHTS, weights);
        for (zone, names) in [("north", &["one"][..]), ("south", south)] {
            service = service.in_zone(zone).backends(scene.addresses(names)?);
        }
        scene.node.apply(service)?;
        until_backends(&scene.node, "web", 1 + south.len())?;

        for dialer in [Dialer::V4, Dialer::V6] {
            let slots: usize = expected.iter().sum();
            let connect = |_| connected(&scene.client, dialer);
            let held = (0..ROUNDS * slots).map(connect);
            let held = held.collect::<Result<Vec<_>>>()?;
            let counts = by_server(&held, ["one", "two", "three"]);
            // Of two randomly drawn slots, the one whose backend has fewer connections per unit of weight is
            // used. The drawn slots belong to different backends in four of the six possible pairs, or in
            // seven of ten; the other pairs are too rare to cause a larger deviation.
            for (count, weight) in counts.into_iter().zip(expected) {
                let is_near = count.abs_diff(ROUNDS * weight) <= 5;
                ensure!(is_near, "{dialer:?}, {weights}: {counts:?}");
            }
        }
    }
    Ok(())
}

/// Returns how many indices of removed backends are still in use because of open connections.
fn draining_indices(node: &Node) -> Option<u64> {
    node.status().ok()?["programmed"]["drainingBackends"].as_u64()
}

#[test]
fn an_index_with_open_connections_is_not_reused_even_by_the_next_daemon() -> Result<()> {
    let scene = set_up()?;
    let node = &scene.node;
    let until = |wanted: u64| {
        let mut seen = None;
        wait::until(2 * CHANGE_TIMEOUT, || {
            seen = draining_indices(node);
            seen == Some(wanted)
        })
        .with_context(|| format!("{seen:?} indices are kept, expected {wanted}"))
    };
    let replaced = |names: &[&str]| -> Result<()> {
        scene.apply_web(names)?;
        until_backends(node, "web", names.len())
    };
    replaced(&["one"])?;
    until(0)?;

    let held = Dialer::TCP.map(|dialer| dialer.connect(&scene.client, WEB, HTTP));
    let held = held.into_iter().collect::<Result<Vec<_>, _>>()?;
    let udp = Dialer::UDP.map(|dialer| connected(&scene.client, dialer));
    let udp = udp.into_iter().collect::<Result<Vec<_>>>()?;
    // Each combination of protocol and address family keeps one index in use.
    replaced(&["two"])?;
    until(4)?;
    for round in 0..3 {
        // If a new backend reused an index, it would show the removed backend's connections.
        for names in [&["three"][..], &["one", "two", "three"], &["two"]] {
            replaced(names)?;
            let counts = open_connections(node, "web")?;
            ensure!(counts.values().all(|count| *count == 0), "{counts:?}");
        }
        match round {
            0 => node.kill9()?,
            _ => node.stop()?,
        }
        node.start()?;
        until(4)?;
        ensure_eq("open", total_connections(node)?, 7)?;
    }
    drop(held);
    until(2)?;
    drop(udp);
    until(0)
}

#[test]
fn counts_survive_the_replacement_of_maps() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    let until = |wanted: u64| until_eq("connections", wanted, || total_connections(node));
    let connect = || connected(&scene.client, Dialer::V6);
    let mut held = (0..10).map(|_| connect()).collect::<Result<Vec<_>>>()?;
    until(10)?;

    // Grow the maps, shrink them (which keeps the existing map of counts), grow them to less than the first
    // size, and finally grow them beyond all previous sizes.
    for size in [4096, 64, 128, 8192] {
        scene.resize([64, 64, size])?;
        if size == 128 {
            // Some sockets are closed while no daemon is running.
            node.kill9()?;
            held.truncate(7);
        } else {
            node.stop()?;
        }
        node.start()?;
        scene.expect_tidy()?;
        let expected = u64::try_from(held.len())?;
        until(expected)?;
        held.push(connect()?);
        until(expected + 1)?;
        held.swap_remove(0);
        held.swap_remove(0);
        until(expected - 1)?;
    }
    // A daemon that finds maps with an older layout assigns new indices, but keeps the counts.
    node.kill9()?;
    migration::imitate_older_layout(node)?;
    node.start()?;
    until(u64::try_from(held.len())?)?;
    drop(held);
    until(0)
}

#[test]
fn counts_return_to_zero_after_a_load_during_replacements_of_maps() -> Result<()> {
    let scene = migration::start()?;
    let sizes = [4096, 64, 8192];

    scene.under_load(&migration::SERVICES, sizes.len(), |number| {
        // Each size differs from all previous ones.
        let size = sizes[number % sizes.len()] + u32::try_from(number)?;
        scene.resize([size, size, size])?;
        if number % 2 == 0 {
            scene.node.kill9()?;
        } else {
            scene.node.stop()?;
        }
        scene.node.start()?;
        scene.expect_tidy()
    })?;

    until_eq("connections", 0, || total_connections(&scene.node))
}
