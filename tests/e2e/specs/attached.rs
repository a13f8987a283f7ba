//! The attachment of each node's kernel programs.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::stage::Stage;

/// Expects each daemon's programs at the control group of its own node, not above it, where they would
/// also see sockets of the other nodes and of the machine.
pub(super) fn to_their_own_group(stage: &Stage<'_>) -> Result<()> {
    for node in &stage.cluster.nodes {
        let answer = node.ask_daemon("/status")?;
        let status: Value = serde_json::from_str(&answer.body)?;
        let cgroup = status["cgroup"].as_str().context("no cgroup")?;
        // The path of the group differs by node, but its inode does not.
        let attached = fs::metadata(node.from_elsewhere(Path::new(cgroup)))?.ino();
        let own = fs::metadata(&node.unified)?.ino();
        let (name, unified) = (node.name, node.unified.display());
        ensure!(attached == own, "{name}: {cgroup} is not {unified}");
        let named = status["node"].as_str();
        ensure!(named == Some(name), "{named:?} on {name}");
        let translated = status["reasons"]["translated"].as_u64();
        ensure!(translated > Some(0), "{name}: nothing was translated");
    }
    Ok(())
}
