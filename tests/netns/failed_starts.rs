//! A daemon that can't start reports the cause and changes nothing, and the data path keeps working.

use std::{
    collections::BTreeMap,
    fs, io,
    net::SocketAddr,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, ensure};
use aya::EbpfLoader;
use tunnel_common::LAYOUT_VERSION;
use tunnel_tests::{
    admin, environment,
    sandbox::{COMMAND_TIMEOUT, Output, Sandbox},
    wait,
};
use tunnel_userspace::bpf::OBJECT;

use crate::{
    fixture::{Scene, WEB},
    support::{CHANGE_TIMEOUT, ensure_eq, http_get, maps_directory},
};

/// Asserts that connections to the Service are translated, both on the host and in the client pod.
fn expect_translated(scene: &Scene) -> Result<()> {
    scene.expect_served(WEB, "backend")
}

/// Runs a daemon, and asserts that it fails to start, changes no pins and leaves the data path working.
/// Returns the daemon's stderr.
fn failed_start(scene: &Scene) -> Result<String> {
    failed_start_by(scene, || scene.node.culvert(&["node"]))
}

fn failed_start_by(scene: &Scene, start: impl FnOnce() -> Result<Output>) -> Result<String> {
    let before = inodes_below(&scene.node.bpffs())?;
    let output = start()?;
    expect_exit_1(&output)?;
    ensure_eq("pins", inodes_below(&scene.node.bpffs())?, before)?;
    expect_translated(scene).context("after a start that failed")?;
    Ok(output.stderr)
}

/// Like [`failed_start`], but runs the daemon with a copy of the config in which `from` is replaced by `to`.
fn failed_start_with(scene: &Scene, from: &str, to: &str) -> Result<String> {
    let config = fs::read_to_string(scene.node.config_path())?;
    ensure!(config.contains(from), "no {from} in {config}");
    let path = scene.node.config_path().with_file_name("other.yaml");
    fs::write(&path, config.replace(from, to))?;
    failed_start_by(scene, || run_node(scene.node.host(), &path))
}

/// Runs a daemon in a sandbox with the given config file, and waits until it exits.
fn run_node(sandbox: &Sandbox, config: &Path) -> Result<Output> {
    let (program, config) = (environment::culvert()?, config.to_string_lossy());
    let words = [&*program.to_string_lossy(), "node", "--config", &config];
    sandbox.command(&words).start()?.finish(COMMAND_TIMEOUT)
}

fn expect_exit_1(output: &Output) -> Result<()> {
    ensure!(output.exit.code == Some(1), "{output:?}");
    Ok(())
}

fn expect_last_line(stderr: &str, words: &[&str]) -> Result<()> {
    let last = stderr.lines().last().unwrap_or_default();
    for word in words {
        ensure!(last.contains(word), "no {word:?} in {stderr}");
    }
    Ok(())
}

/// Returns the inode numbers of all files and directories below a directory.
fn inodes_below(directory: &Path) -> io::Result<BTreeMap<PathBuf, u64>> {
    let mut found = BTreeMap::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        let metadata = fs::metadata(&path)?;
        if metadata.is_dir() {
            found.extend(inodes_below(&path)?);
        }
        found.insert(path, metadata.ino());
    }
    Ok(found)
}

#[test]
#[ignore = "independent of the kernel: the daemon compares what it finds"]
fn modified_pins_are_named_and_not_touched() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let pins = scene.node.bpffs();
    // A path on the same BPF file system, but outside Culvert's directory.
    let aside = pins.with_file_name("aside");
    scene.node.kill9()?;

    // A map of the right type but the wrong size. No config key sets this map's size.
    let mut other = EbpfLoader::new()
        .map_max_entries("reason_counts", 64)
        .load(OBJECT)?;
    let count = other
        .map_mut("reason_counts")
        .context("the object has no map reason_counts")?;
    count.pin(pins.with_file_name("reason_counts"))?;

    let foreign = &["does not belong to Culvert"][..];
    // A label for the case, the pin, the file that replaces the pin, and the words that the error must
    // contain.
    for (what, name, other, words) in [
        ("foreign file", "stranger", "maps/services", foreign),
        ("unknown map", "maps/stranger", "maps/services", foreign),
        ("unknown link", "links/stranger", "maps/services", foreign),
        ("wrong shape", "maps/backends", "maps/frontends", foreign),
        ("link as map", "maps/backends", "links/connect4", foreign),
        (
            "wrong size",
            "maps/reason_counts",
            "../reason_counts",
            &["64 entries"],
        ),
        ("missing map", "maps/services", "", &["missing", "cleanup"]),
        ("swapped links", "links/connect4", "links/connect6", foreign),
        ("map as link", "links/connect4", "maps/services", foreign),
    ] {
        let [name, other] = [name, other].map(|path| path.replace("maps", &maps_directory("")));
        let pin = pins.join(&name);
        let is_ours = pin.exists();
        if is_ours {
            fs::rename(&pin, &aside)?;
        }
        if !other.is_empty() {
            fs::hard_link(pins.join(&other), &pin)?;
        }
        expect_last_line(&failed_start(&scene)?, &[&[&*name], words].concat()).context(what)?;
        if !other.is_empty() {
            fs::remove_file(&pin)?;
        }
        if is_ours {
            fs::rename(&aside, &pin)?;
        }
    }

    let newer = LAYOUT_VERSION + 1;
    let directory = format!("v{newer}");
    let layouts = [newer, LAYOUT_VERSION].map(|version| format!("layout {version}"));
    fs::create_dir(pins.join(&directory))?;
    expect_last_line(
        &failed_start(&scene)?,
        &[&directory, &layouts[0], &layouts[1]],
    )?;
    fs::remove_dir(pins.join(&directory))?;

    scene.node.start()?;
    ensure!(scene.node.logs().contains("new=0 replaced=9"));
    expect_translated(&scene)
}

#[test]
#[ignore = "independent of the kernel: files and error messages"]
fn a_missing_directory_of_manifests_leaves_services_programmed() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    scene.node.kill9()?;
    let manifests = scene.node.manifests();
    let aside = manifests.with_file_name("aside");

    fs::rename(&manifests, &aside)?;
    let directory = manifests.to_string_lossy();
    expect_last_line(
        &failed_start(&scene)?,
        &["cannot read", &directory, "No such file"],
    )?;
    fs::rename(&aside, &manifests)?;

    scene.node.start()?;
    expect_translated(&scene)
}

#[test]
#[ignore = "independent of the kernel: files and error messages"]
fn a_wrong_config_is_reported_with_the_wrong_value() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    scene.node.kill9()?;

    let (state, cgroup) = (scene.node.state(), scene.node.network().instance_cgroup());
    let [bpffs, plain, absent, state, cgroup] = [
        scene.node.bpffs_inside(),
        state.join("pins"),
        cgroup.join("absent"),
        state,
        cgroup,
    ]
    .map(|path| path.display().to_string());
    for (from, to, words) in [
        (
            &*bpffs,
            &*plain,
            &[&*plain, "not on a BPF file system", "mount -t bpf"][..],
        ),
        (&cgroup, &absent, &[&absent, "cgroup"]),
        (&cgroup, &state, &[&state, "cgroup"]),
        ("stateDir:", "stateDirs:", &["other.yaml", "stateDirs"]),
    ] {
        let stderr = failed_start_with(&scene, from, to)?;
        expect_last_line(&stderr, words).with_context(|| format!("{to} for {from}"))?;
    }
    ensure!(!Path::new(&plain).exists());
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: a file lock"]
fn a_second_daemon_and_a_cleanup_fail_and_name_the_running_process() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let process = format!(
        "process {}",
        scene.node.daemon_pid().context("the daemon does not run")?
    );

    for command in ["node", "cleanup"] {
        let stderr = failed_start_by(&scene, || scene.node.culvert(&[command]))?;
        expect_last_line(&stderr, &["another culvert", &process]).context(command)?;
        ensure!(scene.node.is_ready(), "{command}");
    }

    let socket = scene.node.admin_socket();
    ensure!(
        socket.exists(),
        "the second daemon removed the socket of the first"
    );
    Ok(())
}

#[test]
fn a_daemon_outside_of_its_cgroup_reports_that_and_leaves_no_program() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    let directory = scene.node.network().lab().directory().join("elsewhere");
    let outside = scene.node.network().share_namespace(
        scene.node.host(),
        "outside/daemon",
        Some(directory.join("bpffs")),
    )?;

    let before = inodes_below(&scene.node.bpffs())?;
    let config = fs::read_to_string(scene.node.config_path())?;
    let path = directory.join("culvert.yaml");
    let lab = scene.node.network().lab().directory().display().to_string();
    // Another cgroup, because the first daemon's programs are on its own cgroup.
    let cgroup = scene.node.network().instance_cgroup();
    let other_cgroup = cgroup.with_file_name("elsewhere");
    fs::create_dir(&other_cgroup)?;
    let [cgroup, other_cgroup] = [cgroup, other_cgroup].map(|path| path.display().to_string());
    let config = config
        .replace(&cgroup, &other_cgroup)
        .replace(&format!("{lab}/bpffs"), &format!("{lab}/elsewhere/bpffs"))
        .replace(&format!("{lab}/state"), &format!("{lab}/elsewhere/state"));
    fs::write(&path, config)?;
    let output = run_node(&outside, &path)?;
    expect_exit_1(&output)?;
    expect_last_line(
        &output.stderr,
        &["probe", "must run inside that cgroup", "/outside/daemon"],
    )?;

    ensure_eq("pins", inodes_below(&scene.node.bpffs())?, before)?;
    let root = PathBuf::from(format!("/proc/{}/root", outside.pid()));
    let links = root
        .join(directory.strip_prefix("/")?)
        .join("bpffs/culvert/links");
    let left: Vec<PathBuf> = inodes_below(&links)
        .unwrap_or_default()
        .into_keys()
        .collect();
    ensure!(left.is_empty(), "{left:?}");
    expect_translated(&scene)
}

#[test]
#[ignore = "independent of the kernel: a Unix socket"]
fn a_socket_that_a_killed_daemon_left_is_replaced() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    scene.node.kill9()?;
    ensure!(scene.node.admin_socket().exists());

    for command in ["status", "services"] {
        let output = scene.node.culvert(&[command])?;
        expect_exit_1(&output)?;
        let socket = scene.node.admin_socket();
        expect_last_line(
            &output.stderr,
            &["no Culvert daemon is running", &socket.to_string_lossy()],
        )?;
    }

    scene.node.start()?;
    let status = scene.node.culvert(&["status"])?;
    ensure!(status.exit.is_success(), "{status:?}");
    scene.node.stop()?;
    ensure!(!scene.node.admin_socket().exists());
    expect_last_line(
        &scene.node.culvert(&["status"])?.stderr,
        &["no Culvert daemon is running"],
    )
}

#[test]
#[ignore = "independent of the kernel: HTTP servers"]
fn the_daemon_waits_for_occupied_ports_and_listens_once_they_are_free() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    scene.node.stop()?;
    let host = scene.node.host();
    let admin = SocketAddr::from(([127, 0, 0, 1], 10249));
    let healthz = SocketAddr::from(([127, 0, 0, 1], 10256));
    let taken = [host.listen(admin)?, host.listen(healthz)?];

    scene.node.start()?;
    let waiting =
        || -> Option<usize> { Some(scene.node.status().ok()?["notListening"].as_object()?.len()) };
    wait::until(CHANGE_TIMEOUT, || waiting() == Some(2))?;
    let output = scene.node.culvert(&["status"])?;
    ensure_eq("exit", output.exit.code, Some(1))?;
    let table = output.stdout;
    ensure!(
        table.contains("not ready: cannot listen on admin 127.0.0.1:10249"),
        "{table}"
    );
    ensure_eq(
        "readyz",
        admin::get(&scene.node.admin_socket(), "/readyz")?.status,
        503,
    )?;
    expect_translated(&scene)?;

    drop(taken);
    wait::until(CHANGE_TIMEOUT, || waiting() == Some(0))?;
    ensure_eq(
        "readyz",
        admin::get(&scene.node.admin_socket(), "/readyz")?.status,
        200,
    )?;
    ensure_eq("exit", scene.node.culvert(&["status"])?.exit.code, Some(0))?;
    ensure_eq("healthz", http_get(host, healthz, "/healthz")?.0, 200)?;
    ensure_eq("metrics", http_get(host, admin, "/metrics")?.0, 200)
}
