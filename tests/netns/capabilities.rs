//! The daemon needs every capability that `deploy/node` grants, and no other root privileges.

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    culvert_instance::{Instance, InstanceSettings},
    feature::{self, Feature},
    node::Node,
    test_name,
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

use crate::{
    fixture::{Scene, WEB, expect_all_ended, expect_answers},
    support::{CHANGE_TIMEOUT, Dialer, HTTP, ensure_eq, local_routes, until_eq},
};

const MANIFEST: &str = include_str!("../../deploy/node/node.yaml");
const CLEANUP: &str = include_str!("../../deploy/cleanup/pod.yaml");

/// A capability that the daemon also needs on kernels before Linux 5.11, and that `deploy/linux-5.10` grants.
const OLD_KERNEL_CAPABILITY: &str = "SYS_RESOURCE";

/// Returns the capabilities that a manifest grants to its only unprivileged container.
pub(crate) fn granted(manifest: &str) -> Result<Vec<&str>> {
    let list = manifest.split_once("add: [").map(|(_, rest)| rest);
    let list = list.and_then(|rest| rest.split_once(']'));
    let (list, _) = list.context("the manifest adds no capabilities")?;
    Ok(list.split(", ").collect())
}

/// Builds the prefix of a command line that runs a program as root with only the given capabilities, as a
/// container runtime does.
fn setpriv(capabilities: &[&str]) -> Vec<String> {
    let bounds: String = capabilities
        .iter()
        .map(|name| format!(",+{}", name.to_lowercase()))
        .collect();
    vec![
        "setpriv".to_owned(),
        format!("--bounding-set=-all{bounds}"),
        "--inh-caps=-all".to_owned(),
        "--no-new-privs".to_owned(),
    ]
}

/// Builds a command line that runs a `culvert` subcommand as root with only the given capabilities.
pub(crate) fn culvert_command(
    instance: &Instance,
    capabilities: &[&str],
    name: &str,
) -> Vec<String> {
    let paths = [instance.program(), &instance.config_path()];
    let [program, config] = paths.map(|path| path.display().to_string());
    let words = [program, name.to_owned(), "--config".to_owned(), config];
    [setpriv(capabilities), words.into()].concat()
}

/// Starts the daemon with the capabilities that the manifest grants, plus [`OLD_KERNEL_CAPABILITY`] on
/// kernels before Linux 5.11.
pub(crate) fn start(instance: &Instance) -> Result<()> {
    let granted = granted(MANIFEST)?;
    instance.launch_with(&setpriv(&granted))?;
    let Err(error) = instance.wait_ready() else {
        return Ok(());
    };
    ensure!(instance.logs().contains("CAP_SYS_RESOURCE"), "{error:#}");
    drop(instance.kill9());
    instance.launch_with(&setpriv(&[&granted[..], &[OLD_KERNEL_CAPABILITY]].concat()))?;
    instance.wait_ready()
}

#[test]
fn a_service_is_served_by_a_daemon_with_the_capabilities_of_the_manifest() -> Result<()> {
    let scene = Scene::prepare_web(&["backend"], &["backend"])?;

    start(&scene.node)?;

    scene.expect_served(WEB, "backend")?;
    let to = format!("{}:{HTTP}", WEB.v4);
    let explained = scene
        .node
        .culvert(&["explain", "--from", "192.0.2.2", "--to", &to])?;
    ensure!(
        explained.stdout.contains("delivered (translated)"),
        "{} {}",
        explained.stdout,
        explained.stderr
    );
    Ok(())
}

#[test]
fn a_kubelet_behind_the_edge_is_reached_by_a_daemon_with_the_capabilities_of_the_manifest()
-> Result<()> {
    let testbed = TunnelTestbed::prepare(InstanceSettings::from_environment()?)?;

    start(testbed.node())?;
    testbed.edge().start_agent(KUBELET_PORTS)?;

    testbed.wait_for_kubelet()
}

#[test]
#[ignore = "independent of the kernel: status and log texts; `socket_helper` ends sockets on every kernel"]
fn with_the_capabilities_of_the_manifest_only_sockets_of_the_host_are_ended_and_that_is_reported()
-> Result<()> {
    if feature::lacks(test_name!(), &[Feature::SocketIterator])? {
        return Ok(());
    }
    let scene = Scene::prepare_web(&["one", "two"], &["one"])?;
    let node = &scene.node;
    start(node)?;
    let sockets = scene.connect_udp_clients(WEB, "one")?;
    let (of_host, of_pod) = sockets.split_at(Dialer::UDP.len());

    scene.apply_web(&["two"])?;

    expect_all_ended(of_host)?;
    expect_answers(of_pod, "one")?;
    let reason = "this process lacks CAP_SYS_ADMIN and CAP_SYS_PTRACE";
    // The status shows a scan's result only once the scan is complete.
    let status_fields = || {
        let sockets = node.status()?["sockets"].take();
        Ok([
            sockets["stale"].clone(),
            sockets["pods"]["unreached"].clone(),
        ])
    };
    let expected = [serde_json::Value::from(of_pod.len()), reason.into()];
    until_eq("stale sockets, reason", expected, status_fields)?;
    let status = node.culvert(&["status"])?.stdout;
    ensure!(
        status.contains(&format!("not in pods: {reason}")),
        "{status}"
    );
    wait::until(CHANGE_TIMEOUT, || node.logs().contains(reason))?;
    ensure_eq("times logged", node.logs().matches(reason).count(), 1)
}

#[test]
#[ignore = "independent of the kernel: the daemon reads and reports its own capabilities"]
fn a_daemon_without_one_of_the_capabilities_names_it_and_attaches_nothing() -> Result<()> {
    let granted = granted(MANIFEST)?;
    for lacking in &granted {
        let node = Node::new()?;
        let rest = granted.iter().copied().filter(|name| name != lacking);
        let rest: Vec<&str> = rest.collect();

        node.launch_with(&setpriv(&rest))?;

        node.wait_ready()
            .err()
            .with_context(|| format!("the daemon is ready without {lacking}"))?;
        let logs = node.logs();
        let named = format!("lacks CAP_{lacking},");
        ensure!(logs.contains(&named), "{lacking}: {logs}");
        ensure!(!node.bpffs().join("links").exists(), "{lacking}: {logs}");
    }
    Ok(())
}

#[test]
fn a_cleanup_with_the_capabilities_of_its_manifest_removes_programs_maps_and_routes() -> Result<()>
{
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    node.stop()?;

    node.host()
        .run(&culvert_command(node, &granted(CLEANUP)?, "cleanup"))?;

    ensure!(!node.bpffs().exists(), "pins are left after the cleanup");
    ensure_eq("routes", local_routes(node.host(), 176)?, "")
}
