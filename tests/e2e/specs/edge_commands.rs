//! Checks `kubectl` commands that reach a pod on an edge node through the tunnel.

use std::{
    fs::{self, File},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use crate::{
    fixture::{Fixture, client_pod},
    manifests::NAMESPACE,
};

/// The time limit for an agent to reconnect, and for output to arrive.
const TIMEOUT: Duration = Duration::from_secs(60);
/// The port on the cloud node on which `kubectl port-forward` listens.
const FORWARDED_PORT: u16 = 18_080;
/// A text in the request that `netexec` also logs when it handles the request.
const LOGGED_TEXT: &str = "hello-edge";

pub(super) fn exec(fixture: &Fixture<'_>) -> Result<()> {
    on_edge(fixture, |node| {
        let output = fixture.exec(node, &["cat", "/etc/hostname"])?;
        let expected = client_pod(node);
        ensure!(
            output.trim() == expected,
            "the host name in the pod is {output:?}, not {expected}"
        );
        Ok(())
    })
}

pub(super) fn logs(fixture: &Fixture<'_>) -> Result<()> {
    on_edge(fixture, |node| {
        let pod = client_pod(node);
        let path = fixture.cluster.shared.lab.directory().join("followed");
        let arguments = ["-n", NAMESPACE, "logs", "--follow", &pod];
        let output = File::create(&path)?;
        let logs = fixture.kubectl().start_with_output(&arguments, output)?;
        let contains = |text| fs::read_to_string(&path).is_ok_and(|log| log.contains(text));
        // The server logs this when it starts.
        wait::until(TIMEOUT, || contains("Started HTTP server"))
            .context("`kubectl logs` does not print the log")?;
        ensure!(
            !contains(LOGGED_TEXT),
            "the log has {LOGGED_TEXT} before the request"
        );
        let url = format!("http://127.0.0.1:8080/shell?cmd=true+{LOGGED_TEXT}");
        fixture.exec(node, &["curl", "--silent", "--max-time", "10", &url])?;
        wait::until(TIMEOUT, || contains(LOGGED_TEXT))
            .context("`kubectl logs --follow` does not print new lines")?;
        ensure!(
            logs.try_wait()?.is_none(),
            "`kubectl logs --follow` has exited"
        );
        Ok(())
    })
}

pub(super) fn port_forward(fixture: &Fixture<'_>) -> Result<()> {
    on_edge(fixture, |node| {
        let pod = format!("pod/{}", client_pod(node));
        let ports = format!("{FORWARDED_PORT}:8080");
        let arguments = ["-n", NAMESPACE, "port-forward", &pod, &ports];
        let port_forward = fixture.kubectl().start(&arguments)?;
        let nodes = &fixture.cluster.nodes;
        let cloud = nodes.first().context("the cluster has no node")?;
        let mut clients = fixture.clients.iter();
        let client = clients
            .find(|client| client.name == cloud.name)
            .with_context(|| format!("there is no client on {}", cloud.name))?;
        let to = SocketAddr::from(([127, 0, 0, 1], FORWARDED_PORT));
        let pod = client_pod(node);
        let responds = || client.request_names(to, 1).servers.contains_key(&pod);
        wait::until(TIMEOUT, responds).context("the forwarded port does not respond")?;
        ensure!(
            port_forward.try_wait()?.is_none(),
            "`kubectl port-forward` has exited"
        );
        Ok(())
    })
}

/// Calls `body` with the edge node's name, once the node's agent is connected.
pub(super) fn on_edge(fixture: &Fixture<'_>, body: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let edge = fixture.cluster.nodes.iter().find(|node| node.is_edge());
    let edge = edge.context("the cluster has no edge node")?.name;
    wait::until(TIMEOUT, || fixture.exec(edge, &["true"]).is_ok())
        .with_context(|| format!("`kubectl exec` does not reach {edge}"))?;
    body(edge)
}
