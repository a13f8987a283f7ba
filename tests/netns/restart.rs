//! Tests that the data path keeps working after the daemon is killed or stopped, and that the next daemon
//! adopts it.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Result, ensure};
use tunnel_tests::node::Node;

use crate::{
    fixture::{Scene, WEB},
    migration::{self, Flows, expect_all_kept},
    support::{Dialer, HTTP, Vip, ensure_eq, maps_directory, until_backends},
};

/// The addresses of a Service that is deleted while no daemon runs, and of one that is created.
const EARLY: Vip = Vip::of(11);
const LATE: Vip = Vip::of(12);
/// The former and the new addresses of a Service whose ClusterIPs change while no daemon runs.
const FORMER: Vip = Vip::of(13);
const LATTER: Vip = Vip::of(14);

#[test]
fn no_connect_fails_while_the_daemon_is_killed_stopped_and_started() -> Result<()> {
    let scene = Scene::web(&["one", "two"])?;
    let node = &scene.node;

    scene.under_load(&[(WEB, &["one", "two"])], 3, |number| {
        if number % 3 == 2 {
            node.stop()?;
        } else {
            node.kill9()?;
        }
        node.start()
    })
}

/// Returns each pin's inode number, which changes if the pinned object is replaced.
fn pins(node: &Node) -> Result<BTreeMap<PathBuf, u64>> {
    let mut pins = BTreeMap::new();
    for directory in ["links", &*maps_directory("")] {
        for entry in fs::read_dir(node.bpffs().join(directory))? {
            let entry = entry?;
            pins.insert(entry.path(), entry.metadata()?.ino());
        }
    }
    Ok(pins)
}

#[test]
fn a_new_daemon_replaces_the_programs_in_their_links_and_keeps_the_maps() -> Result<()> {
    let scene = Scene::web(&["one", "two"])?;
    let node = &scene.node;
    let before = pins(node)?;
    ensure!(node.logs().contains("new=9 replaced=0"), "{}", node.logs());

    node.kill9()?;
    node.start()?;
    node.restart()?;

    // Without tcx, the pins of the programs on uplinks are the programs themselves.
    let of_cgroup = |mut pins: BTreeMap<PathBuf, u64>| {
        let is_of_uplink = |pin: &Path| pin.ends_with("in-2") || pin.ends_with("out-2");
        pins.retain(|pin, _| !is_of_uplink(pin));
        pins
    };
    ensure_eq("pins", of_cgroup(pins(node)?), of_cgroup(before))?;
    let replaced = node.logs().matches("new=0 replaced=9").count();
    ensure_eq("times replaced", replaced, 2)
}

#[test]
fn open_sockets_outlive_the_daemon_and_keep_showing_the_cluster_ip() -> Result<()> {
    let scene = migration::start()?;
    let flows = Flows::open(&scene.client)?;
    scene.node.kill9()?;
    expect_all_kept(&flows)?;
    scene.node.start()?;
    expect_all_kept(&flows)?;
    flows.into_iter().try_for_each(Flows::finish)
}

#[test]
#[ignore = "independent of the kernel: the daemon compares maps; `map_sizes` and `map_layouts` read them, too"]
fn changes_from_while_no_daemon_ran_are_applied_at_the_start() -> Result<()> {
    let scene = Scene::web(&["one", "two"])?;
    let node = &scene.node;
    let are_served = |vips: &[Vip], server| {
        vips.iter()
            .try_for_each(|vip| scene.expect_served(*vip, server))
    };
    let are_nobodys = |vips: [Vip; 2]| {
        for vip in vips {
            for dialer in Dialer::TCP {
                let connected = dialer.connect(&scene.client, vip, HTTP);
                connected.expect_err("no Service has this address");
            }
        }
    };
    for (vip, name) in [(EARLY, "early"), (FORMER, "moved")] {
        scene.apply_service(vip, name, &["one"])?;
        until_backends(node, name, 1)?;
    }
    are_served(&[EARLY, FORMER], "one")?;

    node.kill9()?;
    node.delete("early.yaml")?;
    scene.apply_service(LATE, "late", &["two"])?;
    scene.apply_service(LATTER, "moved", &["two"])?;
    scene.apply_web(&["two"])?;
    // No daemon has seen the changes yet.
    are_served(&[EARLY, FORMER], "one")?;
    are_nobodys([LATE, LATTER]);
    node.start()?;

    are_nobodys([EARLY, FORMER]);
    are_served(&[LATE, LATTER], "two")?;
    are_served(&[WEB; 8], "two")
}
