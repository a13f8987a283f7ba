//! Checks which cgroups Culvert's BPF programs are attached to.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::fixture::Fixture;

/// Expects each node's BPF programs to be attached to the node's own cgroup, and not to a parent, where they
/// would also handle the sockets of other nodes and of the local machine's own processes.
pub(super) fn uses_own_cgroup(fixture: &Fixture<'_>) -> Result<()> {
    for node in &fixture.cluster.nodes {
        let response = node.get_from_daemon("/status")?;
        let status: Value = serde_json::from_str(&response.body)?;
        let path = status["cgroup"]
            .as_str()
            .context("the status has no cgroup")?;
        // The path inside the node differs from the one outside, but the inode is the same.
        let attached = fs::metadata(node.path_from_outside(Path::new(path)))?.ino();
        let own = fs::metadata(&node.cgroup)?.ino();
        let (name, expected) = (node.name, node.cgroup.display());
        ensure!(
            attached == own,
            "{name}: the programs are attached to {path}, not to {expected}"
        );
        let reported = status["node"].as_str();
        ensure!(
            reported == Some(name),
            "the status on {name} has the node name {reported:?}"
        );
        let translated = status["reasons"]["translated"].as_u64();
        ensure!(translated > Some(0), "{name}: no connect was translated");
    }
    Ok(())
}
