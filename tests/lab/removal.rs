//! Tests that nothing remains after a lab is dropped, or after its process is killed or terminated by a
//! signal.

use std::{
    fs,
    io::{BufRead as _, BufReader},
    os::unix::process::ExitStatusExt as _,
    path::PathBuf,
    process::{Child, Command, Stdio},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    sys::signal::{Signal, kill},
    unistd::Pid,
};
use tunnel_tests::{cgroup, lab, node_network::NodeNetwork, wait};

const TIME_LIMIT: Duration = Duration::from_secs(10);

/// A node that was created by a separate process, `culvert-lab up`.
struct UpProcess {
    process: Child,
    /// The process IDs of the executors of the node's sandboxes.
    executors: Vec<i32>,
    cgroup: PathBuf,
    directory: PathBuf,
}

fn start_up() -> Result<UpProcess> {
    let mut process = Command::new(env!("CARGO_BIN_EXE_culvert-lab"))
        .args(["up", "--pods", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let output = process
        .stdout
        .take()
        .context("the process has no standard output")?;
    let mut executors = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line?;
        let Some((_, rest)) = line.split_once("nsenter -t ") else {
            break;
        };
        executors.push(rest.split(' ').next().unwrap_or_default().parse()?);
    }
    let name = format!("culvert-lab-{}-0", process.id());
    let cgroup = cgroup::mount_point()?.join(&name);
    Ok(UpProcess {
        process,
        executors,
        cgroup,
        directory: std::env::temp_dir().join(name),
    })
}

fn wait_for_executors(up: &UpProcess) -> Result<()> {
    for pid in &up.executors {
        wait::until(TIME_LIMIT, || !lab::is_alive(Pid::from_raw(*pid)))?;
    }
    Ok(())
}

#[test]
fn nothing_remains_of_a_dropped_node() -> Result<()> {
    let network = NodeNetwork::new()?;
    let pod = network.pod("pod")?;
    let server = pod.serve_echo(7)?;
    let paths = [
        network.lab().cgroup().to_owned(),
        network.lab().directory().to_owned(),
    ];
    let pids = [
        pod.pid(),
        network.host().pid(),
        u32::try_from(server.process().pid())?,
    ];

    drop((server, pod, network));

    for path in paths {
        assert!(!path.exists(), "{}", path.display());
    }
    for pid in pids {
        assert!(!fs::exists(format!("/proc/{pid}"))?);
    }
    Ok(())
}

#[test]
fn a_dropped_node_is_removed_even_if_a_handle_of_a_pod_remains() -> Result<()> {
    let network = NodeNetwork::new()?;
    let pod = network.pod("pod")?;
    let cgroup = network.lab().cgroup().to_owned();

    drop(network);

    assert!(!cgroup.exists());
    pod.connect("127.0.0.1:1").expect_err("the pod is gone");
    Ok(())
}

#[test]
fn the_remains_of_a_killed_process_are_swept() -> Result<()> {
    let mut up = start_up()?;
    assert_eq!(up.executors.len(), 3);

    up.process.kill()?;
    up.process.wait()?;

    wait_for_executors(&up)?;
    wait::until(TIME_LIMIT, || !up.cgroup.exists() && !up.directory.exists())
}

#[test]
fn sigterm_removes_everything() -> Result<()> {
    let mut up = start_up()?;

    // Keep standard input open, since EOF would also make the process exit.
    let _stdin = up.process.stdin.take();
    kill(
        Pid::from_raw(i32::try_from(up.process.id())?),
        Signal::SIGTERM,
    )?;
    let status = up.process.wait()?;

    assert_eq!(status.signal(), Some(nix::libc::SIGTERM));
    wait_for_executors(&up)?;
    assert!(!up.cgroup.exists());
    assert!(!up.directory.exists());
    Ok(())
}

#[test]
fn the_sweep_leaves_laboratories_of_living_processes_alone() -> Result<()> {
    let mut up = start_up()?;

    lab::sweep()?;

    assert!(up.cgroup.exists());
    drop(up.process.stdin.take());
    assert!(up.process.wait()?.success());
    assert!(!up.cgroup.exists());
    Ok(())
}
