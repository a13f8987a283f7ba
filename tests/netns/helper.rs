//! The helper that ends sockets in pods for a daemon that has no right to enter them.

use std::{net::UdpSocket, ops::Deref};

use anyhow::{Context as _, Result, ensure};
use nix::sys::signal::Signal;
use tunnel_tests::{
    clock::Instant,
    place::{ANSWER, Process},
    scale::Scale,
    wait,
};

use crate::{
    capabilities::{granted, start, with},
    scene::{Client, Scene, WEB},
    support::{CHANGE, RECOVERY, Way, ask, is_ended, same},
};

const COMPONENT: &str = include_str!("../../deploy/sockets/kustomization.yaml");

/// A node whose daemon has the rights of its manifest, and a Service.
struct Stage(Scene);

impl Deref for Stage {
    type Target = Scene;

    fn deref(&self) -> &Scene {
        &self.0
    }
}

impl Stage {
    fn new() -> Result<Self> {
        let scene = Scene::new(&["one", "two"])?;
        scene.lead_to(&["one"])?;
        start(&scene.node)?;
        Ok(Self(scene))
    }

    /// Starts the helper as its manifest has it started.
    fn help(&self) -> Result<Process> {
        let helper = self.start_helper(&granted(COMPONENT)?)?;
        self.until_pods(&"helper".into())?;
        Ok(helper)
    }

    fn start_helper(&self, capabilities: &[&str]) -> Result<Process> {
        let mut words = with(capabilities);
        let program = self.node.program().display().to_string();
        let config = self.node.config_path().display().to_string();
        words.extend([program, "sockets".to_owned(), "--config".to_owned(), config]);
        self.node.host().command(&words).start()
    }

    /// Waits until the daemon says that of pods.
    fn until_pods(&self, wanted: &serde_json::Value) -> Result<()> {
        let pods = || {
            self.node
                .status()
                .map(|status| status["sockets"]["pods"].clone())
        };
        wait::until(CHANGE, || pods().is_ok_and(|pods| pods == *wanted))
            .with_context(|| format!("{:?}\n{}", pods(), self.node.logs()))
    }
}

fn are_ended(sockets: &[(Client<'_>, UdpSocket)]) -> Result<()> {
    for (client, socket) in sockets {
        is_ended(socket).with_context(|| client.to_string())?;
    }
    Ok(())
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn sockets_in_pods_are_ended_by_the_helper_at_once() -> Result<()> {
    let stage = Stage::new()?;
    let _helper = stage.help()?;
    let sockets = stage.connected(WEB, "one")?;

    let start = Instant::now();
    stage.lead_to(&["two"])?;
    are_ended(&sockets)?;
    let taken = start.elapsed();

    println!("ended within {taken:?} of the change");
    ensure!(
        taken < Scale::from_environment().patience(RECOVERY),
        "only after {taken:?}"
    );
    let count = u64::try_from(sockets.len())?;
    wait::until(CHANGE, || {
        let ended = stage.node.reason("socket_ended");
        ended.is_ok_and(|ended| ended == count)
    })?;
    same("left", &stage.node.status()?["sockets"]["left"], &0.into())
}

#[test]
#[ignore = "no kernel decides it: what two processes of ours tell each other"]
fn the_helper_serves_the_next_daemon_and_ends_what_went_between_them() -> Result<()> {
    let stage = Stage::new()?;
    let _helper = stage.help()?;
    let sockets = stage.connected(WEB, "one")?;

    stage.node.kill9()?;
    stage.lead_to(&["two"])?;
    start(&stage.node)?;

    stage.until_pods(&"helper".into())?;
    are_ended(&sockets)
}

#[test]
fn a_helper_that_has_ended_is_missed_and_its_successor_makes_good_what_it_missed() -> Result<()> {
    let stage = Stage::new()?;
    let first = stage.help()?;
    first.signal(Signal::SIGTERM)?;
    let exit = first.wait(ANSWER)?;
    ensure!(exit.is_success(), "{exit:?}");
    let why = "this process lacks CAP_SYS_ADMIN and CAP_SYS_PTRACE";
    stage.until_pods(&serde_json::json!({ "unreached": why }))?;
    let sockets = stage.connected(WEB, "one")?;

    stage.lead_to(&["two"])?;
    let (of_host, of_pod) = sockets.split_at(Way::UDP.len());
    are_ended(of_host)?;
    for (_, socket) in of_pod {
        same("server", ask(socket)?.as_str(), "one")?;
    }
    let _second = stage.help()?;

    are_ended(of_pod)
}

#[test]
#[ignore = "no kernel decides it: the helper reads its own rights, and says so"]
fn a_helper_without_its_rights_says_which_and_ends() -> Result<()> {
    let stage = Stage::new()?;

    let helper = stage.start_helper(&["NET_ADMIN", "SYS_ADMIN"])?;
    let output = helper.finish(ANSWER)?;

    ensure!(!output.exit.is_success());
    let said = "cannot end sockets in pods: this process lacks CAP_SYS_PTRACE";
    ensure!(output.stderr.contains(said), "{}", output.stderr);
    Ok(())
}
