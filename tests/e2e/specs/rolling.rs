//! A rolling update of backends under load.

use std::{collections::BTreeSet, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use crate::{
    manifests::{self, NAMESPACE},
    stage::Stage,
};

/// Connections per second from each client to each address; their time limit is [`LONGEST`].
const RATE: u32 = 25;
/// The number of pods of the Deployment.
const PODS: usize = 3;
const LONGEST: Duration = Duration::from_secs(180);

pub(super) fn loses_no_connection(stage: &Stage<'_>) -> Result<()> {
    let kubectl = stage.kubectl();
    let objects = [
        manifests::deployment("rolled", PODS),
        manifests::service("rolled", &["TCP"]),
    ];
    kubectl.apply(&objects.join("---\n"))?;
    kubectl.rolled_out(NAMESPACE, "deploy/rolled")?;
    let addresses = stage.answering("rolled")?;

    let reports = stage.under_load(&addresses, RATE, LONGEST, || {
        stage.run(&["rollout", "restart", "deploy/rolled"])?;
        kubectl.rolled_out(NAMESPACE, "deploy/rolled")?;
        // Replaced pods keep serving for a while.
        wait::until(LONGEST, || only_new_pods(stage)).context("old pods don't go")
    })?;
    let servers: BTreeSet<&String> = reports.iter().flat_map(|it| it.servers.keys()).collect();
    ensure!(servers.len() > PODS, "only {servers:?} answered");
    Ok(())
}

fn only_new_pods(stage: &Stage<'_>) -> bool {
    let said = stage.run(&["get", "pods", "-l", "app=rolled", "-o", "name"]);
    said.is_ok_and(|said| said.lines().count() == PODS)
}
