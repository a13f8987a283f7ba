//! Tests the helper `culvert sockets`. It terminates sockets in pods for a daemon that lacks the privileges
//! to enter the pods' network namespaces.

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use tunnel_tests::{
    clock::Instant,
    feature::{self, Feature},
    load_scale::LoadScale,
    sandbox::{Process, RESPONSE_TIMEOUT},
    test_name,
};

use crate::{
    capabilities::{culvert_command, granted, start},
    fixture::{Scene, WEB, expect_all_ended, expect_answers},
    support::{Dialer, RECOVERY_LIMIT, ensure_eq, until_eq},
};

const COMPONENT: &str = include_str!("../../deploy/sockets/kustomization.yaml");

/// Starts a node with the Service `web`, and a daemon that has only the capabilities granted by its manifest.
fn start_with_granted() -> Result<Scene> {
    let scene = Scene::prepare_web(&["one", "two"], &["one"])?;
    start(&scene.node)?;
    Ok(scene)
}

impl Scene {
    /// Starts the helper with the capabilities granted by its manifest, and waits until the daemon uses it.
    fn start_ready_helper(&self) -> Result<Process> {
        let helper = self.start_helper(&granted(COMPONENT)?)?;
        self.until_pods(&"helper".into())?;
        Ok(helper)
    }

    fn start_helper(&self, capabilities: &[&str]) -> Result<Process> {
        let words = culvert_command(&self.node, capabilities, "sockets");
        self.node.host().command(&words).start()
    }

    /// Waits until the field `sockets.pods` in the daemon's status has the given value.
    fn until_pods(&self, wanted: &serde_json::Value) -> Result<()> {
        let pods = || Ok(self.node.status()?["sockets"]["pods"].take());
        until_eq("pods", wanted.clone(), pods).with_context(|| self.node.logs())
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn sockets_in_pods_are_ended_by_the_helper_at_once() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = start_with_granted()?;
    let _helper = scene.start_ready_helper()?;
    let sockets = scene.connect_udp_clients(WEB, "one")?;

    let start = Instant::now();
    scene.apply_web(&["two"])?;
    expect_all_ended(&sockets)?;
    let taken = start.elapsed();

    println!("ended within {taken:?} of the change");
    ensure!(
        taken < LoadScale::from_environment().timeout(RECOVERY_LIMIT),
        "only after {taken:?}"
    );
    scene.until_ended(sockets.len())?;
    ensure_eq("stale", &scene.node.status()?["sockets"]["stale"], 0)
}

#[test]
#[ignore = "independent of the kernel: messages between two processes of Culvert"]
fn the_helper_serves_the_next_daemon_and_ends_sockets_of_backends_removed_in_between() -> Result<()>
{
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = start_with_granted()?;
    let _helper = scene.start_ready_helper()?;
    let sockets = scene.connect_udp_clients(WEB, "one")?;

    scene.node.kill9()?;
    scene.apply_web(&["two"])?;
    start(&scene.node)?;

    scene.until_pods(&"helper".into())?;
    expect_all_ended(&sockets)
}

#[test]
fn a_missing_helper_is_reported_and_the_next_one_ends_the_remaining_sockets() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = start_with_granted()?;
    let first = scene.start_ready_helper()?;
    first.signal(Signal::SIGTERM)?;
    let exit = first.wait(RESPONSE_TIMEOUT)?;
    ensure!(exit.is_success(), "{exit:?}");
    let reason = "this process lacks CAP_SYS_ADMIN and CAP_SYS_PTRACE";
    scene.until_pods(&serde_json::json!({ "unreached": reason }))?;
    let sockets = scene.connect_udp_clients(WEB, "one")?;

    scene.apply_web(&["two"])?;
    let (of_host, of_pod) = sockets.split_at(Dialer::UDP.len());
    expect_all_ended(of_host)?;
    expect_answers(of_pod, "one")?;
    let _second = scene.start_ready_helper()?;

    expect_all_ended(of_pod)
}

#[test]
#[ignore = "independent of the kernel: the helper reads and reports its own capabilities"]
fn a_helper_without_a_capability_names_it_and_exits() -> Result<()> {
    let scene = start_with_granted()?;

    let helper = scene.start_helper(&["NET_ADMIN", "SYS_ADMIN"])?;
    let output = helper.finish(RESPONSE_TIMEOUT)?;

    ensure!(!output.exit.is_success());
    let message = "cannot end sockets in pods: this process lacks CAP_SYS_PTRACE";
    ensure!(output.stderr.contains(message), "{}", output.stderr);
    Ok(())
}
