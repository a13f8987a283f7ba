//! Checks that a Deployment under load can be updated without losing connections.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use crate::{
    fixture::Fixture,
    manifests::{self, NAMESPACE},
};

/// The number of connections per second from each client to each address.
const RATE: u32 = 25;
/// The number of pods in the Deployment.
const PODS: usize = 3;
/// The maximum duration of the load.
const MAX_LOAD: Duration = Duration::from_secs(180);

pub(super) fn loses_no_connection(fixture: &Fixture<'_>) -> Result<()> {
    let kubectl = fixture.kubectl();
    let objects = [
        manifests::deployment("rolled", PODS),
        manifests::service("rolled", &["TCP"]),
    ];
    kubectl.apply(&objects.join("---\n"))?;
    kubectl.wait_for_rollout(NAMESPACE, "deploy/rolled")?;
    let addresses = fixture.wait_until_served("rolled")?;

    let reports = fixture.under_load(&addresses, RATE, MAX_LOAD, || {
        fixture.run_kubectl(&["rollout", "restart", "deploy/rolled"])?;
        kubectl.wait_for_rollout(NAMESPACE, "deploy/rolled")?;
        // Terminating pods keep serving for a few seconds.
        wait::until(MAX_LOAD, || only_new_pods(fixture)).context("old pods are still there")
    })?;
    let servers: BTreeSet<&String> = reports
        .iter()
        .flat_map(|report| report.servers.keys())
        .collect();
    ensure!(
        servers.len() > PODS,
        "no new pod responded, only {servers:?}"
    );
    Ok(())
}

fn only_new_pods(fixture: &Fixture<'_>) -> bool {
    let output = fixture.run_kubectl(&["get", "pods", "-l", "app=rolled", "-o", "name"]);
    output.is_ok_and(|names| names.lines().count() == PODS)
}
