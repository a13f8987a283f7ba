//! A minute without the API server, during which the daemons are killed: they keep serving the last
//! known state, and report it as stale.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tunnel_cluster::node::Node;
use tunnel_tests::{
    clock::{self, Instant},
    wait,
};

use crate::stage::Stage;

/// The time without the API server.
const AWAY: Duration = Duration::from_secs(60);
/// The time that a daemon has to be back.
const BACK: Duration = Duration::from_secs(90);
/// Connections per second from each client to each address, and their time limit.
const RATE: u32 = 20;
const LONGEST: Duration = Duration::from_secs(400);

pub(super) fn serves_on(stage: &Stage<'_>) -> Result<()> {
    let addresses = stage.answering("web")?;
    for node in &stage.cluster.nodes {
        wait::until(BACK, || is_kept(node))
            .with_context(|| format!("{} never wrote down what it knows", node.name))?;
    }
    stage
        .under_load(&addresses, RATE, LONGEST, || without_api_server(stage))
        .map(drop)
}

/// Stops the API server, kills the daemons, waits for their return without it, and restarts it.
fn without_api_server(stage: &Stage<'_>) -> Result<()> {
    let began = Instant::now();
    stage.cluster.control.stop_api_server()?;
    for node in &stage.cluster.nodes {
        let started = started(node).context("no status")?;
        node.kill("culvert", "node")?;
        wait::until(BACK, || started_again(node, &started))
            .with_context(|| format!("{} has no daemon any more", node.name))?;
        wait::until(BACK, || is_stale(node))
            .with_context(|| format!("{} doesn't go on with what it knew", node.name))?;
        let answer = node.ask_daemon("/readyz")?;
        ensure!(answer.status == 503, "stale, and ready: {}", answer.body);
        let is_ready = status(node).context("no status")?["ready"] == true;
        ensure!(!is_ready, "status and /readyz differ");
        ensure!(is_fine(node, "/healthz"), "stale, and not healthy");
    }
    if let Some(rest) = AWAY.checked_sub(began.elapsed()) {
        clock::pause(rest);
    }
    stage.cluster.control.start_api_server()?;
    for node in &stage.cluster.nodes {
        wait::until(BACK, || is_fine(node, "/readyz"))
            .with_context(|| format!("{} doesn't get ready again", node.name))?;
    }
    Ok(())
}

fn status(node: &Node) -> Option<Value> {
    let answer = node.ask_daemon("/status").ok()?;
    serde_json::from_str(&answer.body).ok()
}

/// Returns the start time of a node's daemon.
fn started(node: &Node) -> Option<String> {
    Some(status(node)?["started"].as_str()?.to_owned())
}

fn started_again(node: &Node, before: &str) -> bool {
    started(node).is_some_and(|started| started != before)
}

fn is_stale(node: &Node) -> bool {
    status(node).is_some_and(|status| status["source"]["server"]["stale"].is_string())
        && is_fine(node, "/healthz")
}

fn is_fine(node: &Node, path: &str) -> bool {
    node.ask_daemon(path).is_ok_and(|it| it.status == 200)
}

/// True if a daemon has saved its state.
fn is_kept(node: &Node) -> bool {
    node.state().join("objects").exists()
}
