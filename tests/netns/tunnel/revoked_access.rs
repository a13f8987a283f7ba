//! Tests that an operator can end the sessions of a node, and keep its agent out.

use std::{
    fs,
    io::{Read as _, Write as _},
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    culvert_instance::InstanceSettings,
    edge_node::{EDGE_NAME, EdgeNode},
    sandbox::COMMAND_TIMEOUT,
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

use super::client;

/// Waits until the edge node has this number of sessions.
fn until_sessions(testbed: &TunnelTestbed, count: usize) -> Result<()> {
    let sessions = || {
        let status = testbed.node().status()?;
        let nodes = status["nodes"].as_array().context("no nodes")?;
        let edge = nodes.iter().find(|node| node["node"] == EDGE_NAME);
        let sessions = edge.and_then(|edge| edge["sessions"].as_array());
        Ok::<_, anyhow::Error>(sessions.map_or(0, Vec::len))
    };
    let reached = wait::until(COMMAND_TIMEOUT, || sessions().is_ok_and(|now| now == count));
    reached.with_context(|| format!("expected {count} sessions: {:?}", sessions()))
}

#[test]
#[ignore = "independent of the kernel: the gateway ends sessions"]
fn an_operator_ends_the_sessions_of_a_node_and_its_agent_comes_back() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    let to = TunnelTestbed::addr_v4(KUBELET_PORTS[0]);
    let mut live = client(&testbed, node.host(), to)?;
    live.upgrade()?;
    live.exchange(b"hello")?;

    let output = node.culvert(&["nodes", "end", EDGE_NAME])?;

    ensure!(
        output.stdout == format!("ended 2 sessions of node {EDGE_NAME}\n"),
        "{output:?}"
    );
    ensure!(live.exchange(b"hello").is_err(), "the stream goes on");
    testbed.wait_for_kubelet()?;
    until_sessions(&testbed, 2)?;
    ensure!(node.reason_count("session_revoked")? >= 2);

    let output = node.culvert(&["nodes", "end", "nobody"])?;
    ensure!(
        output.stderr.contains("node nobody has no session"),
        "{output:?}"
    );
    // Any user on the host can use the admin port.
    let mut port = node.host().connect(("127.0.0.1", 10249))?;
    let request = format!("POST /sessions/end?node={EDGE_NAME} HTTP/1.0\r\n\r\n");
    port.write_all(request.as_bytes())?;
    let mut response = String::new();
    port.read_to_string(&mut response)?;
    ensure!(response.starts_with("HTTP/1.0 405"), "{response}");
    until_sessions(&testbed, 2)
}

#[test]
#[ignore = "independent of the kernel: the gateway ends sessions"]
fn a_deleted_or_denied_node_is_cut_off_and_the_status_names_a_damaged_deny_list() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let deny_file = directory.path().join("deny");
    fs::write(&deny_file, "")?;
    let settings = InstanceSettings {
        gateway: format!("missingNodeTimeout: 1s, denyFile: {}", deny_file.display()),
        ..InstanceSettings::from_environment()?
    };
    let testbed = TunnelTestbed::prepare(settings)?;
    testbed.start()?;
    let node = testbed.node();

    node.delete(&EdgeNode::node().file())?;
    until_sessions(&testbed, 0)?;
    node.apply(EdgeNode::node())?;
    testbed.wait_for_kubelet()?;

    fs::write(&deny_file, format!("node {EDGE_NAME}\n"))?;
    until_sessions(&testbed, 0)?;
    fs::write(&deny_file, "node\n")?;
    let status = || node.culvert(&["status"]).map(|output| output.stdout);
    let problem = format!(
        "tunnel.gateway.denyFile: {}: line 1: `node` is neither",
        deny_file.display()
    );
    let shows = |text: &str| status().is_ok_and(|status| status.contains(text));
    wait::until(COMMAND_TIMEOUT, || shows(&problem))
        .with_context(|| format!("{problem}: {:?}", status()))?;
    ensure!(shows("1 nodes, 0 certificates"), "{:?}", status());
    fs::write(&deny_file, "# nobody\n")?;
    testbed.wait_for_kubelet()
}
