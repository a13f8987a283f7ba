//! Maps of another layout version: maps of an older layout are replaced without an effect on flows, and
//! those of a newer layout are left alone. No older program is run: its maps are imitated by the current
//! ones (`migration::imitate_older_layout`).

use std::fs;

use anyhow::{Context as _, Result, ensure};
use aya::maps::MapInfo;
use tunnel_common::{
    LAYOUT_VERSION,
    reason::Reason,
    table::{REASON_COUNTS, MAPS, Map},
};
use tunnel_tests::{admin::metric, wait};

use crate::{
    carried::{self, Flows, SERVED, age, all_stay, choices, folders, older_folder},
    cleanup::cleanup,
    scene::{OTHER, Scene, WEB},
    support::{CHANGE, HTTP, Way, maps_folder, same},
};

impl Scene {
    /// Renames a file or folder of pins.
    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let pins = self.node.bpffs();
        fs::rename(pins.join(from), pins.join(to)).with_context(|| format!("{from} to {to}"))
    }
}

/// Asserts that connected flows keep their backends, and that unconnected sockets get answers.
fn go_on(flows: &[Flows]) -> Result<()> {
    for flow in flows {
        flow.stay_connected()?;
        ensure!(["one", "two"].contains(&&*flow.asks(WEB)?));
        same("server", flow.asks(OTHER)?, "other")?;
    }
    Ok(())
}

#[test]
fn an_older_layout_is_replaced_under_load_and_open_flows_go_on() -> Result<()> {
    let scene = carried::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;

    scene.under_load(&SERVED, 3, |number| {
        node.kill9()?;
        age(&scene.node)?;
        scene.resize([[128, 64, 64], [64, 128, 128]][number % 2])?;
        go_on(&flows)?;
        node.start()?;
        scene.is_tidy()?;
        go_on(&flows)
    })?;

    node.restart()?;
    scene.is_tidy()?;
    flows.into_iter().try_for_each(Flows::end)
}

#[test]
fn no_index_of_a_new_layout_is_taken_for_the_one_that_a_socket_remembers() -> Result<()> {
    let scene = carried::start()?;
    let flows = Flows::open(&scene.client)?;
    scene.node.kill9()?;
    age(&scene.node)?;
    scene.node.start()?;

    same("first", choices(&scene, &flows)?, vec![3, 0])?;
    same("then", choices(&scene, &flows)?, vec![0, 3])
}

#[test]
fn what_hangs_on_sockets_outlasts_a_layout_and_counters_begin_anew() -> Result<()> {
    let scene = carried::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    let open = || Ok(metric(&node.metrics()?, "culvert_open_connections"));
    let opened: Result<_> = open();
    node.kill9()?;
    age(node)?;
    let info =
        |folder: &str, map: &Map| MapInfo::from_pin(node.bpffs().join(folder).join(map.name));
    let ids = |folder: &str| -> Result<Vec<u32>> {
        MAPS.iter().map(|map| Ok(info(folder, map)?.id())).collect()
    };
    let before = ids(&older_folder(""))?;

    node.start()?;

    let after = ids(&maps_folder(""))?;
    for (map, (before, after)) in MAPS.iter().zip(before.iter().zip(&after)) {
        same(map.name, before == after, map.lasts)?;
    }
    let counters = info(&maps_folder(""), &REASON_COUNTS)?.max_entries();
    same("counters", counters, Reason::CAPACITY)?;
    // Each counter of the imitated older layout was 1000 on each CPU.
    ensure!(node.reason("translated")? < 1000);
    same("open", open()?, opened?)?;
    flows.into_iter().try_for_each(Flows::end)
}

#[test]
#[ignore = "no kernel decides it: the daemon waits for its sources"]
fn an_older_layout_stays_until_every_object_can_be_read() -> Result<()> {
    let scene = carried::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    let good = fs::read_to_string(node.manifests().join("other.yaml"))?;
    node.kill9()?;
    age(&scene.node)?;
    node.apply(("other.yaml", "kind: [Service\n"))?;

    node.launch()?;
    let waits = || -> Option<bool> {
        let status = node.status().ok()?;
        Some(status["notReady"].as_str()?.contains("older layout"))
    };
    wait::until(CHANGE, || waits() == Some(true))
        .with_context(|| format!("{:?}", node.status()))?;

    ensure!(scene.has(&older_folder("/services")) && !scene.has(&maps_folder("")));
    all_stay(&flows)?;
    for (vip, servers) in [(WEB, ["one", "two"]), (OTHER, ["other"; 2])] {
        for way in Way::TCP {
            let server = way.dial(&scene.client, vip, HTTP)?;
            ensure!(servers.contains(&&*server), "{way:?}: {server}");
        }
    }

    node.apply(("other.yaml", &*good))?;
    node.wait_ready()?;
    scene.is_tidy()?;
    go_on(&flows)?;
    scene.reaches(OTHER, "other")
}

#[test]
#[ignore = "no kernel decides it: the same steps as in `sizes`, with other names"]
fn a_daemon_that_is_killed_while_it_replaces_a_layout_leaves_what_the_next_one_goes_on_with()
-> Result<()> {
    let scene = carried::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    node.kill9()?;
    age(&scene.node)?;
    let moments: [fn(&Scene) -> bool; 5] = [
        |scene| scene.has(&maps_folder("-next")),
        |scene| scene.has(&maps_folder("-next/services")),
        |scene| scene.has(&maps_folder("-next/host")),
        |scene| scene.has(&maps_folder("")),
        |scene| scene.has(&maps_folder("")) && !scene.has(&older_folder("/services")),
    ];

    let story = || {
        go_on(&flows)?;
        if scene.has(&maps_folder("")) {
            // The older layout is replaced already, so complete the start and imitate an older layout again.
            node.start()?;
            scene.is_tidy()?;
            go_on(&flows)?;
            node.kill9()?;
            age(&scene.node)?;
        }
        Ok(())
    };
    scene.killed_at(&moments, |_| Ok(()), story)?;

    node.start()?;
    scene.is_tidy()?;
    go_on(&flows)?;
    flows.into_iter().try_for_each(Flows::end)
}

#[test]
#[ignore = "no kernel decides it: names of folders"]
fn a_newer_layout_is_named_and_not_touched() -> Result<()> {
    let scene = carried::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    node.kill9()?;

    let newer = LAYOUT_VERSION + 1;
    let [newer_layout, layout] = [newer, LAYOUT_VERSION].map(|it| format!("layout {it}"));
    for name in ["", "-next", "-old"].map(|stage| format!("v{newer}{stage}")) {
        let name = name.as_str();
        scene.rename(&maps_folder(""), name)?;
        let before = folders(&node.bpffs().join(name))?;
        let output = node.culvert(&["node"])?;
        same("exit", output.exit.code, Some(1))?;
        let last = output.stderr.lines().last().unwrap_or_default();
        for word in [name, &newer_layout, &layout] {
            ensure!(last.contains(word), "no {word} in {last}");
        }
        same("pins", folders(&node.bpffs().join(name))?, before)?;
        all_stay(&flows)?;
        scene.rename(name, &maps_folder(""))?;
    }

    node.start()?;
    all_stay(&flows)
}

#[test]
#[ignore = "no kernel decides it: files are removed"]
fn cleanup_removes_maps_that_were_being_made_anew_of_this_layout_or_an_older_one() -> Result<()> {
    for former in [maps_folder(""), older_folder("")] {
        let scene = carried::start()?;
        let node = &scene.node;
        scene.resize([4096, 8192, 4096])?;
        node.kill9()?;
        if former == older_folder("") {
            age(node)?;
        }
        let is_met = scene.kill_when(|scene| scene.has(&maps_folder("-next/services")))?;
        ensure!(is_met && scene.has(&former), "{former}: {}", node.logs());

        cleanup(node)?;

        ensure!(!node.bpffs().exists(), "{:?}", folders(&node.bpffs())?);
    }
    Ok(())
}
