//! Checks that daemons killed during an API server outage serve the last known objects after they restart,
//! and report that these objects are stale.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;
use tunnel_cluster::node::Node;
use tunnel_tests::{
    clock::{self, Instant},
    wait,
};

use crate::fixture::Fixture;

/// The duration of the outage.
const OUTAGE: Duration = Duration::from_secs(60);
/// The time limit for a daemon to restart, and for it to become ready.
const RESTART_TIMEOUT: Duration = Duration::from_secs(90);
/// The number of connections per second from each client to each address.
const RATE: u32 = 20;
/// The maximum duration of the load.
const MAX_LOAD: Duration = Duration::from_secs(400);

pub(super) fn fails_no_connection(fixture: &Fixture<'_>) -> Result<()> {
    let addresses = fixture.wait_until_served("web")?;
    for node in &fixture.cluster.nodes {
        wait::until(RESTART_TIMEOUT, || has_saved_objects(node))
            .with_context(|| format!("the daemon of {} did not save its objects", node.name))?;
    }
    fixture
        .under_load(&addresses, RATE, MAX_LOAD, || restart_everything(fixture))
        .map(drop)
}

/// Stops the API server, kills the daemons, waits until they serve again, and restarts the API server.
fn restart_everything(fixture: &Fixture<'_>) -> Result<()> {
    let start = Instant::now();
    fixture.cluster.control_plane.stop_api_server()?;
    for node in &fixture.cluster.nodes {
        let name = node.name;
        let before = start_time(node).with_context(|| format!("{name}: no status"))?;
        node.kill("culvert", "node")?;
        wait::until(RESTART_TIMEOUT, || has_restarted(node, &before))
            .with_context(|| format!("the daemon of {name} did not restart"))?;
        wait::until(RESTART_TIMEOUT, || is_stale(node))
            .with_context(|| format!("the daemon of {name} does not serve its saved objects"))?;
        let response = node.get_from_daemon("/readyz")?;
        ensure!(
            response.status == 503,
            "{name}: /readyz has the status {}, though the objects are stale: {}",
            response.status,
            response.body
        );
        let status = status(node).with_context(|| format!("{name}: no status"))?;
        ensure!(
            status["ready"] != true,
            "{name}: /status has `ready: true`, but /readyz has the status 503"
        );
        ensure!(
            is_ok(node, "/healthz"),
            "{name}: /healthz fails while the objects are stale"
        );
    }
    if let Some(rest) = OUTAGE.checked_sub(start.elapsed()) {
        clock::pause(rest);
    }
    fixture.cluster.control_plane.start_api_server()?;
    for node in &fixture.cluster.nodes {
        wait::until(RESTART_TIMEOUT, || is_ok(node, "/readyz"))
            .with_context(|| format!("the daemon of {} did not become ready again", node.name))?;
    }
    Ok(())
}

fn status(node: &Node) -> Option<Value> {
    let response = node.get_from_daemon("/status").ok()?;
    serde_json::from_str(&response.body).ok()
}

/// Returns the time when a node's daemon started.
fn start_time(node: &Node) -> Option<String> {
    Some(status(node)?["started"].as_str()?.to_owned())
}

fn has_restarted(node: &Node, before: &str) -> bool {
    start_time(node).is_some_and(|time| time != before)
}

fn is_stale(node: &Node) -> bool {
    status(node).is_some_and(|status| status["source"]["server"]["stale"].is_string())
        && is_ok(node, "/healthz")
}

fn is_ok(node: &Node, path: &str) -> bool {
    node.get_from_daemon(path)
        .is_ok_and(|response| response.status == 200)
}

/// Returns true if a node's daemon has saved the API server's objects to its state directory.
fn has_saved_objects(node: &Node) -> bool {
    node.state_directory().join("objects").exists()
}
