//! An unprivileged user tries to keep the daemon from starting by locking or owning its directories.

use std::{
    fs::{self, File, Permissions},
    io,
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _, chown},
    path::Path,
    thread,
};

use anyhow::{Context as _, Result, ensure};
use nix::{
    fcntl::{Flock, FlockArg, OFlag, openat},
    libc,
    sys::stat::Mode,
    unistd::{Gid, Uid, setfsgid, setfsuid},
};

use crate::{
    fixture::{Scene, WEB},
    support::ensure_eq,
};

/// The user `nobody`.
const NOBODY: u32 = 65_534;

/// Opens an entry of a directory as the user `nobody`, whom the directory lets in.
fn open_as_nobody(directory: &Path, name: &str) -> io::Result<File> {
    let mut options = File::options();
    options.read(true).custom_flags(libc::O_PATH);
    let parent = options.open(directory)?;
    let open = || {
        // Without the file system user id 0, the thread also loses the capabilities that override permissions.
        setfsgid(Gid::from_raw(NOBODY));
        setfsuid(Uid::from_raw(NOBODY));
        openat(&parent, name, OFlag::O_RDONLY, Mode::empty())
    };
    let opened = thread::scope(|scope| scope.spawn(open).join());
    let opened = opened.map_err(|_panic| io::Error::other("the thread panicked"))?;
    Ok(File::from(opened?))
}

/// Lets every user search a directory, as the directories above a real `stateDir` do.
fn let_everybody_in(directory: &Path) -> Result<()> {
    Ok(fs::set_permissions(
        directory,
        Permissions::from_mode(0o755),
    )?)
}

#[test]
#[ignore = "independent of the kernel: permissions of files"]
fn a_user_who_locks_the_directories_of_the_daemon_does_not_keep_it_from_starting() -> Result<()> {
    let scene = Scene::web(&["backend"])?;
    scene.node.stop()?;
    let state = scene.node.state();
    let parent = state.parent().context("a parent")?;
    let_everybody_in(parent)?;
    let_everybody_in(&state)?;
    let pins = scene.node.bpffs();
    let mount = pins.parent().context("a mount point")?.to_owned();
    let_everybody_in(&mount)?;

    let directory = open_as_nobody(parent, "state")?;
    let _lock = Flock::lock(directory, FlockArg::LockExclusiveNonblock)
        .map_err(|(_, error)| error)
        .context("the directory can't be locked")?;
    let refused = open_as_nobody(&state, "lock")
        .err()
        .context("opened the lock")?;
    ensure_eq("lock", refused.raw_os_error(), Some(libc::EACCES))?;
    let refused = open_as_nobody(&mount, "culvert")
        .err()
        .context("opened the pins")?;
    ensure_eq("pins", refused.raw_os_error(), Some(libc::EACCES))?;

    scene.node.start()?;
    scene.expect_served(WEB, "backend")
}

#[test]
#[ignore = "independent of the kernel: permissions of files"]
fn a_pin_directory_of_another_user_is_refused_with_the_command_that_helps() -> Result<()> {
    let scene = Scene::prepare_web(&["backend"], &["backend"])?;
    let pins = scene.node.bpffs();
    fs::create_dir(&pins)?;
    chown(&pins, Some(NOBODY), Some(NOBODY))?;

    let output = scene.node.culvert(&["node"])?;

    ensure_eq("exit", output.exit.code, Some(1))?;
    let last = output.stderr.lines().last().unwrap_or_default();
    let help = format!("rm -r {}", scene.node.bpffs_inside().display());
    for word in ["belongs to user 65534", &*help] {
        ensure!(last.contains(word), "no {word:?} in {last}");
    }
    fs::remove_dir(&pins)?;
    scene.node.start()?;
    scene.expect_served(WEB, "backend")
}

#[test]
#[ignore = "independent of the kernel: permissions of files"]
fn a_state_directory_that_others_can_change_is_refused_with_the_command_that_helps() -> Result<()> {
    let scene = Scene::prepare_web(&["backend"], &["backend"])?;
    let state = scene.node.state();
    fs::set_permissions(&state, Permissions::from_mode(0o1777))?;

    let output = scene.node.culvert(&["node"])?;

    ensure_eq("exit", output.exit.code, Some(1))?;
    let last = output.stderr.lines().last().unwrap_or_default();
    ensure!(
        last.contains("1777") && last.contains("chmod 700"),
        "{last}"
    );
    Ok(())
}
