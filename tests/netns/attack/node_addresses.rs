//! An edge node's kubelet writes the addresses of other hosts into its own Node.

use std::{
    fs,
    io::{ErrorKind, Read as _},
    net::{IpAddr, SocketAddr, TcpListener},
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    culvert_instance::{Instance, InstanceSettings},
    edge_node::{EDGE_NAME, EDGE_V4, EDGE_V6, EdgeNode},
    manifest::NodeObject,
    node_network::{HOST_V4, OUTSIDE_V4},
    sandbox::{COMMAND_TIMEOUT, Sandbox},
    tunnel_testbed::{CONNECT_LIMIT, KUBELET_PORTS, TunnelTestbed},
    wait,
};

use crate::support::{CHANGE_TIMEOUT, Vip, count_during, ensure_eq};

/// The attacker's name, which sorts before the victim's.
const THIEF: &str = "edge-0";
/// The name of an attacker that sorts after the victim's.
const RIVAL: &str = "edge-8";
/// The attacker's own address.
const THIEF_V4: [u8; 4] = [10, 20, 0, 8];
/// The number of requests to the victim during an attack.
const REQUESTS: usize = 10;

/// Builds the attacker's Node, which has further addresses.
fn thief(addresses: &[IpAddr]) -> NodeObject {
    let own = IpAddr::from(THIEF_V4);
    let addresses = addresses.iter().copied();
    NodeObject::new(THIEF, addresses.chain([own])).edge()
}

/// Asserts that no request to the victim's kubelet fails, from the host and from a pod.
fn expect_unharmed(testbed: &TunnelTestbed) -> Result<()> {
    let pod = testbed.pod()?;
    for _ in 0..REQUESTS {
        testbed.request_healthz(testbed.node().host())?;
        testbed.request_healthz(&pod)?;
    }
    Ok(())
}

/// Waits until a line of `culvert status` begins with one of the words and contains the other.
fn wait_for_status(node: &Instance, row: &str, text: &str) -> Result<()> {
    let status = || {
        let output = node.culvert(&["status"]);
        output.map_or_else(|_| String::new(), |output| output.stdout)
    };
    let is_shown = || {
        let status = status();
        let mut lines = status.lines();
        lines.any(|line| line.trim_start().starts_with(row) && line.contains(text))
    };
    wait::until(CHANGE_TIMEOUT, is_shown)
        .with_context(|| format!("no row `{row}` with `{text}`:\n{}", status()))
}

/// Asserts that a connection reaches the listener at the address that it dials.
fn expect_direct(from: &Sandbox, listener: &TcpListener) -> Result<()> {
    let to = listener.local_addr()?;
    let stream = from.connect(to).with_context(|| to.to_string())?;
    listener.set_nonblocking(true)?;
    wait::until(COMMAND_TIMEOUT, || listener.accept().is_ok())
        .with_context(|| format!("the connection to {to} did not reach it"))?;
    drop(stream);
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the daemon compares Nodes with a file"]
fn an_edge_node_that_claims_the_address_of_another_gets_no_connection_even_after_a_restart()
-> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    let record = node.state().join("node-addresses.json");
    let is_recorded = || fs::read_to_string(&record).is_ok_and(|text| text.contains(EDGE_NAME));
    wait::until(CHANGE_TIMEOUT, is_recorded)?;

    node.apply(thief(&[EDGE_V4.into(), EDGE_V6.into()]))?;

    let lost = format!("is also an address of edge node {EDGE_NAME}, which had it first");
    let kept = format!("{EDGE_V4} is also claimed by edge node {THIEF}");
    for text in [
        format!("Node {THIEF}: status.addresses: {EDGE_V4} {lost}"),
        kept,
    ] {
        wait_for_status(node, "error", &text)?;
    }
    expect_unharmed(&testbed)?;

    // The attacker's Node is in the first list of the next daemon, too.
    node.kill9()?;
    node.start()?;
    testbed.wait_for_kubelet()?;
    expect_unharmed(&testbed)?;
    wait_for_status(node, "error", &lost)?;

    // Until the victim's Node is created again, nobody gets its connections.
    node.delete(&EdgeNode::node().file())?;
    wait_for_status(
        node,
        "error",
        &format!("was an address of edge node {EDGE_NAME}"),
    )?;
    ensure!(testbed.request_healthz(node.host()).is_err());
    node.apply(EdgeNode::node())?;
    wait_for_status(node, "error", &lost)?;
    expect_unharmed(&testbed)?;
    ensure!(node.reason_count("address_disputed")? > 0);
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the ingress refuses connections"]
fn connections_to_an_address_of_two_edge_nodes_are_refused_if_nobody_had_it_first() -> Result<()> {
    let testbed = TunnelTestbed::prepare(InstanceSettings::from_environment()?)?;
    let node = testbed.node();
    let claim = NodeObject::new(RIVAL, [EDGE_V4.into()]).edge();
    node.apply(claim.clone())?;
    node.start()?;
    testbed.edge().start_agent(KUBELET_PORTS)?;

    for (victim, other) in [(RIVAL, EDGE_NAME), (EDGE_NAME, RIVAL)] {
        let text = format!(
            "Node {victim}: status.addresses: {EDGE_V4} is also an address of edge node {other}; it is unknown"
        );
        wait_for_status(node, "error", &text)?;
    }
    // The victim's other address is served.
    wait::until(CONNECT_LIMIT, || {
        let to = TunnelTestbed::addr_v6(KUBELET_PORTS[0]);
        let served = || testbed.client(node.host().connect(to)?, to)?.healthz();
        served().is_ok()
    })?;
    // The connection reaches the ingress, which resets it. It is not sent to the network, where any host may have
    // the address.
    let to = TunnelTestbed::addr_v4(KUBELET_PORTS[0]);
    for sandbox in [node.host(), &**testbed.pod()?] {
        let connect = || {
            let ended = sandbox
                .connect(to)
                .and_then(|mut stream| stream.read(&mut [0]));
            Ok(ended.map_err(|error| error.kind()))
        };
        let (ended, refused) = count_during(node, &["address_disputed"], connect)?;
        ensure_eq("the end", ended, Err(ErrorKind::ConnectionReset))?;
        ensure_eq("refused", refused, vec![1])?;
    }

    node.delete(&claim.file())?;
    testbed.wait_for_kubelet()
}

#[test]
#[ignore = "independent of the kernel: documents and routes become map entries"]
fn an_edge_node_that_claims_addresses_of_pods_services_and_cloud_nodes_gets_none() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    let (victim, client) = (node.pod("victim")?, testbed.pod()?);
    let vip = Vip::of(7);
    node.apply(vip.service("web"))?;
    let listener = victim.listen(victim.addr_v4(KUBELET_PORTS[0]))?;

    node.apply(thief(&[victim.v4(), vip.v4.into(), HOST_V4.into()]))?;

    for text in [
        format!(
            "{} is in {}/32, a network of this node's pods",
            victim.v4(),
            victim.v4()
        ),
        format!("{} is the cluster IP of Service", vip.v4),
        format!("{HOST_V4} is also an address of cloud node"),
        format!("{HOST_V4} is also claimed by edge node {THIEF}"),
    ] {
        wait_for_status(node, "error", &text)?;
    }
    expect_direct(&client, &listener)?;
    expect_direct(node.host(), &listener)?;
    expect_unharmed(&testbed)?;
    // The attacker still has its own address.
    let refused = || node.reason_count("agent_not_connected").unwrap_or_default() > 0;
    drop(
        node.host()
            .connect(SocketAddr::from((THIEF_V4, KUBELET_PORTS[0]))),
    );
    wait::until(CHANGE_TIMEOUT, refused)
}

#[test]
#[ignore = "independent of the kernel: the daemon compares addresses with the config"]
fn an_address_outside_the_configured_ranges_is_not_steered() -> Result<()> {
    let testbed = TunnelTestbed::prepare(InstanceSettings::from_environment()?)?;
    let (node, outside) = (testbed.node(), testbed.node().outside());
    let listener = outside.listen((OUTSIDE_V4, KUBELET_PORTS[0]))?;
    node.apply(thief(&[OUTSIDE_V4.into(), [1, 2, 3, 4].into()]))?;
    testbed.start()?;
    // Without the ranges, such addresses are steered, but not without a word.
    for text in [
        format!("{OUTSIDE_V4} is in 192.0.2.0/24, which this node reaches over link uplink"),
        "1.2.3.4 is a public address; it is steered".to_owned(),
    ] {
        wait_for_status(node, "warning", &text)?;
    }

    node.stop()?;
    let config = fs::read_to_string(node.config_path())?;
    let ranges = "steering: { nodeCIDRs: [10.20.0.0/24, \"fd00:20::/64\"] }";
    let changed = config.replace("steering: {}", ranges);
    ensure!(changed != config, "{config}");
    fs::write(node.config_path(), changed)?;
    node.start()?;
    testbed.wait_for_kubelet()?;

    for address in ["192.0.2.2", "1.2.3.4"] {
        let text = format!(
            "Node {THIEF}: status.addresses: {address} is outside tunnel.steering.nodeCIDRs"
        );
        wait_for_status(node, "error", &text)?;
    }
    expect_direct(node.host(), &listener)?;
    expect_direct(&*testbed.pod()?, &listener)?;
    expect_unharmed(&testbed)
}
