//! Processes and pods that may not use the ingress (`tunnel.steering.allow`) connect to an edge node's kubelet.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    culvert_instance::NODE_NAME,
    manifest::Manifest,
    node::Node,
    pod::Pod,
    sandbox::Sandbox,
    tunnel_testbed::{CONNECT_LIMIT, KUBELET_PORTS, TunnelTestbed},
    wait,
};

use crate::support::CHANGE_TIMEOUT;

/// The daemon's limit on open files, which allows 192 clients of the ingress.
const OPEN_FILES: usize = 512;
/// The number of connections of a pod, which would need more than all clients.
const ATTEMPTS: usize = 300;

/// Stops the daemon, and writes entries to `tunnel.steering.allow`.
fn stop_and_configure(testbed: &TunnelTestbed, entries: &str) -> Result<()> {
    let node = testbed.node();
    node.stop()?;
    let config = fs::read_to_string(node.config_path())?;
    let is_kept = |line: &&str| !line.contains("steering: {");
    let lines: Vec<_> = config.lines().filter(is_kept).collect();
    let steering = format!("tunnel:\n  steering: {{ allow: [{entries}] }}");
    let config = lines.join("\n").replace("tunnel:", &steering) + "\n";
    fs::write(node.config_path(), config)?;
    Ok(())
}

/// Restarts the daemon with the given entries in `tunnel.steering.allow`, and waits until `client` reaches the
/// kubelet.
fn allow(testbed: &TunnelTestbed, entries: &str, client: &Sandbox) -> Result<()> {
    let node = testbed.node();
    stop_and_configure(testbed, entries)?;
    node.start()?;
    let reached = || testbed.request_healthz(client).is_ok();
    wait::until(CONNECT_LIMIT, reached)
        .with_context(|| format!("{entries}: an allowed client is refused: {}", node.logs()))
}

/// Expects that a client is refused, counted and named in the log.
fn expect_refused(testbed: &TunnelTestbed, client: &Sandbox, described: &str) -> Result<()> {
    let node = testbed.node();
    let before = node.reason_count("client_not_allowed")?;
    let response = testbed.request_healthz(client);
    ensure!(
        response.is_err(),
        "{described}: the client reaches the kubelet"
    );
    let after = node.reason_count("client_not_allowed")?;
    ensure!(after > before, "{described}: the refusal isn't counted");
    let logs = node.logs();
    ensure!(
        logs.contains(described),
        "{described}: not in the log: {logs}"
    );
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the ingress compares addresses"]
fn only_the_host_or_only_a_range_may_use_the_ingress() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let (host, pod) = (testbed.node().host(), testbed.pod()?);
    let other = testbed.node().pod("other")?;
    testbed.request_healthz(&other)?;

    allow(&testbed, "host", host)?;
    expect_refused(&testbed, &pod, "a pod is not in tunnel.steering.allow")?;
    testbed.request_healthz(host)?;
    let shown = testbed.node().culvert(&["status"])?.stdout;
    ensure!(shown.contains("client_not_allowed 1"), "{shown}");

    allow(&testbed, &format!("{}/32", pod.v4()), &pod)?;
    expect_refused(&testbed, &other, "a pod is not in tunnel.steering.allow")?;
    let described = "a process in the host's network namespace is not in tunnel.steering.allow";
    expect_refused(&testbed, host, described)?;
    testbed.request_healthz(&pod)
}

/// Builds the manifest of a Pod on the node.
fn manifest(pod: &Pod, namespace: &str) -> Manifest {
    let (name, v4, v6) = (pod.name(), pod.v4(), pod.v6());
    Manifest {
        file: format!("pod-{name}.yaml"),
        text: format!(
            "apiVersion: v1\n\
             kind: Pod\n\
             metadata: {{ name: {name}, namespace: {namespace} }}\n\
             spec: {{ nodeName: {NODE_NAME}, containers: [] }}\n\
             status: {{ phase: Running, podIPs: [{{ ip: \"{v4}\" }}, {{ ip: \"{v6}\" }}] }}\n"
        ),
    }
}

fn apply(node: &Node, pod: &Pod, namespace: &str) -> Result<()> {
    node.apply(manifest(pod, namespace))
}

#[test]
#[ignore = "independent of the kernel: the ingress compares addresses"]
fn only_the_pods_of_a_namespace_may_use_the_ingress() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let (node, pod) = (testbed.node(), testbed.pod()?);
    let (shop, late) = (node.pod("shop")?, node.pod("late")?);
    apply(node, &pod, "monitoring")?;
    apply(node, &shop, "shop")?;

    allow(&testbed, "\"namespace:monitoring\"", &pod)?;
    expect_refused(&testbed, &shop, "a pod in the namespace shop is not in")?;
    let host = node.host();
    expect_refused(
        &testbed,
        host,
        "a process in the host's network namespace is not in",
    )?;
    expect_refused(&testbed, &late, "an address that belongs to no known pod")?;

    apply(node, &late, "monitoring")?;
    // The ingress waits for the Pod.
    testbed.request_healthz(&late)?;
    testbed.request_healthz(&pod)?;

    node.delete(&manifest(&late, "monitoring").file)?;
    let is_refused = || testbed.request_healthz(&late).is_err();
    wait::until(CHANGE_TIMEOUT, is_refused).context("a deleted Pod is still allowed")
}

#[test]
#[ignore = "independent of the kernel: the ingress counts its clients"]
fn an_address_of_no_pod_leaves_room_for_the_host() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let (node, pod) = (testbed.node(), testbed.pod()?);
    stop_and_configure(&testbed, "host, \"namespace:monitoring\"")?;
    node.launch_with(&["prlimit".to_owned(), format!("--nofile={OPEN_FILES}")])?;
    node.wait_ready()?;
    let reached = || testbed.request_healthz(node.host()).is_ok();
    wait::until(CONNECT_LIMIT, reached).context("the host doesn't reach the kubelet")?;

    let target = TunnelTestbed::addr_v4(KUBELET_PORTS[1]);
    // The ingress may reset the connection before connect() returns. It waits for the Pod of each of the others.
    let connected = (0..ATTEMPTS).filter_map(|_| pod.connect(target).ok());
    let held: Vec<_> = connected.collect();
    testbed.request_healthz(node.host())?;
    drop(held);

    let refused = node.reason_count("client_share_exceeded")?;
    ensure!(refused > 0, "no connection of the pod is refused");
    let (logs, subject) = (node.logs(), pod.v4().to_string());
    let is_named = |line: &str| line.contains("client_share_exceeded") && line.contains(&subject);
    ensure!(logs.lines().any(is_named), "{subject} isn't named: {logs}");
    Ok(())
}
