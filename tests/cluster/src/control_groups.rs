//! The control groups of a kubelet's pods.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use tunnel_tests::{cgroup, lab::Lab};

/// Creates the group of a node in every hierarchy; returns its path below each of them.
pub(super) fn make(lab: &Lab, group: &str) -> Result<String> {
    let path = format!("{}/{group}", lab.name());
    let legacy = cgroup::legacy()?;
    for hierarchy in &legacy {
        cgroup::create(&hierarchy.join(&path))?;
        // A new group of the cpuset controller has neither CPUs nor memory nodes.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            seed(hierarchy, &path, file)?;
        }
    }
    if legacy.is_empty() {
        // With version 2 alone, each level must enable the controllers for the next one.
        let root = cgroup::mount_point()?;
        for level in ["", lab.name(), &path] {
            hand_down(&root.join(level))?;
        }
    }
    Ok(format!("/{path}"))
}

fn seed(hierarchy: &Path, path: &str, file: &str) -> Result<()> {
    let Ok(whole) = fs::read_to_string(hierarchy.join(file)) else {
        return Ok(());
    };
    let mut level = hierarchy.to_owned();
    for part in path.split('/') {
        level.push(part);
        let file = level.join(file);
        if fs::read_to_string(&file)?.trim().is_empty() {
            fs::write(&file, whole.trim())
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    Ok(())
}

fn hand_down(group: &Path) -> Result<()> {
    let controllers = fs::read_to_string(group.join("cgroup.controllers"))?;
    let words: Vec<String> = controllers
        .split_whitespace()
        .map(|name| format!("+{name}"))
        .collect();
    let file = group.join("cgroup.subtree_control");
    fs::write(&file, words.join(" ")).with_context(|| format!("cannot write {}", file.display()))
}
