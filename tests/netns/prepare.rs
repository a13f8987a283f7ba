//! Tests `culvert prepare`, the command that a node's init container runs.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Output},
    thread,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    mount::{MntFlags, MsFlags, mount, umount2},
    sched::{CloneFlags, unshare},
};
use tunnel_tests::{environment, node::Node};

use crate::support::ensure_eq;

#[test]
#[ignore = "independent of the kernel: mounts that every kernel supports"]
fn a_file_system_for_pins_is_mounted_once_and_a_daemon_starts_on_it() -> Result<()> {
    let node = Node::new()?;
    let (old, point) = (node.bpffs_inside(), node.state().join("bpf"));
    let new = point.join("culvert");
    let config = fs::read_to_string(node.config_path())?;
    let config = config.replace(&old.display().to_string(), &new.display().to_string());
    fs::write(node.config_path(), config)?;
    node.start()
        .err()
        .context("the daemon started without a BPF file system")?;
    drop(node.kill9());

    let first = node.culvert(&["prepare"])?;
    let second = node.culvert(&["prepare"])?;

    let mounted = format!("mounted a BPF file system on {}\n", point.display());
    ensure!(first.stdout.starts_with(&mounted), "{first:?}");
    let is_there = format!("{} is already on a BPF file system\n", new.display());
    ensure!(second.stdout.starts_with(&is_there), "{second:?}");
    let mode = node
        .host()
        .run(&["stat", "-c", "%a", &point.display().to_string()])?;
    ensure_eq("mode", mode.trim(), "1700")?;
    node.start()
}

/// Runs `body` in a private mount namespace without a mounted cgroup v2 hierarchy.
fn without_cgroups<T: Send>(body: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    let alone = || {
        unshare(CloneFlags::CLONE_NEWNS)?;
        let private = MsFlags::MS_REC | MsFlags::MS_PRIVATE;
        mount::<str, str, str, str>(None, "/", None, private, None)?;
        while let Some(point) = cgroups()? {
            umount2(&point, MntFlags::MNT_DETACH)?;
        }
        body()
    };
    thread::scope(|scope| scope.spawn(alone).join())
        .map_err(|_panic| anyhow::anyhow!("the thread failed"))?
}

/// Returns the mount point of the cgroup v2 hierarchy in the calling thread's mount namespace.
fn cgroups() -> Result<Option<PathBuf>> {
    let mounts = fs::read_to_string("/proc/thread-self/mounts")?;
    let found = mounts.lines().find(|line| line.contains(" cgroup2 "));
    Ok(found.and_then(|line| Some(line.split(' ').nth(1)?.into())))
}

fn prepare(config: &Path, capabilities: &str) -> Result<Output> {
    let mut command = Command::new("setpriv");
    command
        .arg(format!("--bounding-set={capabilities}"))
        .arg(environment::culvert()?)
        .args(["prepare", "--config"])
        .arg(config);
    command.output().context("cannot start setpriv")
}

#[test]
#[ignore = "independent of the kernel: mounts that every kernel supports"]
fn the_cgroup_hierarchy_is_mounted_if_it_is_missing() -> Result<()> {
    let directory = tempfile::tempdir()?;
    let config = directory.path().join("culvert.yaml");
    let pins = directory.path().join("bpf/culvert");
    fs::write(&config, format!("bpf: {{ bpffs: {} }}\n", pins.display()))?;

    let (refused, done, seen) = without_cgroups(|| {
        let refused = prepare(&config, "-sys_admin")?;
        let done = prepare(&config, "+all")?;
        let seen = cgroups()?;
        Ok((refused, done, seen))
    })?;

    let output = String::from_utf8_lossy(&refused.stderr);
    let named = format!(
        "bpf on {} (this needs CAP_SYS_ADMIN)",
        directory.path().join("bpf").display()
    );
    ensure!(output.contains(&named), "{refused:?}");
    let seen = seen.context("nothing is mounted")?;
    let output = String::from_utf8_lossy(&done.stdout);
    let expected = format!("mounted the cgroup v2 hierarchy on {}\n", seen.display());
    ensure!(output.ends_with(&expected), "{done:?}");
    Ok(())
}
