//! `culvert cleanup`, and two instances on one node.

use std::{fs, net::SocketAddr, path::PathBuf};

use anyhow::{Result, ensure};
use tunnel_tests::{
    instance::{Instance, Settings},
    node::Node,
    place::Place,
    pod::Pod,
    wait,
};

use crate::{
    scene::{Scene, WEB},
    support::{CHANGE, HTTP, Way, addresses, counted, maps_folder, same, serve, until_backends},
};

/// Connects from the host and the client pod with every TCP dialer; yields true for a translated
/// connect.
fn connects(scene: &Scene) -> impl Iterator<Item = bool> {
    let each = scene.places().into_iter();
    let each = each.flat_map(|(_, place)| Way::TCP.map(|way| (place, way)));
    each.map(|(place, way)| way.connect(place, WEB, HTTP).is_ok())
}

fn is_translated(scene: &Scene) -> bool {
    connects(scene).all(|is_translated| is_translated)
}

/// Waits until no connect is translated. The kernel detaches a link a moment after its last pin is
/// removed.
fn until_untouched(scene: &Scene) -> Result<()> {
    wait::until(CHANGE, || {
        connects(scene).all(|is_translated| !is_translated)
    })
}

/// Runs `culvert cleanup`, which must succeed; returns its output.
pub(crate) fn cleanup(instance: &Instance) -> Result<String> {
    let output = instance.culvert(&["cleanup"])?;
    ensure!(output.exit.is_success(), "{output:?}");
    Ok(output.stdout)
}

#[test]
#[ignore = "no kernel decides it: files are removed; the last test here tries the programs"]
fn cleanup_removes_what_a_node_made_and_nothing_else() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let pins = scene.node.bpffs();
    scene.node.stop()?;
    ensure!(is_translated(&scene), "the data path is gone after a stop");
    let stranger = pins.join("stranger");
    fs::hard_link(pins.join(maps_folder("/services")), &stranger)?;

    let said = cleanup(&scene.node)?;

    ensure!(said.contains("stranger"), "{said}");
    until_untouched(&scene)?;
    ensure!(!pins.join(maps_folder("")).exists() && !pins.join("links").exists());
    ensure!(stranger.exists());
    // The state folder existed before the daemon started, so the cleanup leaves it.
    ensure!(scene.node.state().is_dir() && !scene.node.admin_socket().exists());
    ensure!(scene.node.config_path().exists() && scene.node.manifests().join("web.yaml").exists());

    fs::remove_file(&stranger)?;
    cleanup(&scene.node)?;
    ensure!(!pins.exists());
    let said = cleanup(&scene.node)?;
    ensure!(said.contains("nothing to remove"), "{said}");

    scene.node.start()?;
    ensure!(is_translated(&scene));
    Ok(())
}

/// Starts a node whose state folder the daemon creates.
fn with_own_state() -> Result<Scene> {
    let scene = Scene::leading_to(&["backend"], &["backend"])?;
    fs::remove_dir(scene.node.state())?;
    scene.node.start()?;
    Ok(scene)
}

#[test]
#[ignore = "no kernel decides it: files are removed"]
fn cleanup_after_a_kill_removes_the_socket_and_the_state_that_the_daemon_made() -> Result<()> {
    let scene = with_own_state()?;
    scene.node.kill9()?;
    ensure!(scene.node.admin_socket().exists());

    cleanup(&scene.node)?;

    ensure!(!scene.node.state().exists() && !scene.node.bpffs().exists());
    until_untouched(&scene)
}

#[test]
#[ignore = "no kernel decides it: files are removed"]
fn cleanup_leaves_what_others_put_into_the_state() -> Result<()> {
    let scene = with_own_state()?;
    scene.node.stop()?;
    let note = scene.node.state().join("note");
    fs::write(&note, "mine")?;

    let said = cleanup(&scene.node)?;

    ensure!(note.exists() && said.contains("left alone"), "{said}");
    Ok(())
}

/// A second instance of Culvert on the same node, with its own cgroup, folders and client.
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
    let scene = Scene::web(&["backend"])?;
    let other = scene.node.pod("other")?;
    let _server = serve(&other)?;
    let beside = Beside::new(&scene.node, &scene.client)?;
    // Both instances have a Service with the same address, with different backends.
    let web = WEB.service("web").backends(addresses(&[&*other]));
    beside.instance.apply(web)?;
    beside.instance.start()?;
    until_backends(&beside.instance, "web", 1)?;

    for way in Way::TCP {
        let ask = |place: &Place| way.dial(place, WEB, HTTP);
        let (first, grown) = counted(&beside.instance, &["translated"], || ask(&scene.client))?;
        same("server", (&*first, grown), ("backend", vec![0]))?;
        let (second, grown) = counted(&scene.node, &["translated"], || ask(&beside.client))?;
        same("server", (&*second, grown), ("other", vec![0]))?;
    }

    beside.instance.stop()?;
    cleanup(&beside.instance)?;
    for way in Way::TCP {
        wait::until(CHANGE, || way.dial(&beside.client, WEB, HTTP).is_err())?;
        way.is_served(&scene.client, WEB, HTTP, "backend")?;
    }
    ensure!(scene.node.is_ready());
    Ok(())
}
