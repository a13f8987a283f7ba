//! Tests changes to map sizes: the daemon migrates to new maps without affecting flows.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Result, ensure};
use aya::maps::MapInfo;
use tunnel_common::table::{Map, STEER, STEERED};
use tunnel_tests::{
    culvert_instance::InstanceSettings,
    manifest::{Protocol, Service},
    node::Node,
    tunnel_testbed::TunnelTestbed,
    wait,
};

use crate::{
    fixture::{OTHER, Scene},
    migration::{self, Flows, SERVICES, count_choices, expect_all_kept, file_names},
    support::{
        CHANGE_TIMEOUT, Dialer, HTTP, HTTP_TARGET, Vip, ensure_eq, maps_directory, until_backends,
        until_gone,
    },
};

/// The sizes for frontends, slots and backends. After the initial ones, all are larger, then all are smaller;
/// in the last row, frontends and backends are larger but slots are smaller.
const SIZES: [[u32; 3]; 4] = [
    [64, 64, 64],
    [4096, 8192, 4096],
    [16, 512, 32],
    [512, 32, 128],
];

fn sizes(node: &Node) -> Result<[u32; 3]> {
    let status = node.status()?;
    let size = |name: &str| u32::try_from(status["maps"][name].as_u64().unwrap_or(0)).unwrap_or(0);
    Ok(["frontends", "slots", "backends"].map(size))
}

#[test]
#[ignore = "independent of the kernel: `map_layouts` replaces the same maps under load"]
fn maps_grow_and_shrink_under_load_and_every_flow_keeps_its_backend() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    // The deleted Service leaves a gap, so the indices would change if they were reassigned from the start.
    node.delete("first.yaml")?;
    until_gone(node, "first")?;

    scene.under_load(&SERVICES, SIZES.len(), |number| {
        let wanted = SIZES[(number + 1) % SIZES.len()];
        scene.resize(wanted)?;
        if number % 2 == 0 {
            node.kill9()?;
        } else {
            node.stop()?;
        }
        expect_all_kept(&flows)?;
        node.start()?;
        ensure_eq("sizes", sizes(node)?, wanted)?;
        scene.expect_tidy()?;
        expect_all_kept(&flows)
    })?;

    // If this later change takes effect, the programs are reading the new maps.
    scene.apply_service(OTHER, "other", &["two"])?;
    wait::until(CHANGE_TIMEOUT, || {
        let moved = |flow: &Flows| flow.query(OTHER).is_ok_and(|server| server == "two");
        flows.iter().all(moved)
    })?;
    flows.into_iter().try_for_each(Flows::finish)
}

#[test]
fn a_datagram_after_a_change_of_sizes_goes_to_the_stored_backend_of_its_socket() -> Result<()> {
    let scene = migration::start()?;
    let flows = Flows::open(&scene.client)?;
    scene.resize([128, 256, 32])?;
    scene.node.restart()?;

    ensure_eq("counted", count_choices(&scene, &flows)?, vec![0, 3])
}

/// Builds a Service with `count` backends, at addresses that belong to no host.
fn crowd(vip: Vip, count: u8) -> Service {
    let backends = (0..count).map(|last| IpAddr::V4(Ipv4Addr::new(10, 244, 77, last)));
    Service::new("crowd", [vip.v4.into()])
        .port(Protocol::TCP, HTTP, HTTP_TARGET)
        .backends(backends)
}

/// Restarts the daemon with sizes that are too small. It must keep the current ones and log a line that
/// contains all of the given words.
fn expect_sizes_refused(scene: &Scene, wanted: [u32; 3], words: &[&str]) -> Result<()> {
    let node = &scene.node;
    let before = sizes(node)?;
    let maps = file_names(&node.bpffs().join(maps_directory("")))?;
    let logged = node.logs().len();
    scene.resize(wanted)?;
    node.restart()?;
    let log = node.logs().split_off(logged);
    let is_logged = |line: &str| words.iter().all(|word| line.contains(word));
    ensure!(log.lines().any(is_logged), "no {words:?} in {log}");
    ensure_eq("sizes", sizes(node)?, before)?;
    ensure_eq(
        "maps",
        file_names(&node.bpffs().join(maps_directory("")))?,
        maps,
    )?;
    scene.expect_tidy()
}

#[test]
#[ignore = "independent of the kernel: the daemon compares numbers"]
fn sizes_that_are_too_small_for_the_entries_are_refused_and_logged() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    // The Service `last` gets high indices, because `crowd`, which is deleted later, is programmed before it.
    scene.resize([64, 256, 256])?;
    node.restart()?;
    node.apply(crowd(Vip::of(20), 150))?;
    until_backends(node, "crowd", 150)?;
    let last = Vip::of(21);
    scene.apply_service(last, "last", &["one"])?;
    until_backends(node, "last", 1)?;
    let flows = Flows::open(&scene.client)?;

    for (size, wanted) in [
        ("slots of 64", [64, 64, 256]),
        ("frontends of 4", [4, 256, 256]),
        ("backends of 64", [64, 256, 64]),
    ] {
        let words = format!("bpf.maps.{size} is too small");
        expect_sizes_refused(&scene, wanted, &[&words])?;
    }
    // Only a few entries are left, but they have high indices.
    node.delete("crowd.yaml")?;
    until_gone(node, "crowd")?;
    expect_sizes_refused(
        &scene,
        [64, 256, 64],
        &["bpf.maps.backends of 64 is too small", "open connections"],
    )?;

    expect_all_kept(&flows)?;
    for dialer in Dialer::TCP {
        dialer.connect(&scene.client, last, HTTP)?;
    }
    // Sizes that are large enough are applied.
    scene.resize([64, 64, 256])?;
    node.restart()?;
    ensure_eq("sizes", sizes(node)?, [64, 64, 256])?;
    expect_all_kept(&flows)
}

#[test]
#[ignore = "independent of the kernel: names of directories, which the daemon changes"]
fn the_next_daemon_continues_after_a_kill_during_a_change_of_sizes() -> Result<()> {
    let scene = migration::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    node.kill9()?;
    let moments: [fn(&Scene) -> bool; 6] = [
        |scene| scene.has_pin(&maps_directory("-next")),
        |scene| scene.has_pin(&maps_directory("-next/services")),
        |scene| scene.has_pin(&maps_directory("-next/host")),
        |scene| scene.has_pin(&maps_directory("-old")),
        |scene| {
            scene.has_pin(&maps_directory("-old"))
                && !scene.has_pin(&maps_directory("-old/services"))
        },
        |_| false,
    ];

    let resize = |number: usize| {
        // Alternate between small and large sizes, so that the new size never equals the current one.
        let size = u32::try_from(number)? + [65, 4096][number % 2];
        scene.resize([size, size, size])
    };
    scene.kill_at_each(&moments, resize, || expect_all_kept(&flows))?;

    node.start()?;
    scene.expect_tidy()?;
    expect_all_kept(&flows)?;
    flows.into_iter().try_for_each(Flows::finish)
}

/// Returns how many entries each of the two steering maps can hold.
fn steering_entries(node: &Node) -> Result<[u32; 2]> {
    let pins = node.bpffs().join(maps_directory(""));
    let entries = |map: Map| MapInfo::from_pin(pins.join(map.name)).map(|info| info.max_entries());
    Ok([entries(STEER)?, entries(STEERED)?])
}

#[test]
#[ignore = "independent of the kernel: the daemon chooses the sizes"]
fn steering_maps_have_room_only_if_steering_is_enabled() -> Result<()> {
    let settings = InstanceSettings::from_environment()?;
    let wanted = settings.maps.steering;

    let alone = Node::with_settings(settings.clone())?;
    alone.start()?;
    ensure_eq(
        "steering entries without steering",
        steering_entries(&alone)?,
        [1, 1],
    )?;

    let testbed = TunnelTestbed::prepare(settings)?;
    testbed.node().start()?;
    let room = steering_entries(testbed.node())?;
    ensure_eq(
        "steering entries with steering",
        room,
        [wanted + 1, 2 * wanted + 1],
    )
}
