//! Programs of an earlier Culvert are attached, but pinned in another directory: they would translate connections by
//! maps that nobody updates any more.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{admin, sandbox::Output, tunnel_testbed::TunnelTestbed, wait};
use tunnel_userspace::bpf::detach_pinned_link;

use crate::{
    capabilities,
    cleanup::cleanup,
    fixture::{Scene, WEB},
    programs::Programs,
    support::{
        CHANGE_TIMEOUT, Dialer, HTTP, ensure_eq, http_server_name, maps_directory, until_backends,
    },
};

/// Changes `bpf.bpffs` to another directory on the same file system. Returns the old one, as seen from outside.
fn move_pins(scene: &Scene) -> Result<PathBuf> {
    let (old, inside) = (scene.node.bpffs(), scene.node.bpffs_inside());
    let config = fs::read_to_string(scene.node.config_path())?;
    let new = inside.with_file_name("other");
    let config = config.replace(&inside.display().to_string(), &new.display().to_string());
    fs::write(scene.node.config_path(), config)?;
    Ok(old)
}

#[test]
fn a_daemon_with_another_pin_directory_continues_with_the_attached_programs() -> Result<()> {
    let scene = Scene::prepare_web(&["one", "two"], &["one"])?;
    scene.node.start()?;
    let open = scene.map_clients(&Dialer::TCP, |sandbox, dialer| {
        Ok(dialer.connect(sandbox, WEB, HTTP)?)
    })?;
    scene.node.stop()?;
    let old = move_pins(&scene)?;
    scene.apply_web(&["two"])?;

    scene.node.start()?;

    scene.expect_served(WEB, "two")?;
    ensure!(
        scene
            .node
            .logs()
            .contains("took over the attached programs")
    );
    // The earlier programs were replaced, so that their sockets' translations are still known.
    for (client, stream) in open {
        let expected = client.dialer.reported_address(WEB, HTTP);
        ensure_eq("peer", stream.peer_addr()?, expected)?;
        let server = http_server_name(stream)?;
        ensure_eq("server", server, "one")?;
    }
    ensure_eq(
        "programs",
        scene.node.status()?["programs"]["inEffect"].clone(),
        9,
    )?;
    // Otherwise, a cleanup with the earlier config would detach the programs.
    ensure!(!old.exists(), "the earlier pins are left");
    scene.expect_served(WEB, "two")
}

/// Changes `bpf.bpffs` and `stateDir` to other directories. Returns the old pin directory, as seen from outside.
fn move_pins_and_state(scene: &Scene) -> Result<PathBuf> {
    let old = move_pins(scene)?;
    let config = fs::read_to_string(scene.node.config_path())?;
    let state = scene.node.state().display().to_string();
    let config = config.replace(&state, &format!("{state}-2"));
    fs::write(scene.node.config_path(), config)?;
    Ok(old)
}

/// Runs a `culvert` subcommand in a PID namespace of its own, as in a container.
fn culvert_in_container(scene: &Scene, name: &str) -> Result<Output> {
    let paths = [scene.node.program(), &scene.node.config_path()];
    let [program, config] = paths.map(|path| path.display().to_string());
    let unshare = ["unshare", "--pid", "--fork", "--mount-proc"];
    let culvert = [&*program, name, "--config", &*config];
    let words = [&unshare[..], &culvert[..]].concat();
    let process = scene.node.host().command(&words).start()?;
    process.finish(CHANGE_TIMEOUT)
}

/// Returns the number of links that attach the programs for packets to the node's uplink. Without tcx, filters do.
fn uplink_links() -> Result<usize> {
    Ok(if tunnel_userspace::bpf::probe()?.tcx {
        2
    } else {
        0
    })
}

#[test]
fn a_daemon_in_another_pid_namespace_keeps_its_programs() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    move_pins_and_state(&scene)?;

    for name in ["prepare", "cleanup"] {
        let output = culvert_in_container(&scene, name)?;
        ensure_eq("exit", output.exit.code, Some(1)).context(name)?;
        let last = output.stderr.lines().last().unwrap_or_default();
        for word in [
            "another culvert has its programs on cgroup",
            "has inode",
            "map show id",
        ] {
            ensure!(last.contains(word), "{name}: no {word:?} in {last}");
        }
        scene.expect_served(WEB, "backend")?;
    }
    ensure_eq("restored", scene.node.reason_count("program_restored")?, 0)?;

    // A daemon that has stopped is known to have stopped at once.
    scene.node.stop()?;
    let output = culvert_in_container(&scene, "prepare")?;
    let taken = format!("took over {} programs", 9 + uplink_links()?);
    ensure!(output.stdout.contains(&taken), "no {taken:?} in {output:?}");
    scene.expect_served(WEB, "backend")
}

/// A kubeconfig for an API server that does not exist.
const UNREACHABLE: &str = r#"
apiVersion: v1
kind: Config
current-context: none
contexts: [{name: none, context: {cluster: none, user: none}}]
clusters: [{name: none, cluster: {server: "http://127.0.0.1:1"}}]
users: [{name: none, user: {token: none}}]
"#;

#[test]
#[ignore = "independent of the kernel: the time of the first heartbeat"]
fn a_daemon_that_waits_for_the_api_server_keeps_the_programs() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    scene.node.stop()?;
    let kubeconfig = scene.node.config_path().with_file_name("kubeconfig");
    fs::write(&kubeconfig, UNREACHABLE)?;
    let config = fs::read_to_string(scene.node.config_path())?;
    let file = format!("file: {{ path: {} }}", scene.node.manifests().display());
    let kube = kubeconfig.display();
    let kube = format!("kube: {{ kubeconfig: {kube}, initialSyncTimeout: 60s }}");
    ensure!(config.contains(&file), "{config}");
    fs::write(scene.node.config_path(), config.replace(&file, &kube))?;
    scene.node.launch()?;
    wait::until(CHANGE_TIMEOUT, || {
        let ready = admin::get(&scene.node.admin_socket(), "/readyz");
        ready.is_ok_and(|it| it.body.contains("waiting for the sources"))
    })
    .with_context(|| scene.node.logs())?;

    move_pins_and_state(&scene)?;
    // Until the first heartbeat, the lock on the pin directory shows that the daemon is running.
    let mut last = None;
    wait::until(CHANGE_TIMEOUT, || {
        let output = culvert_in_container(&scene, "prepare");
        let is_refused = output
            .as_ref()
            .is_ok_and(|it| !it.exit.is_success() && it.stderr.contains("has inode"));
        last = Some(output);
        is_refused
    })
    .with_context(|| format!("{last:?}\n{}", scene.node.logs()))?;
    scene.expect_served(WEB, "backend")
}

#[test]
fn pins_of_a_running_daemon_in_another_directory_are_not_cleaned_up() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let pins = move_pins_and_state(&scene)?;
    let other = pins.with_file_name("other");
    for directory in ["links", &maps_directory("")] {
        fs::create_dir_all(other.join(directory))?;
        for pin in fs::read_dir(pins.join(directory))? {
            let pin = pin?;
            fs::hard_link(pin.path(), other.join(directory).join(pin.file_name()))?;
        }
    }

    for name in ["node", "prepare", "cleanup"] {
        let output = scene.node.culvert(&[name])?;
        ensure_eq("exit", output.exit.code, Some(1)).context(name)?;
        let last = output.stderr.lines().last().unwrap_or_default();
        for word in ["another culvert is running with the maps", "rm -r"] {
            ensure!(last.contains(word), "{name}: no {word:?} in {last}");
        }
        scene.expect_served(WEB, "backend")?;
    }
    fs::remove_dir_all(other)?;
    scene.expect_served(WEB, "backend")
}

#[test]
fn a_set_of_programs_in_front_is_detached_when_the_daemon_has_its_own() -> Result<()> {
    let scene = Scene::prepare_web(&["one", "two"], &["one"])?;
    scene.node.start()?;
    scene.node.stop()?;
    let pins = scene.node.bpffs();
    // The daemon's links are attached first, so its programs run before those of the stray set.
    let aside = pins.with_file_name("aside");
    fs::rename(&pins, &aside)?;
    scene.apply_web(&["two"])?;
    let features = tunnel_userspace::bpf::probe()?;
    let (programs, _maps) = Programs::load(&scene.node, features, 64)?;
    programs.attach(&scene.node)?;
    drop(programs);

    // The new set has pins of its own, and an empty table of frontends.
    scene.node.start()?;

    scene.expect_served(WEB, "two")?;
    let logs = scene.node.logs();
    ensure!(
        logs.contains("detached the programs of an earlier Culvert"),
        "{logs}"
    );
    until_backends(&scene.node, "web", 1)
}

#[test]
fn a_running_daemon_is_not_robbed_of_its_programs() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let pid = scene.node.daemon_pid().context("no daemon")?;
    move_pins_and_state(&scene)?;

    let output = scene.node.culvert(&["node"])?;

    ensure_eq("exit", output.exit.code, Some(1))?;
    let last = output.stderr.lines().last().unwrap_or_default();
    let process = format!("another culvert (process {pid}) has its programs");
    ensure!(last.contains(&process), "{last}");
    scene.expect_served(WEB, "backend")
}

#[test]
fn without_the_right_to_inspect_programs_the_start_is_refused_until_prepare_has_run() -> Result<()>
{
    let scene = Scene::prepare_web(&["one", "two"], &["one"])?;
    capabilities::start(&scene.node)?;
    scene.node.stop()?;
    move_pins(&scene)?;
    scene.apply_web(&["two"])?;

    capabilities::start(&scene.node)
        .err()
        .context("the daemon started")?;
    let logs = scene.node.logs();
    for word in [
        "every hook",
        "CAP_SYS_ADMIN",
        "culvert prepare",
        "culvert cleanup",
    ] {
        ensure!(logs.contains(word), "no {word} in {logs}");
    }
    drop(scene.node.kill9());

    let prepared = scene.node.culvert(&["prepare"])?;
    ensure!(prepared.exit.is_success(), "{prepared:?}");
    capabilities::start(&scene.node)?;
    scene.expect_served(WEB, "two")
}

#[test]
fn a_daemon_that_may_not_inspect_some_programs_names_the_command_that_helps() -> Result<()> {
    let scene = Scene::prepare_web(&["one", "two"], &["one"])?;
    scene.node.start()?;
    scene.node.stop()?;
    let old = move_pins(&scene)?;
    detach_pinned_link(&old.join("links/recvmsg6"))?;
    fs::remove_file(old.join("links/recvmsg6"))?;
    scene.apply_web(&["two"])?;

    capabilities::start(&scene.node)?;
    let logs = scene.node.logs();
    for word in ["connect4: program", "run `culvert prepare` as root"] {
        ensure!(logs.contains(word), "no {word} in {logs}");
    }
    scene.node.stop()?;

    let prepared = scene.node.culvert(&["prepare"])?;
    let detached = format!("detached {} programs", 8 + uplink_links()?);
    ensure!(
        prepared.stdout.contains(&detached),
        "no {detached:?} in {prepared:?}"
    );
    capabilities::start(&scene.node)?;
    scene.expect_served(WEB, "two")
}

#[test]
fn cleanup_detaches_guards_whose_pins_are_elsewhere() -> Result<()> {
    if !tunnel_userspace::bpf::probe()?.tcx {
        return Ok(());
    }
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    node.stop()?;
    let links = fs::read_dir(node.bpffs().join("links"))?.count();
    ensure!(links > 9 + uplink_links()?, "no guard is attached");
    let config = fs::read_to_string(node.config_path())?;
    let inside = node.bpffs_inside();
    let other = inside.with_file_name("other").display().to_string();
    let config = config.replace(&inside.display().to_string(), &other);
    fs::write(node.config_path(), config)?;

    let output = cleanup(node)?;

    let detached = format!("detached {links} programs of Culvert");
    ensure!(output.contains(&detached), "no {detached:?} in {output}");
    ensure!(!node.bpffs().exists(), "the earlier pins are left");
    Ok(())
}

#[test]
fn cleanup_detaches_programs_whose_pins_are_elsewhere() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    scene.node.stop()?;
    move_pins(&scene)?;

    let output = cleanup(&scene.node)?;

    let detached = format!("detached {} programs of Culvert", 9 + uplink_links()?);
    ensure!(output.contains(&detached), "no {detached:?} in {output}");
    for (_, sandbox) in scene.sandboxes() {
        ensure!(Dialer::V4.connect(sandbox, WEB, HTTP).is_err());
    }
    Ok(())
}
