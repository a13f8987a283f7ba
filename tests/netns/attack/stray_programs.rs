//! Programs of an earlier Culvert are attached, but pinned in another directory: they would translate connections by
//! maps that nobody updates any more.

use std::{fs, path::PathBuf};

use anyhow::{Context as _, Result, ensure};

use crate::{
    capabilities,
    cleanup::cleanup,
    fixture::{Scene, WEB},
    programs::Programs,
    support::{Dialer, HTTP, ensure_eq, http_server_name, until_backends},
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
    fs::remove_dir_all(old).context("cannot remove the old pins")?;
    scene.expect_served(WEB, "two")
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
    move_pins(&scene)?;
    let config = fs::read_to_string(scene.node.config_path())?;
    let state = scene.node.state().display().to_string();
    let config = config.replace(&state, &format!("{state}-2"));
    fs::write(scene.node.config_path(), config)?;

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
fn cleanup_detaches_programs_whose_pins_are_elsewhere() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    scene.node.stop()?;
    move_pins(&scene)?;

    let output = cleanup(&scene.node)?;

    ensure!(
        output.contains("detached 9 programs of Culvert"),
        "{output}"
    );
    for (_, sandbox) in scene.sandboxes() {
        ensure!(Dialer::V4.connect(sandbox, WEB, HTTP).is_err());
    }
    Ok(())
}
