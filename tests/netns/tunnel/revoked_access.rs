//! Tests that an operator can keep a node's agent out.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    culvert_instance::InstanceSettings,
    edge_node::{EDGE_NAME, EdgeNode},
    sandbox::COMMAND_TIMEOUT,
    tunnel_testbed::TunnelTestbed,
    wait,
};

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
