//! An operator's commands on a pod at an edge whose network permits only outgoing connections.

use std::{
    fs::{self, File},
    net::SocketAddr,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use crate::{
    manifests::NAMESPACE,
    stage::{Stage, pod_on},
};

/// The time that an agent has to reconnect.
const CONNECTED: Duration = Duration::from_secs(60);
/// The local port of `kubectl port-forward` on the cloud node.
const FORWARDED: u16 = 18_080;
/// A word that a request makes `netexec` log.
const WORD: &str = "hello-edge";

pub(super) fn exec(stage: &Stage<'_>) -> Result<()> {
    on_edge(stage, |node| {
        let said = stage.exec(node, &["cat", "/etc/hostname"])?;
        ensure!(said.trim() == pod_on(node), "it said {said:?}");
        Ok(())
    })
}

pub(super) fn logs(stage: &Stage<'_>) -> Result<()> {
    on_edge(stage, |node| {
        let pod = pod_on(node);
        let path = stage.cluster.site.lab.folder().join("followed");
        let follow = ["-n", NAMESPACE, "logs", "--follow", &pod];
        let following = stage.kubectl().start_into(&follow, File::create(&path)?)?;
        let is_followed = |word| fs::read_to_string(&path).is_ok_and(|said| said.contains(word));
        // The server logs this at its start.
        wait::until(CONNECTED, || is_followed("Started HTTP server"))
            .context("the log doesn't come")?;
        ensure!(!is_followed(WORD), "the log has a word that nobody said");
        let url = format!("http://127.0.0.1:8080/shell?cmd=true+{WORD}");
        stage.exec(node, &["curl", "--silent", "--max-time", "10", &url])?;
        wait::until(CONNECTED, || is_followed(WORD)).context("the log isn't followed")?;
        ensure!(following.ended()?.is_none(), "logs --follow ended");
        Ok(())
    })
}

pub(super) fn port_forward(stage: &Stage<'_>) -> Result<()> {
    on_edge(stage, |node| {
        let pod = format!("pod/{}", pod_on(node));
        let ports = format!("{FORWARDED}:8080");
        let words = ["-n", NAMESPACE, "port-forward", &pod, &ports];
        let forwarding = stage.kubectl().start(&words)?;
        let cloud = stage.cluster.nodes.first().context("no node")?;
        let mut clients = stage.clients.iter();
        let client = clients.find(|client| client.name == cloud.name);
        let client = client.context("no client on its host")?;
        let to = SocketAddr::from(([127, 0, 0, 1], FORWARDED));
        let answers = || client.ask(to, 1).servers.contains_key(&pod_on(node));
        wait::until(CONNECTED, answers).context("the forwarded port doesn't answer")?;
        ensure!(forwarding.ended()?.is_none(), "port-forward ended");
        Ok(())
    })
}

/// Runs a function on the edge node, once its agent is connected.
fn on_edge(stage: &Stage<'_>, body: impl FnOnce(&str) -> Result<()>) -> Result<()> {
    let edge = stage.cluster.nodes.iter().find(|node| node.is_edge());
    let edge = edge.context("no edge node")?.name;
    wait::until(CONNECTED, || stage.exec(edge, &["true"]).is_ok())
        .context("the edge can't be reached")?;
    body(edge)
}
