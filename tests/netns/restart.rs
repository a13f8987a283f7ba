//! The data path stays when the daemon ends, however it ends, and a new daemon goes on with it.

use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt as _, path::PathBuf, thread};

use anyhow::{Result, ensure};
use tunnel_tests::{
    load::{Enough, Report},
    node::Node,
};

use crate::{
    scene::{Scene, WEB},
    support::{
        DNS, HTTP, Vip, Way, all_answered, ask, ask_to, http, loads, maps_folder, repeated,
        reports, same, until_backends,
    },
};

/// The address of a Service that is deleted, and of one that comes.
const EARLY: Vip = Vip::of(11);
const LATE: Vip = Vip::of(12);
/// The addresses of a Service that moves.
const FORMER: Vip = Vip::of(13);
const LATTER: Vip = Vip::of(14);

#[test]
fn no_connect_fails_while_the_daemon_is_killed_stopped_and_started() -> Result<()> {
    let scene = Scene::web(&["one", "two"])?;
    let node = &scene.node;
    let client = &scene.client;
    let enough = Enough::default();

    let reports = thread::scope(|scope| -> Result<Vec<Report>> {
        let loads = loads(scope, client, WEB, &enough);
        let lives = |number| {
            if number % 3 == 2 {
                node.stop()?;
            } else {
                node.kill9()?;
            }
            node.start()
        };
        enough.after(|| repeated(3, lives))?;
        reports(loads)
    })?;

    all_answered(&reports, &["one", "two"])
}

/// The numbers of what is pinned: another object under the same name has another number.
fn pins(node: &Node) -> Result<BTreeMap<PathBuf, u64>> {
    let mut pins = BTreeMap::new();
    for folder in ["links", &*maps_folder("")] {
        for entry in fs::read_dir(node.bpffs().join(folder))? {
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

    same("pins", pins(node)?, before)?;
    let replaced = node.logs().matches("new=0 replaced=9").count();
    same("times replaced", replaced, 2)
}

#[test]
fn open_sockets_outlive_the_daemon_and_keep_showing_the_cluster_ip() -> Result<()> {
    let scene = Scene::web(&["one", "two"])?;
    let node = &scene.node;
    let client = &scene.client;
    let stream = Way::Mapped.connect(client, WEB, HTTP)?;
    let connected = Way::Mapped.udp(client)?;
    connected.connect(Way::Mapped.to(WEB, DNS))?;
    let connected_to = ask(&connected)?;
    let unconnected = Way::V6.udp(client)?;
    let (sent_to, _) = ask_to(&unconnected, Way::V6.to(WEB, DNS))?;

    for is_there in [false, true] {
        if is_there {
            node.start()?;
        } else {
            node.kill9()?;
        }
        same("peer", stream.peer_addr()?, Way::Mapped.shown(WEB, HTTP))?;
        same("peer", connected.peer_addr()?, Way::Mapped.shown(WEB, DNS))?;
        same("server", ask(&connected)?, connected_to.clone())?;
        let (server, sender) = ask_to(&unconnected, Way::V6.to(WEB, DNS))?;
        same("server", server, sent_to.clone())?;
        same("sender", sender, Way::V6.shown(WEB, DNS))?;
    }
    http(stream).map(drop)
}

#[test]
#[ignore = "no kernel decides it: the daemon compares; `sizes` and `layouts` read maps, too"]
fn what_changed_while_no_daemon_ran_is_made_good_at_the_start() -> Result<()> {
    let scene = Scene::web(&["one", "two"])?;
    let node = &scene.node;
    let apply = |vip: Vip, name, backend| {
        let backends = scene.addresses(&[backend])?;
        node.apply(vip.service(name).backends(backends))
    };
    let are_served =
        |vips: &[Vip], server| vips.iter().try_for_each(|vip| scene.reaches(*vip, server));
    let are_nobodys = |vips: [Vip; 2]| {
        for vip in vips {
            for way in Way::TCP {
                let connected = way.connect(&scene.client, vip, HTTP);
                connected.expect_err("nobody has this address");
            }
        }
    };
    for (vip, name) in [(EARLY, "early"), (FORMER, "moved")] {
        apply(vip, name, "one")?;
        until_backends(node, name, 1)?;
    }
    are_served(&[EARLY, FORMER], "one")?;

    node.kill9()?;
    node.withdraw("early.yaml")?;
    apply(LATE, "late", "two")?;
    apply(LATTER, "moved", "two")?;
    scene.lead_to(&["two"])?;
    // Nobody has seen it yet.
    are_served(&[EARLY, FORMER], "one")?;
    are_nobodys([LATE, LATTER]);
    node.start()?;

    are_nobodys([EARLY, FORMER]);
    are_served(&[LATE, LATTER], "two")?;
    are_served(&[WEB; 8], "two")
}
