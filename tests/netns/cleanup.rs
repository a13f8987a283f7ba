//! Tests `culvert cleanup`, and two instances of Culvert on one node.

use std::{fs, net::SocketAddr, path::PathBuf};

use anyhow::{Result, ensure};
use tunnel_tests::{
    culvert_instance::{Instance, InstanceSettings},
    node::Node,
    pod::Pod,
    sandbox::Sandbox,
    wait,
};

use crate::{
    fixture::{Scene, WEB},
    support::{
        CHANGE_TIMEOUT, Dialer, HTTP, addresses, count_during, ensure_eq, maps_directory, serve,
        until_backends,
    },
};

/// Connects from the host and from the client pod with every TCP dialer. Yields true for each connection that
/// was translated, and false for each one that was not.
fn connects(scene: &Scene) -> impl Iterator<Item = bool> {
    let each = scene.sandboxes().into_iter();
    let each = each.flat_map(|(_, sandbox)| Dialer::TCP.map(|dialer| (sandbox, dialer)));
    each.map(|(sandbox, dialer)| dialer.connect(sandbox, WEB, HTTP).is_ok())
}

fn is_translated(scene: &Scene) -> bool {
    connects(scene).all(|is_translated| is_translated)
}

/// Waits until connections are no longer translated. The kernel detaches a link shortly after its last pin is
/// removed.
fn until_untranslated(scene: &Scene) -> Result<()> {
    wait::until(CHANGE_TIMEOUT, || {
        connects(scene).all(|is_translated| !is_translated)
    })
}

/// Runs `culvert cleanup`, which must succeed, and returns its output.
pub(crate) fn cleanup(instance: &Instance) -> Result<String> {
    let output = instance.culvert(&["cleanup"])?;
    ensure!(output.exit.is_success(), "{output:?}");
    Ok(output.stdout)
}

#[test]
#[ignore = "independent of the kernel: files are removed; the last test in this file detaches programs"]
fn cleanup_removes_everything_that_a_node_created_and_nothing_else() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let pins = scene.node.bpffs();
    scene.node.stop()?;
    ensure!(is_translated(&scene), "the data path is gone after a stop");
    let stranger = pins.join("stranger");
    fs::hard_link(pins.join(maps_directory("/services")), &stranger)?;

    let output = cleanup(&scene.node)?;

    ensure!(output.contains("stranger"), "{output}");
    until_untranslated(&scene)?;
    ensure!(!pins.join(maps_directory("")).exists() && !pins.join("links").exists());
    ensure!(stranger.exists());
    // The state directory existed before the daemon started, so cleanup leaves it in place.
    ensure!(scene.node.state().is_dir() && !scene.node.admin_socket().exists());
    ensure!(scene.node.config_path().exists() && scene.node.manifests().join("web.yaml").exists());

    fs::remove_file(&stranger)?;
    cleanup(&scene.node)?;
    ensure!(!pins.exists());
    let output = cleanup(&scene.node)?;
    ensure!(output.contains("nothing to remove"), "{output}");

    scene.node.start()?;
    ensure!(is_translated(&scene));
    Ok(())
}

/// Starts a node whose daemon must create its own state directory.
fn start_without_state() -> Result<Scene> {
    let scene = Scene::prepare_web(&["backend"], &["backend"])?;
    fs::remove_dir(scene.node.state())?;
    scene.node.start()?;
    Ok(scene)
}

#[test]
#[ignore = "independent of the kernel: files are removed"]
fn cleanup_after_a_kill_removes_the_socket_and_the_state_that_the_daemon_created() -> Result<()> {
    let scene = start_without_state()?;
    scene.node.kill9()?;
    ensure!(scene.node.admin_socket().exists());

    cleanup(&scene.node)?;

    ensure!(!scene.node.state().exists() && !scene.node.bpffs().exists());
    until_untranslated(&scene)
}

#[test]
#[ignore = "independent of the kernel: files are removed"]
fn cleanup_leaves_foreign_files_in_the_state_directory() -> Result<()> {
    let scene = start_without_state()?;
    scene.node.stop()?;
    let note = scene.node.state().join("note");
    fs::write(&note, "mine")?;

    let output = cleanup(&scene.node)?;

    ensure!(note.exists() && output.contains("left alone"), "{output}");
    Ok(())
}

/// A second instance of Culvert on the same node, with its own cgroup, directories and client.
struct SecondInstance {
    instance: Instance,
    client: Sandbox,
}

impl SecondInstance {
    fn new(node: &Node, pod: &Pod) -> Result<Self> {
        let topology = node.network();
        let directory: PathBuf = topology.lab().directory().join("beside");
        let pins = directory.join("bpffs");
        let host = topology.share_namespace(node.host(), "beside/host", Some(pins))?;
        let client = topology.share_namespace(pod, "beside/client", None)?;
        let mut settings = InstanceSettings::from_environment()?;
        settings.admin = SocketAddr::from(([127, 0, 0, 1], 20249));
        settings.healthz = SocketAddr::from(([127, 0, 0, 1], 20256));
        let cgroup = topology.lab().cgroup().join("beside");
        let instance = Instance::new(host, directory, &cgroup, settings)?;
        Ok(Self { instance, client })
    }
}

#[test]
fn two_instances_on_one_node_do_not_affect_each_other() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let other = scene.node.pod("other")?;
    let _server = serve(&other)?;
    let other_instance = SecondInstance::new(&scene.node, &scene.client)?;
    // The second instance has a Service with the same address as the first instance's, but with another
    // backend.
    let web = WEB.service("web").backends(addresses(&[&*other]));
    other_instance.instance.apply(web)?;
    other_instance.instance.start()?;
    until_backends(&other_instance.instance, "web", 1)?;

    for dialer in Dialer::TCP {
        let dial = |sandbox: &Sandbox| dialer.dial(sandbox, WEB, HTTP);
        let (first, increases) = count_during(&other_instance.instance, &["translated"], || {
            dial(&scene.client)
        })?;
        ensure_eq("server", (&*first, increases), ("backend", vec![0]))?;
        let (second, increases) = count_during(&scene.node, &["translated"], || {
            dial(&other_instance.client)
        })?;
        ensure_eq("server", (&*second, increases), ("other", vec![0]))?;
    }

    other_instance.instance.stop()?;
    cleanup(&other_instance.instance)?;
    for dialer in Dialer::TCP {
        wait::until(CHANGE_TIMEOUT, || {
            dialer.dial(&other_instance.client, WEB, HTTP).is_err()
        })?;
        dialer.expect_served(&scene.client, WEB, HTTP, "backend")?;
    }
    ensure!(scene.node.is_ready());
    Ok(())
}
