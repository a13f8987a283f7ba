//! Checks the Events that Culvert creates.

use std::collections::BTreeSet;

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use super::audit_log;
use crate::{
    fixture::{Fixture, SYNC_TIMEOUT},
    manifests::NAMESPACE,
};

/// The name of the fixture's Service.
const NAME: &str = "web";
const ANNOTATION: &str = "culvert.dev/algorithm";

/// Expects a Service with an invalid annotation to be served, and exactly one Event to report that the
/// annotation is ignored, and why.
pub(super) fn report_an_invalid_annotation(fixture: &Fixture<'_>) -> Result<()> {
    annotate(fixture, &format!("{ANNOTATION}=fastest"))?;
    let result = check_event(fixture);
    annotate(fixture, &format!("{ANNOTATION}-"))?;
    result
}

fn annotate(fixture: &Fixture<'_>, change: &str) -> Result<()> {
    fixture
        .run_kubectl(&["annotate", "service", NAME, change])
        .map(drop)
}

fn check_event(fixture: &Fixture<'_>) -> Result<()> {
    let nodes = fixture.cluster.nodes.len();
    wait::until(SYNC_TIMEOUT, || reporting_nodes(fixture).len() == nodes)
        .context("not every node created an Event")?;

    let description = fixture.run_kubectl(&["describe", "service", NAME])?;
    let lines = description.lines();
    let events: Vec<&str> = lines.filter(|line| line.contains("FieldIgnored")).collect();
    let is_reported = matches!(events[..], [one] if one.contains("\"fastest\" is not random"));
    ensure!(
        is_reported,
        "the Service does not have exactly one Event FieldIgnored about \"fastest\":\n{description}"
    );
    fixture.wait_until_served(NAME).map(drop)
}

/// Returns the addresses of the nodes that have tried to create an Event in [`NAMESPACE`].
fn reporting_nodes(fixture: &Fixture<'_>) -> BTreeSet<String> {
    let requests = audit_log::requests(fixture).unwrap_or_default();
    requests
        .iter()
        .map(|(_, request)| (request, &request["objectRef"]))
        .filter(|(_, object)| object["resource"] == "events" && object["namespace"] == NAMESPACE)
        .filter_map(|(request, _)| request["sourceIPs"][0].as_str())
        .map(str::to_owned)
        .collect()
}
