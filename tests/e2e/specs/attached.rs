//! Where the kernel programs of each node are.

use std::{fs, os::unix::fs::MetadataExt as _, path::Path};

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::stage::Stage;

/// Each node's daemon has its programs at the control group of that node, not above it, where
/// sockets of the other node and of the machine would meet them.
pub(super) fn to_their_own_group(stage: &Stage<'_>) -> Result<()> {
    for node in &stage.cluster.nodes {
        let answer = node.ask_daemon("/status")?;
        let status: Value = serde_json::from_str(&answer.body)?;
        let cgroup = status["cgroup"].as_str().context("no cgroup")?;
        // Every node has a name of its own for it; a group is known by its inode.
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
