//! A pod opens many connections to an edge node and leaves them idle.

use std::io::{ErrorKind, Read as _};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    edge_node::EDGE_NAME,
    sandbox::COMMAND_TIMEOUT,
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

/// The number of connections that the pod opens, which exceeds the streams of an edge node: 250 for each of
/// two sessions.
const ATTEMPTS: usize = 600;
/// The number of streams that one pod may hold: half of three quarters of the edge node's streams.
const SHARE: usize = 188;
/// The number of requests from the host and from another pod.
const REQUESTS: usize = 20;

#[test]
#[ignore = "independent of the kernel: the ingress counts its clients"]
fn a_pod_with_many_idle_connections_keeps_nobody_from_an_edge_node() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let (node, pod) = (testbed.node(), testbed.pod()?);
    let other = node.pod("other")?;
    let target = TunnelTestbed::addr_v4(KUBELET_PORTS[1]);

    let mut held = Vec::new();
    for _ in 0..ATTEMPTS {
        // The ingress may reset the connection before connect() returns.
        if let Ok(stream) = pod.connect(target) {
            stream.set_nonblocking(true)?;
            held.push(stream);
        }
    }
    let open = || {
        let is_open = |mut stream: &std::net::TcpStream| matches!(stream.read(&mut [0]), Err(error) if error.kind() == ErrorKind::WouldBlock);
        held.iter().filter(|stream| is_open(stream)).count()
    };
    wait::until(COMMAND_TIMEOUT, || open() == SHARE)
        .with_context(|| format!("the pod holds {} connections", open()))?;

    for _ in 0..REQUESTS {
        testbed.request_healthz(node.host())?;
        testbed.request_healthz(&other)?;
    }
    ensure!(open() == SHARE, "the pod lost connections");
    let output = node.culvert(&["nodes", EDGE_NAME])?;
    let holder = output
        .stdout
        .lines()
        .find(|line| line.ends_with(&format!(" {SHARE}")));
    ensure!(
        holder.is_some(),
        "the client isn't shown: {}",
        output.stdout
    );
    ensure!(node.reason_count("client_share_exceeded")? > 0);
    Ok(())
}
