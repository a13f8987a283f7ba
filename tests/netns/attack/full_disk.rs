//! The disk with the state directory is full.

use std::{
    fs,
    net::{Ipv4Addr, SocketAddr, SocketAddrV4},
};

use anyhow::{Result, ensure};
use nix::mount::{MsFlags, mount};
use tunnel_tests::wait;

use crate::{
    fixture::{Scene, WEB},
    support::{CHANGE_TIMEOUT, ensure_eq, http_get, in_mount_namespace},
};

const LOOPBACK_ADMIN: SocketAddr = SocketAddr::V4(SocketAddrV4::new(Ipv4Addr::LOCALHOST, 10_249));

#[test]
fn a_disk_without_inodes_does_not_keep_services_from_being_programmed() -> Result<()> {
    let scene = Scene::prepare_web(&["backend"], &["backend"])?;
    let (host, state) = (scene.node.host(), scene.node.state());
    // The root of the new file system takes the first inode, and the directory the second.
    let mount_with = |flags, inodes: u32| {
        let options = format!("nr_inodes={inodes}");
        in_mount_namespace(host, || {
            let kind = Some("tmpfs");
            Ok(mount(kind, &state, kind, flags, Some(&*options))?)
        })
    };
    mount_with(MsFlags::empty(), 2)?;
    let path = state.display();
    let config = fs::read_to_string(scene.node.config_path())?;
    let moved = config.replace(
        &format!("stateDir: {path}"),
        &format!("stateDir: {path}/new"),
    );
    ensure!(moved != config, "{config}");
    fs::write(scene.node.config_path(), moved)?;

    scene.node.launch()?;
    let served = || scene.expect_served(WEB, "backend").is_ok();
    wait::until(CHANGE_TIMEOUT, served).map_err(|error| error.context(scene.node.logs()))?;
    let (code, status) = http_get(host, LOOPBACK_ADMIN, "/status")?;
    ensure_eq("code", code, 200)?;
    let problem = format!("stateDir {path}/new can't be written: No space left on device");
    ensure!(status.contains(&problem), "{status}");
    ensure!(status.contains("cannot listen on admin socket"), "{status}");
    ensure!(
        scene.node.logs().contains(&problem),
        "{}",
        scene.node.logs()
    );

    // The daemon binds its socket as soon as there is room.
    mount_with(MsFlags::MS_REMOUNT, 100)?;
    wait::until(CHANGE_TIMEOUT, || {
        let status = http_get(host, LOOPBACK_ADMIN, "/status");
        status.is_ok_and(|(_, status)| !status.contains("cannot listen on admin socket"))
    })
}
