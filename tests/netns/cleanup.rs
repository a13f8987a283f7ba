//! `culvert cleanup`, and two instances beside each other.

use std::{fs, net::SocketAddr, path::PathBuf, sync::Arc};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    instance::{Instance, Settings},
    node::Node,
    place::Place,
    pod::{Pod, Server},
    wait,
};

use crate::support::{
    CHANGE, HTTP, Vip, Way, addresses, counted, http, maps_folder, same, serve, until_backends,
};

const WEB: Vip = Vip::of(10);

/// A node whose daemon has programmed one Service.
struct Stage {
    node: Node,
    client: Arc<Pod>,
    _server: Server,
}

impl Stage {
    fn prepared() -> Result<Self> {
        let node = Node::new()?;
        let (client, backend) = (node.pod("client")?, node.pod("backend")?);
        node.apply(WEB.service("web").backends(addresses(&[&*backend])))?;
        let server = serve(&backend)?;
        Ok(Self {
            node,
            client,
            _server: server,
        })
    }

    fn new() -> Result<Self> {
        let stage = Self::prepared()?;
        stage.node.start()?;
        Ok(stage)
    }

    /// Whether each connect, from the host and a pod, over either family, is translated.
    fn connects(&self) -> impl Iterator<Item = bool> {
        let places: [&Place; 2] = [self.node.host(), &self.client];
        let each = places
            .into_iter()
            .flat_map(|place| Way::TCP.map(|way| (place, way)));
        each.map(|(place, way)| way.connect(place, WEB, HTTP).is_ok())
    }

    fn is_translated(&self) -> bool {
        self.connects().all(|is_translated| is_translated)
    }

    /// Waits until nothing is translated any more: the kernel takes a link down a moment after its
    /// last pin has gone.
    fn until_untouched(&self) -> Result<()> {
        wait::until(CHANGE, || {
            self.connects().all(|is_translated| !is_translated)
        })
    }

    fn cleanup(&self) -> Result<String> {
        let output = self.node.culvert(&["cleanup"])?;
        ensure!(output.exit.is_success(), "{output:?}");
        Ok(output.stdout)
    }
}

#[test]
#[ignore = "no kernel decides it: files are removed; the last test here tries the programs"]
fn cleanup_removes_what_a_node_made_and_nothing_else() -> Result<()> {
    let stage = Stage::new()?;
    let pins = stage.node.bpffs();
    stage.node.stop()?;
    ensure!(stage.is_translated(), "the data path stays after a stop");
    let stranger = pins.join("stranger");
    fs::hard_link(pins.join(maps_folder("/svc")), &stranger)?;

    let said = stage.cleanup()?;

    ensure!(said.contains("stranger"), "{said}");
    stage.until_untouched()?;
    ensure!(!pins.join(maps_folder("")).exists() && !pins.join("links").exists());
    ensure!(stranger.exists());
    // The folder of state was there before the daemon.
    ensure!(stage.node.state().is_dir() && !stage.node.admin_socket().exists());
    ensure!(stage.node.config_path().exists() && stage.node.manifests().join("web.yaml").exists());

    fs::remove_file(&stranger)?;
    stage.cleanup()?;
    ensure!(!pins.exists());
    let said = stage.cleanup()?;
    ensure!(said.contains("nothing to remove"), "{said}");

    stage.node.start()?;
    ensure!(stage.is_translated());
    Ok(())
}

#[test]
#[ignore = "no kernel decides it: files are removed"]
fn cleanup_after_a_kill_removes_the_socket_and_the_state_that_the_daemon_made() -> Result<()> {
    let stage = Stage::prepared()?;
    fs::remove_dir(stage.node.state())?;
    stage.node.start()?;
    stage.node.kill9()?;
    ensure!(stage.node.admin_socket().exists());

    stage.cleanup()?;

    ensure!(!stage.node.state().exists() && !stage.node.bpffs().exists());
    stage.until_untouched()
}

#[test]
#[ignore = "no kernel decides it: files are removed"]
fn cleanup_leaves_what_others_put_into_the_state() -> Result<()> {
    let stage = Stage::prepared()?;
    fs::remove_dir(stage.node.state())?;
    stage.node.start()?;
    stage.node.stop()?;
    let note = stage.node.state().join("note");
    fs::write(&note, "mine")?;

    let said = stage.cleanup()?;

    ensure!(note.exists());
    ensure!(said.contains("left alone"), "{said}");
    Ok(())
}

#[test]
#[ignore = "no kernel decides it: a lock on a file"]
fn cleanup_is_refused_while_a_daemon_runs() -> Result<()> {
    let stage = Stage::new()?;
    let pid = stage.node.daemon_pid().context("it runs")?;

    let output = stage.node.culvert(&["cleanup"])?;

    same("exit", output.exit.code, Some(1))?;
    ensure!(
        output.stderr.contains(&format!("process {pid}")),
        "{output:?}"
    );
    ensure!(stage.node.is_ready() && stage.is_translated());
    Ok(())
}

/// A second instance on the node of the first: in a cgroup, and with folders, of its own.
struct Beside {
    instance: Instance,
    client: Place,
}

impl Beside {
    fn new(node: &Node, pod: &Pod) -> Result<Self> {
        let topology = node.topology();
        let folder: PathBuf = topology.lab().folder().join("beside");
        let pins = folder.join("bpffs");
        let host = topology.beside(node.host(), "beside/host", Some(pins))?;
        let client = topology.beside(pod, "beside/client", None)?;
        let mut settings = Settings::from_environment()?;
        settings.admin = SocketAddr::from(([127, 0, 0, 1], 20249));
        settings.healthz = SocketAddr::from(([127, 0, 0, 1], 20256));
        let cgroup = topology.lab().cgroup().join("beside");
        let instance = Instance::new(host, folder, &cgroup, settings)?;
        Ok(Self { instance, client })
    }
}

#[test]
fn two_instances_beside_each_other_do_not_see_each_other() -> Result<()> {
    let stage = Stage::new()?;
    let other = stage.node.pod("other")?;
    let _server = serve(&other)?;
    let beside = Beside::new(&stage.node, &stage.client)?;
    // The same address, with another backend.
    let web = WEB.service("web").backends(addresses(&[&*other]));
    beside.instance.apply(web)?;
    beside.instance.start()?;
    until_backends(&beside.instance, "web", 1)?;

    let ask_by = |way: Way, place: &Place| http(way.connect(place, WEB, HTTP)?);
    for way in Way::TCP {
        let ask = |place: &Place| ask_by(way, place);
        let (first, grown) = counted(&beside.instance, &["translated"], || ask(&stage.client))?;
        same("server", (first, grown), ("backend".to_owned(), vec![0]))?;
        let (second, grown) = counted(&stage.node, &["translated"], || ask(&beside.client))?;
        same("server", (second, grown), ("other".to_owned(), vec![0]))?;
    }

    beside.instance.stop()?;
    let output = beside.instance.culvert(&["cleanup"])?;
    ensure!(output.exit.is_success(), "{output:?}");
    for way in Way::TCP {
        wait::until(CHANGE, || ask_by(way, &beside.client).is_err())?;
        same("server", ask_by(way, &stage.client)?, "backend".to_owned())?;
    }
    ensure!(stage.node.is_ready());
    Ok(())
}
