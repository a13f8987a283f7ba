//! The product's Events for operators.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use super::audit;
use crate::{
    manifests::NAMESPACE,
    stage::{KNOWN, Stage},
};

/// A Service that exists and answers.
const NAME: &str = "web";
const ANNOTATION: &str = "culvert.dev/algorithm";

/// Expects a Service with an invalid annotation to be served, and an Event that says that the annotation
/// has no effect, and why.
pub(super) fn tell_what_is_wrong(stage: &Stage<'_>) -> Result<()> {
    annotate(stage, &format!("{ANNOTATION}=fastest"))?;
    let told = tell(stage);
    annotate(stage, &format!("{ANNOTATION}-"))?;
    told
}

fn annotate(stage: &Stage<'_>, change: &str) -> Result<()> {
    stage.run(&["annotate", "service", NAME, change]).map(drop)
}

fn tell(stage: &Stage<'_>) -> Result<()> {
    wait::until(KNOWN, || tellers(stage).len() == stage.cluster.nodes.len())
        .context("not every node tells of it")?;

    let described = stage.run(&["describe", "service", NAME])?;
    let lines = described.lines();
    let ignored: Vec<&str> = lines.filter(|it| it.contains("FieldIgnored")).collect();
    let is_told = matches!(ignored[..], [one] if one.contains("\"fastest\" is not random"));
    ensure!(is_told, "{described}");
    stage.answering(NAME).map(drop)
}

/// Returns the addresses of the nodes that requested the creation of an Event in this namespace.
fn tellers(stage: &Stage<'_>) -> BTreeSet<String> {
    let requests = audit::requests(stage).unwrap_or_default();
    requests
        .iter()
        .map(|(_, request)| (request, &request["objectRef"]))
        .filter(|(_, made)| made["resource"] == "events" && made["namespace"] == NAMESPACE)
        .filter_map(|(request, _)| request["sourceIPs"][0].as_str())
        .map(str::to_owned)
        .collect()
}
