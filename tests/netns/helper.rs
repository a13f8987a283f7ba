//! The helper that ends sockets in pods for a daemon that has no right to enter them.

use std::{net::UdpSocket, sync::Arc, time::Duration};

use anyhow::{Context as _, Result, ensure};
use nix::{errno::Errno, sys::signal::Signal};
use tunnel_tests::{
    clock::Instant,
    node::Node,
    place::{ANSWER, Place, Process},
    pod::{Pod, Server},
    scale::Scale,
    wait,
};

use crate::{
    capabilities::{granted, start, with},
    support::{CHANGE, DNS, Vip, Way, addresses, ask, clients, errno, same, serve},
};

const WEB: Vip = Vip::of(10);
const COMPONENT: &str = include_str!("../../deploy/sockets/kustomization.yaml");

/// How long a client may be without its backend: 100 ms is what is wanted, and the rest is for
/// machines that are slow or busy.
const RECOVERY: Duration = Duration::from_secs(1);

/// A node whose daemon has the rights of its manifest, and a Service.
struct Stage {
    node: Node,
    client: Arc<Pod>,
    one: Arc<Pod>,
    two: Arc<Pod>,
    _servers: [Server; 2],
}

impl Stage {
    fn new() -> Result<Self> {
        let node = Node::new()?;
        let client = node.pod("client")?;
        let (one, two) = (node.pod("one")?, node.pod("two")?);
        let servers = [serve(&one)?, serve(&two)?];
        let stage = Self {
            node,
            client,
            one,
            two,
            _servers: servers,
        };
        stage.lead_to(&stage.one)?;
        start(&stage.node)?;
        Ok(stage)
    }

    fn lead_to(&self, backend: &Pod) -> Result<()> {
        self.node
            .apply(WEB.service("web").backends(addresses(&[backend])))
    }

    /// Starts the helper as its manifest has it started.
    fn help(&self) -> Result<Process> {
        let mut words = with(&granted(COMPONENT)?);
        let program = self.node.program().display().to_string();
        let config = self.node.config_path().display().to_string();
        words.extend([program, "sockets".to_owned(), "--config".to_owned(), config]);
        let helper = self.node.host().command(&words).start()?;
        self.until_pods(&"helper".into())?;
        Ok(helper)
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

    /// Connected sockets of the host and of a pod that this server answers.
    fn connected(&self, name: &str) -> Result<Vec<UdpSocket>> {
        let open = |place: &Place, way: Way| -> Result<UdpSocket> {
            let socket = way.udp(place)?;
            socket.connect(way.to(WEB, DNS))?;
            same("server", ask(&socket)?, name.to_owned())?;
            Ok(socket)
        };
        let mut sockets = Vec::new();
        for (from, place) in clients(self.node.host(), &self.client) {
            for way in Way::UDP {
                let socket = open(place, way).with_context(|| format!("{way:?} from the {from}"));
                sockets.push(socket?);
            }
        }
        Ok(sockets)
    }
}

fn are_ended(sockets: &[UdpSocket]) -> Result<()> {
    for socket in sockets {
        let error = errno(socket.recv(&mut [0; 64]));
        same("error", error, Errno::ECONNABORTED)?;
    }
    Ok(())
}

#[test]
#[expect(clippy::print_stdout, reason = "shown with --nocapture")]
fn sockets_in_pods_are_ended_by_the_helper_at_once() -> Result<()> {
    let stage = Stage::new()?;
    let _helper = stage.help()?;
    let sockets = stage.connected("one")?;

    let start = Instant::now();
    stage.lead_to(&stage.two)?;
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
    let sockets = stage.connected("one")?;

    stage.node.kill9()?;
    stage.lead_to(&stage.two)?;
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
    let sockets = stage.connected("one")?;

    stage.lead_to(&stage.two)?;
    let (of_host, of_pod) = sockets.split_at(Way::UDP.len());
    are_ended(of_host)?;
    for socket in of_pod {
        same("server", ask(socket)?, "one".to_owned())?;
    }
    let _second = stage.help()?;

    are_ended(of_pod)
}

#[test]
#[ignore = "no kernel decides it: the helper reads its own rights, and says so"]
fn a_helper_without_its_rights_says_which_and_ends() -> Result<()> {
    let stage = Stage::new()?;
    let mut words = with(&["NET_ADMIN", "SYS_ADMIN"]);
    let program = stage.node.program().display().to_string();
    let config = stage.node.config_path().display().to_string();
    words.extend([program, "sockets".to_owned(), "--config".to_owned(), config]);

    let output = stage.node.host().command(&words).start()?.finish(ANSWER)?;

    ensure!(!output.exit.is_success());
    let said = "cannot end sockets in pods: this process lacks CAP_SYS_PTRACE";
    ensure!(output.stderr.contains(said), "{}", output.stderr);
    Ok(())
}
