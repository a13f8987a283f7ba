//! The helper `culvert sockets`, which ends sockets in pods for a daemon that lacks the privileges to
//! enter their network namespaces.

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use tunnel_tests::{
    clock::Instant,
    place::{ANSWER, Process},
    scale::Scale,
};

use crate::{
    capabilities::{command, granted, start},
    scene::{Scene, WEB, are_answered, are_ended},
    support::{RECOVERY, Way, same, until_same},
};

const COMPONENT: &str = include_str!("../../deploy/sockets/kustomization.yaml");

/// Starts a node with the Service `web`; the daemon has only the capabilities of its manifest.
fn granted_scene() -> Result<Scene> {
    let scene = Scene::leading_to(&["one", "two"], &["one"])?;
    start(&scene.node)?;
    Ok(scene)
}

impl Scene {
    /// Starts the helper with the capabilities of its manifest, and waits until the daemon uses it.
    fn help(&self) -> Result<Process> {
        let helper = self.start_helper(&granted(COMPONENT)?)?;
        self.until_pods(&"helper".into())?;
        Ok(helper)
    }

    fn start_helper(&self, capabilities: &[&str]) -> Result<Process> {
        let words = command(&self.node, capabilities, "sockets");
        self.node.host().command(&words).start()
    }

    /// Waits until `sockets.pods` in the daemon's status has this value.
    fn until_pods(&self, wanted: &serde_json::Value) -> Result<()> {
        let pods = || Ok(self.node.status()?["sockets"]["pods"].take());
        until_same("pods", wanted.clone(), pods).with_context(|| self.node.logs())
    }
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn sockets_in_pods_are_ended_by_the_helper_at_once() -> Result<()> {
    let scene = granted_scene()?;
    let _helper = scene.help()?;
    let sockets = scene.connected(WEB, "one")?;

    let start = Instant::now();
    scene.lead_to(&["two"])?;
    are_ended(&sockets)?;
    let taken = start.elapsed();

    println!("ended within {taken:?} of the change");
    ensure!(
        taken < Scale::from_environment().patience(RECOVERY),
        "only after {taken:?}"
    );
    scene.until_ended(sockets.len())?;
    same("stale", &scene.node.status()?["sockets"]["stale"], 0)
}

#[test]
#[ignore = "no kernel decides it: what two processes of ours tell each other"]
fn the_helper_serves_the_next_daemon_and_ends_what_went_between_them() -> Result<()> {
    let scene = granted_scene()?;
    let _helper = scene.help()?;
    let sockets = scene.connected(WEB, "one")?;

    scene.node.kill9()?;
    scene.lead_to(&["two"])?;
    start(&scene.node)?;

    scene.until_pods(&"helper".into())?;
    are_ended(&sockets)
}

#[test]
fn a_helper_that_has_ended_is_missed_and_its_successor_makes_good_what_it_missed() -> Result<()> {
    let scene = granted_scene()?;
    let first = scene.help()?;
    first.signal(Signal::SIGTERM)?;
    let exit = first.wait(ANSWER)?;
    ensure!(exit.is_success(), "{exit:?}");
    let why = "this process lacks CAP_SYS_ADMIN and CAP_SYS_PTRACE";
    scene.until_pods(&serde_json::json!({ "unreached": why }))?;
    let sockets = scene.connected(WEB, "one")?;

    scene.lead_to(&["two"])?;
    let (of_host, of_pod) = sockets.split_at(Way::UDP.len());
    are_ended(of_host)?;
    are_answered(of_pod, "one")?;
    let _second = scene.help()?;

    are_ended(of_pod)
}

#[test]
#[ignore = "no kernel decides it: the helper reads its own rights, and says so"]
fn a_helper_without_its_rights_says_which_and_ends() -> Result<()> {
    let scene = granted_scene()?;

    let helper = scene.start_helper(&["NET_ADMIN", "SYS_ADMIN"])?;
    let output = helper.finish(ANSWER)?;

    ensure!(!output.exit.is_success());
    let said = "cannot end sockets in pods: this process lacks CAP_SYS_PTRACE";
    ensure!(output.stderr.contains(said), "{}", output.stderr);
    Ok(())
}
