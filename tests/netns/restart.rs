//! The data path stays when the daemon ends, however it ends, and a new daemon goes on with it.

use std::{collections::BTreeMap, fs, os::unix::fs::MetadataExt as _, path::PathBuf, thread};

use anyhow::{Result, ensure};
use tunnel_tests::{
    load::{Enough, Report},
    manifest::{Protocol, Service},
    node::Node,
};

use crate::{
    scene::{Scene, WEB},
    support::{
        DNS, HTTP, HTTP_TARGET, Vip, Way, all_answered, ask, ask_to, http, loads, maps_folder,
        repeated, reports, same, until_backends,
    },
};

/// Has a Service only in some tests.
const LATE: Vip = Vip::of(11);
const EARLY: Vip = Vip::of(12);

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
    let client = &scene.client;
    node.apply(EARLY.service("early").backends(scene.addresses(&["one"])?))?;
    until_backends(node, "early", 1)?;
    let early = || -> Result<()> {
        for way in Way::TCP {
            let name = http(way.connect(client, EARLY, HTTP)?)?;
            same("server", name, "one".to_owned())?;
        }
        Ok(())
    };
    early()?;

    node.kill9()?;
    node.withdraw("early.yaml")?;
    node.apply(LATE.service("late").backends(scene.addresses(&["two"])?))?;
    scene.lead_to(&["two"])?;
    // Nobody has seen it yet.
    early()?;
    for way in Way::TCP {
        way.connect(client, LATE, HTTP)
            .expect_err("there was no daemon");
    }
    node.start()?;

    for way in Way::TCP {
        way.connect(client, EARLY, HTTP)
            .expect_err("it was removed");
        same(
            "server",
            http(way.connect(client, LATE, HTTP)?)?,
            "two".to_owned(),
        )?;
        for _ in 0..8 {
            same(
                "server",
                http(way.connect(client, WEB, HTTP)?)?,
                "two".to_owned(),
            )?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "no kernel decides it: the daemon compares; `sizes` and `layouts` read maps, too"]
fn a_service_that_moves_to_another_address_while_no_daemon_ran_is_found_there() -> Result<()> {
    let scene = Scene::web(&["one", "two"])?;
    let node = &scene.node;
    let client = &scene.client;

    node.kill9()?;
    let moved = Service::new("web", [LATE.v4.into(), LATE.v6.into()])
        .port(Protocol::Tcp, HTTP, HTTP_TARGET)
        .backends(scene.addresses(&["one"])?);
    node.apply(moved)?;
    node.start()?;

    for way in Way::TCP {
        same(
            "server",
            http(way.connect(client, LATE, HTTP)?)?,
            "one".to_owned(),
        )?;
        way.connect(client, WEB, HTTP)
            .expect_err("nobody has this address any more");
    }
    Ok(())
}
