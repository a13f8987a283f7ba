//! Backends that come and go under a load.

use std::{collections::BTreeSet, thread, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    load::{Enough, Plan, Report},
    wait,
};

use crate::{
    manifests::{self, NAMESPACE},
    stage::Stage,
};

/// Connections a second from each client to each address, and for how long at most.
const RATE: u32 = 25;
/// How many pods the Deployment has.
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

    let enough = Enough::default();
    let (rolled, reports) = thread::scope(|scope| {
        let mut loads = Vec::new();
        for client in &stage.clients {
            for to in &addresses {
                let plan = Plan::new(*to, RATE, LONGEST).until(&enough);
                let load = scope.spawn(move || client.load(&plan));
                loads.push((format!("{} → {to}", client.name), load));
            }
        }
        let rolled = enough.after(|| {
            kubectl.run(&["-n", NAMESPACE, "rollout", "restart", "deploy/rolled"])?;
            kubectl.rolled_out(NAMESPACE, "deploy/rolled")?;
            // Those that were replaced go on serving for a while.
            wait::until(LONGEST, || only_new_pods(stage)).context("old pods don't go")
        });
        let reports: Vec<(String, Report)> = loads
            .into_iter()
            .map(|(name, load)| (name, load.join().unwrap_or_default()))
            .collect();
        (rolled, reports)
    });
    rolled?;
    let mut servers = BTreeSet::new();
    for (name, report) in &reports {
        ensure!(report.failed() == 0, "{name}: {:?}", report.failures);
        ensure!(report.attempts > 0, "{name}: no attempt");
        servers.extend(report.servers.keys());
    }
    ensure!(servers.len() > PODS, "only {servers:?} answered");
    Ok(())
}

fn only_new_pods(stage: &Stage<'_>) -> bool {
    let words = [
        "-n",
        NAMESPACE,
        "get",
        "pods",
        "-l",
        "app=rolled",
        "-o",
        "name",
    ];
    let said = stage.kubectl().run(&words);
    said.is_ok_and(|said| said.lines().count() == PODS)
}
