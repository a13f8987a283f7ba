//! Tests changes to Nodes and ConfigMaps while the daemon is running.
#![expect(
    clippy::print_stdout,
    reason = "prints the times, which it also limits"
)]

use std::{
    io::ErrorKind,
    net::{IpAddr, SocketAddr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    clock::Instant,
    culvert_instance::{Instance, InstanceSettings},
    edge_node::{EDGE_NAME, EDGE_V4, EDGE_V6, EdgeNode},
    load_scale::LoadScale,
    manifest::{Manifest, NodeObject},
    sandbox::Sandbox,
    tunnel_testbed::{FURTHER_PORT, KUBELET_PORTS, TunnelTestbed},
    wait,
};

use super::{client, edge_addresses, expect_unsteered};
use crate::support::CHANGE_TIMEOUT;

/// The time limit for a change to take effect.
const EFFECT_LIMIT: Duration = Duration::from_millis(200);

/// Applies a manifest, asserts that `holds` becomes true within [`EFFECT_LIMIT`], and prints how long it
/// took.
fn apply_and_time(
    testbed: &TunnelTestbed,
    manifest: impl Into<Manifest>,
    what: &str,
    holds: impl FnMut() -> bool,
) -> Result<()> {
    let start = Instant::now();
    testbed.node().apply(manifest)?;
    wait::until(CHANGE_TIMEOUT, holds).with_context(|| what.to_owned())?;
    let took = start.elapsed();
    println!("{what}: took effect after {} ms", took.as_millis());
    let most = LoadScale::from_environment().timeout(EFFECT_LIMIT);
    ensure!(took < most, "{what}: took effect only after {took:?}");
    Ok(())
}

/// Returns true if a connection is steered. Otherwise, it fails because there is no route. If no agent is
/// connected, the ingress resets a steered connection, possibly before connect() returns.
fn is_steered(sandbox: &Sandbox, to: SocketAddr) -> bool {
    sandbox
        .connect(to)
        .map_or_else(|error| error.kind() == ErrorKind::ConnectionReset, |_| true)
}

#[test]
fn connects_to_a_former_edge_node_are_not_steered_and_open_connections_continue() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let (host, pod) = (testbed.node().host(), testbed.pod()?);
    let [v4, v6] = edge_addresses(KUBELET_PORTS[0]);
    let mut live = [client(&testbed, host, v4)?, client(&testbed, &pod, v6)?];
    for client in &mut live {
        client.upgrade()?;
    }

    let gone = || ![v4, v6].iter().any(|to| is_steered(host, *to));
    let unlabelled = NodeObject::new(EDGE_NAME, [EDGE_V4.into(), EDGE_V6.into()]);
    apply_and_time(&testbed, unlabelled, "the edge label is removed", gone)?;

    for to in [v4, v6] {
        expect_unsteered(host, to)?;
        expect_unsteered(&pod, to)?;
    }
    for (client, to) in live.iter_mut().zip([v4, v6]) {
        client.exchange(b"still there")?;
        ensure!(client.peer()? == to);
    }

    let back = || [v4, v6].iter().all(|to| is_steered(host, *to));
    apply_and_time(
        &testbed,
        EdgeNode::node(),
        "the edge label is added again",
        back,
    )?;
    for client in &mut live {
        client.exchange(b"still there")?;
    }
    testbed.wait_for_kubelet()
}

#[test]
#[ignore = "independent of the kernel: documents become map entries"]
fn ports_of_the_config_map_are_followed() -> Result<()> {
    let testbed = TunnelTestbed::prepare(InstanceSettings::from_environment()?)?;
    testbed.node().start()?;
    testbed
        .edge()
        .start_agent([KUBELET_PORTS[0], FURTHER_PORT])?;
    testbed.wait_for_kubelet()?;
    let host = testbed.node().host();
    let [v4, v6] = edge_addresses(FURTHER_PORT);
    expect_unsteered(host, v4)?;

    let list = |ports: &str| Manifest::further_ports("https-proxy-ports", ports);
    let all = || [v4, v6].iter().all(|to| is_steered(host, *to));
    apply_and_time(&testbed, list("9101, 9100"), "a port is added", all)?;
    for to in [v4, v6] {
        client(&testbed, host, to)?.healthz()?;
        client(&testbed, &*testbed.pod()?, to)?.healthz()?;
    }
    let mut live = client(&testbed, host, v4)?;

    let none = || [v4, v6].iter().all(|to| !is_steered(host, *to));
    apply_and_time(&testbed, list("9101"), "a port is removed", none)?;
    live.healthz()
        .context("the connection that was open before the change")?;

    apply_and_time(&testbed, list("9100"), "the port is added again", all)?;
    testbed.node().delete(&list("").file)?;
    wait::until(CHANGE_TIMEOUT, none)
        .context("the port is still steered after the deletion of the ConfigMap")?;
    testbed.wait_for_kubelet()
}

#[test]
#[ignore = "independent of the kernel: documents and error messages"]
fn invalid_nodes_and_port_lists_are_reported_and_the_valid_items_apply() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    let other: IpAddr = "10.20.0.8".parse()?;
    let twin = NodeObject::new("edge-9", [EDGE_V4.into(), other]).edge();
    let bare = NodeObject::new("edge-0", []).edge();
    let list = Manifest::further_ports("http-proxy-ports", "9100, 99999, nope, 9102");

    node.apply(twin.clone())?;
    node.apply(bare.clone())?;
    node.apply(list.clone())?;

    let named = |words: &[&str]| {
        let status = node.status().unwrap_or_default().to_string();
        words.iter().all(|word| status.contains(word))
    };
    let words = [
        "which had it first and keeps it",
        "has no InternalIP",
        "edge-9",
        "10.20.0.7",
        "edge-0",
        "yurt-tunnel-server-cfg",
        "nope",
    ];
    wait::until(CHANGE_TIMEOUT, || named(&words)).with_context(|| {
        format!(
            "the status lacks some of these problems: {:#}",
            node.status().unwrap_or_default()
        )
    })?;
    let shown = node.culvert(&["status"])?.stdout;
    for word in ["edge-9", "edge-0", "nope"] {
        ensure!(shown.contains(word), "no {word} in\n{shown}");
    }
    testbed
        .request_healthz(node.host())
        .context("the Node that had the address first is not served")?;
    // The objects' valid items take effect: connections to these addresses are steered, even if there is no
    // agent.
    for to in [
        SocketAddr::new(other, KUBELET_PORTS[0]),
        TunnelTestbed::addr_v4(FURTHER_PORT),
        TunnelTestbed::addr_v4(9102),
    ] {
        ensure!(is_steered(node.host(), to), "{to}");
    }

    for file in [twin.file(), bare.file(), list.file] {
        node.delete(&file)?;
    }
    // The status is searched only for these words, since it keeps the name of any node that a client has
    // dialled.
    let problems = ["which had it first", "has no InternalIP", "nope"];
    wait::until(CHANGE_TIMEOUT, || !problems.iter().any(|it| named(&[*it]))).with_context(
        || {
            format!(
                "the status still has a solved problem: {:#}",
                node.status().unwrap_or_default()
            )
        },
    )?;
    expect_unsteered(node.host(), SocketAddr::new(other, KUBELET_PORTS[0]))?;
    testbed.request_healthz(node.host())
}

#[test]
#[ignore = "independent of the kernel: documents become map entries"]
fn a_node_that_is_an_edge_node_itself_steers_nothing() -> Result<()> {
    let testbed = TunnelTestbed::new()?;

    testbed.node().apply(Instance::node().edge())?;
    let [v4, v6] = edge_addresses(KUBELET_PORTS[0]);
    for to in [v4, v6] {
        wait::until(CHANGE_TIMEOUT, || !is_steered(testbed.node().host(), to))?;
        expect_unsteered(testbed.node().host(), to)?;
    }

    testbed.node().apply(Instance::node())?;
    testbed.wait_for_kubelet()
}
