//! Tests of the removal of a laboratory: nothing remains after its drop, or after a signal or kill of its
//! process.

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
use tunnel_tests::{cgroup, lab, topology::Topology, wait};

const GONE: Duration = Duration::from_secs(10);

/// A node that a separate process created, `culvert-lab up`.
struct Held {
    process: Child,
    /// The process IDs of its sandboxes' executors.
    agents: Vec<i32>,
    cgroup: PathBuf,
    folder: PathBuf,
}

fn hold() -> Result<Held> {
    let mut process = Command::new(env!("CARGO_BIN_EXE_culvert-lab"))
        .args(["up", "--pods", "1"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    let output = process.stdout.take().context("the process has no standard output")?;
    let mut agents = Vec::new();
    for line in BufReader::new(output).lines() {
        let line = line?;
        let Some((_, rest)) = line.split_once("nsenter -t ") else {
            break;
        };
        agents.push(rest.split(' ').next().unwrap_or_default().parse()?);
    }
    let name = format!("culvert-lab-{}-0", process.id());
    let cgroup = cgroup::mount_point()?.join(&name);
    Ok(Held {
        process,
        agents,
        cgroup,
        folder: std::env::temp_dir().join(name),
    })
}

fn agents_are_gone(held: &Held) -> Result<()> {
    for pid in &held.agents {
        wait::until(GONE, || !lab::is_alive(Pid::from_raw(*pid)))?;
    }
    Ok(())
}

#[test]
fn a_node_goes_when_it_is_dropped() -> Result<()> {
    let topology = Topology::new()?;
    let pod = topology.pod("pod")?;
    let server = pod.serve_echo(7)?;
    let paths = [
        topology.lab().cgroup().to_owned(),
        topology.lab().folder().to_owned(),
    ];
    let pids = [
        pod.pid(),
        topology.host().pid(),
        u32::try_from(server.process().pid())?,
    ];

    drop((server, pod, topology));

    for path in paths {
        assert!(!path.exists(), "{}", path.display());
    }
    for pid in pids {
        assert!(!fs::exists(format!("/proc/{pid}"))?);
    }
    Ok(())
}

#[test]
fn a_node_goes_although_a_handle_of_a_place_is_still_held() -> Result<()> {
    let topology = Topology::new()?;
    let pod = topology.pod("pod")?;
    let cgroup = topology.lab().cgroup().to_owned();

    drop(topology);

    assert!(!cgroup.exists());
    pod.connect("127.0.0.1:1").expect_err("the pod is gone");
    Ok(())
}

#[test]
fn what_a_process_leaves_that_is_killed_with_9_is_swept_after_its_end() -> Result<()> {
    let mut held = hold()?;
    assert_eq!(held.agents.len(), 3);

    held.process.kill()?;
    held.process.wait()?;

    agents_are_gone(&held)?;
    wait::until(GONE, || !held.cgroup.exists() && !held.folder.exists())
}

#[test]
fn a_request_to_end_leaves_nothing() -> Result<()> {
    let mut held = hold()?;

    // Kept open: EOF on standard input would end the process, too.
    let _stdin = held.process.stdin.take();
    kill(
        Pid::from_raw(i32::try_from(held.process.id())?),
        Signal::SIGTERM,
    )?;
    let status = held.process.wait()?;

    assert_eq!(status.signal(), Some(nix::libc::SIGTERM));
    agents_are_gone(&held)?;
    assert!(!held.cgroup.exists());
    assert!(!held.folder.exists());
    Ok(())
}

#[test]
fn the_sweep_leaves_laboratories_of_living_processes_alone() -> Result<()> {
    let mut held = hold()?;

    lab::sweep()?;

    assert!(held.cgroup.exists());
    drop(held.process.stdin.take());
    assert!(held.process.wait()?.success());
    assert!(!held.cgroup.exists());
    Ok(())
}
