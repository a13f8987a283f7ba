//! Tests maps with another layout version. Maps with an older layout are replaced without affecting flows;
//! maps with a newer layout are left alone. No older release is run: its maps are imitated with the current
//! ones (`migration::imitate_older_layout`).

use std::fs;

use anyhow::{Context as _, Result, ensure};
use aya::maps::MapInfo;
use tunnel_common::{
    LAYOUT_VERSION,
    reason::Reason,
    table::{MAPS, Map, REASON_COUNTS},
};
use tunnel_tests::{admin::metric, wait};

use crate::{
    cleanup::cleanup,
    fixture::{OTHER, Scene, WEB},
    migration::{
        self, Flows, SERVICES, count_choices, expect_all_kept, file_names, imitate_older_layout,
        older_directory,
    },
    support::{CHANGE_TIMEOUT, Dialer, HTTP, ensure_eq, maps_directory},
};

impl Scene {
    /// Renames a file or directory in the pin directory.
    fn rename(&self, from: &str, to: &str) -> Result<()> {
        let pins = self.node.bpffs();
        fs::rename(pins.join(from), pins.join(to)).with_context(|| format!("{from} to {to}"))
    }
}

/// Asserts that connected sockets keep their backends, and that unconnected sockets get replies.
fn expect_working(flows: &[Flows]) -> Result<()> {
    for flow in flows {
        flow.expect_connected_kept()?;
        ensure!(["one", "two"].contains(&&*flow.query(WEB)?));
        ensure_eq("server", flow.query(OTHER)?, "other")?;
    }
    Ok(())
}

#[test]
fn an_older_layout_is_replaced_under_load_and_open_flows_continue() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;

    scene.under_load(&SERVICES, 3, |number| {
        node.kill9()?;
        imitate_older_layout(&scene.node)?;
        scene.resize([[128, 64, 64], [64, 128, 128]][number % 2])?;
        expect_working(&flows)?;
        node.start()?;
        scene.expect_tidy()?;
        expect_working(&flows)
    })?;

    node.restart()?;
    scene.expect_tidy()?;
    flows.into_iter().try_for_each(Flows::finish)
}

#[test]
fn after_a_new_layout_a_socket_does_not_use_its_stored_index() -> Result<()> {
    let scene = migration::start()?;
    let flows = Flows::open(&scene.client)?;
    scene.node.kill9()?;
    imitate_older_layout(&scene.node)?;
    scene.node.start()?;

    ensure_eq("first", count_choices(&scene, &flows)?, vec![3, 0])?;
    ensure_eq("then", count_choices(&scene, &flows)?, vec![0, 3])
}

#[test]
fn a_new_layout_keeps_the_maps_of_sockets_and_restarts_the_counters() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    let open = || Ok(metric(&node.metrics()?, "culvert_open_connections"));
    let opened: Result<_> = open();
    node.kill9()?;
    imitate_older_layout(node)?;
    let info =
        |directory: &str, map: &Map| MapInfo::from_pin(node.bpffs().join(directory).join(map.name));
    let ids = |directory: &str| -> Result<Vec<u32>> {
        MAPS.iter()
            .map(|map| Ok(info(directory, map)?.id()))
            .collect()
    };
    let before = ids(&older_directory(""))?;

    node.start()?;

    let after = ids(&maps_directory(""))?;
    for (map, (before, after)) in MAPS.iter().zip(before.iter().zip(&after)) {
        ensure_eq(map.name, before == after, map.is_lasting)?;
    }
    let counters = info(&maps_directory(""), &REASON_COUNTS)?.max_entries();
    ensure_eq("counters", counters, Reason::CAPACITY)?;
    // In the imitated older layout, each counter is 1000 on every CPU.
    ensure!(node.reason_count("translated")? < 1000);
    ensure_eq("open", open()?, opened?)?;
    flows.into_iter().try_for_each(Flows::finish)
}

#[test]
#[ignore = "independent of the kernel: the daemon waits for its sources"]
fn an_older_layout_stays_until_every_object_can_be_read() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    let good = fs::read_to_string(node.manifests().join("other.yaml"))?;
    node.kill9()?;
    imitate_older_layout(&scene.node)?;
    node.apply(("other.yaml", "kind: [Service\n"))?;

    node.launch()?;
    let waits = || -> Option<bool> {
        let status = node.status().ok()?;
        Some(status["notReady"].as_str()?.contains("older layout"))
    };
    wait::until(CHANGE_TIMEOUT, || waits() == Some(true))
        .with_context(|| format!("{:?}", node.status()))?;

    ensure!(scene.has_pin(&older_directory("/services")) && !scene.has_pin(&maps_directory("")));
    expect_all_kept(&flows)?;
    for (vip, servers) in [(WEB, ["one", "two"]), (OTHER, ["other"; 2])] {
        for dialer in Dialer::TCP {
            let server = dialer.dial(&scene.client, vip, HTTP)?;
            ensure!(servers.contains(&&*server), "{dialer:?}: {server}");
        }
    }

    node.apply(("other.yaml", &*good))?;
    node.wait_ready()?;
    scene.expect_tidy()?;
    expect_working(&flows)?;
    scene.expect_served(OTHER, "other")
}

#[test]
#[ignore = "independent of the kernel: the same steps as in `map_sizes`, with other names"]
fn the_next_daemon_continues_after_a_kill_during_the_replacement_of_a_layout() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    node.kill9()?;
    imitate_older_layout(&scene.node)?;
    let moments: [fn(&Scene) -> bool; 5] = [
        |scene| scene.has_pin(&maps_directory("-next")),
        |scene| scene.has_pin(&maps_directory("-next/services")),
        |scene| scene.has_pin(&maps_directory("-next/host")),
        |scene| scene.has_pin(&maps_directory("")),
        |scene| scene.has_pin(&maps_directory("")) && !scene.has_pin(&older_directory("/services")),
    ];

    let check = || {
        expect_working(&flows)?;
        if scene.has_pin(&maps_directory("")) {
            // The older layout has already been replaced, so let the daemon start completely, then imitate an
            // older layout again.
            node.start()?;
            scene.expect_tidy()?;
            expect_working(&flows)?;
            node.kill9()?;
            imitate_older_layout(&scene.node)?;
        }
        Ok(())
    };
    scene.kill_at_each(&moments, |_| Ok(()), check)?;

    node.start()?;
    scene.expect_tidy()?;
    expect_working(&flows)?;
    flows.into_iter().try_for_each(Flows::finish)
}

#[test]
#[ignore = "independent of the kernel: names of directories"]
fn a_newer_layout_is_named_and_not_touched() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    node.kill9()?;

    let newer = LAYOUT_VERSION + 1;
    let [newer_layout, layout] = [newer, LAYOUT_VERSION].map(|it| format!("layout {it}"));
    for name in ["", "-next", "-old"].map(|stage| format!("v{newer}{stage}")) {
        let name = name.as_str();
        scene.rename(&maps_directory(""), name)?;
        let before = file_names(&node.bpffs().join(name))?;
        let output = node.culvert(&["node"])?;
        ensure_eq("exit", output.exit.code, Some(1))?;
        let last = output.stderr.lines().last().unwrap_or_default();
        for word in [name, &newer_layout, &layout] {
            ensure!(last.contains(word), "no {word} in {last}");
        }
        ensure_eq("pins", file_names(&node.bpffs().join(name))?, before)?;
        expect_all_kept(&flows)?;
        scene.rename(name, &maps_directory(""))?;
    }

    node.start()?;
    expect_all_kept(&flows)
}

#[test]
#[ignore = "independent of the kernel: files are removed"]
fn cleanup_removes_incomplete_new_maps_and_maps_of_this_layout_or_an_older_one() -> Result<()> {
    for former in [maps_directory(""), older_directory("")] {
        let scene = migration::start()?;
        let node = &scene.node;
        scene.resize([4096, 8192, 4096])?;
        node.kill9()?;
        if former == older_directory("") {
            imitate_older_layout(node)?;
        }
        let is_met = scene.kill_when(|scene| scene.has_pin(&maps_directory("-next/services")))?;
        ensure!(
            is_met && scene.has_pin(&former),
            "{former}: {}",
            node.logs()
        );

        cleanup(node)?;

        ensure!(!node.bpffs().exists(), "{:?}", file_names(&node.bpffs())?);
    }
    Ok(())
}
