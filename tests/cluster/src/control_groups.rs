//! Creates a node's cgroups.

use std::{fs, path::Path};

use anyhow::{Context as _, Result};
use tunnel_tests::{cgroup, lab::Lab};

/// Creates a node's cgroup in every hierarchy; returns its path relative to the root of each hierarchy.
pub(super) fn create(lab: &Lab, group: &str) -> Result<String> {
    let path = format!("{}/{group}", lab.name());
    let v1_hierarchies = cgroup::v1_mount_points()?;
    for hierarchy in &v1_hierarchies {
        cgroup::create(&hierarchy.join(&path))?;
        // A new cgroup in the cpuset hierarchy has neither CPUs nor memory nodes.
        for file in ["cpuset.cpus", "cpuset.mems"] {
            copy_from_root(hierarchy, &path, file)?;
        }
    }
    if v1_hierarchies.is_empty() {
        // If there is only cgroup v2, each level must enable the controllers for its children.
        let root = cgroup::mount_point()?;
        for level in ["", lab.name(), &path] {
            enable_controllers(&root.join(level))?;
        }
    }
    Ok(format!("/{path}"))
}

/// Copies the content of the root cgroup's `file` to each cgroup along `path` whose own `file` is empty.
fn copy_from_root(hierarchy: &Path, path: &str, file: &str) -> Result<()> {
    let Ok(content) = fs::read_to_string(hierarchy.join(file)) else {
        return Ok(());
    };
    let mut level = hierarchy.to_owned();
    for part in path.split('/') {
        level.push(part);
        let file = level.join(file);
        if fs::read_to_string(&file)?.trim().is_empty() {
            fs::write(&file, content.trim())
                .with_context(|| format!("cannot write {}", file.display()))?;
        }
    }
    Ok(())
}

/// Enables all of a cgroup's controllers for its children.
fn enable_controllers(group: &Path) -> Result<()> {
    let controllers = fs::read_to_string(group.join("cgroup.controllers"))?;
    let changes: Vec<String> = controllers
        .split_whitespace()
        .map(|name| format!("+{name}"))
        .collect();
    let file = group.join("cgroup.subtree_control");
    fs::write(&file, changes.join(" ")).with_context(|| format!("cannot write {}", file.display()))
}
