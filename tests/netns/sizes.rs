//! Changes of map sizes: the daemon migrates to new maps without an effect on flows.

use std::net::{IpAddr, Ipv4Addr};

use anyhow::{Result, ensure};
use aya::maps::MapInfo;
use tunnel_common::table::{Map, STEER, STEERED};
use tunnel_tests::{
    instance::Settings,
    manifest::{Protocol, Service},
    node::Node,
    site::Site,
    wait,
};

use crate::{
    carried::{self, Flows, SERVED, all_stay, choices, folders},
    scene::{OTHER, Scene},
    support::{CHANGE, HTTP, HTTP_TARGET, Vip, Way, maps_folder, same, until_backends, until_gone},
};

/// Sizes for frontends, slots and backends: the first ones; all larger; all smaller; frontends and
/// backends larger, slots smaller.
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
fn maps_grow_and_shrink_under_load_and_every_flow_stays_where_it_is() -> Result<()> {
    let scene = carried::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    // The deleted Service leaves a gap, so assigning indices from the start would change them.
    node.withdraw("first.yaml")?;
    until_gone(node, "first")?;

    scene.under_load(&SERVED, SIZES.len(), |number| {
        let wanted = SIZES[(number + 1) % SIZES.len()];
        scene.resize(wanted)?;
        if number % 2 == 0 {
            node.kill9()?;
        } else {
            node.stop()?;
        }
        all_stay(&flows)?;
        node.start()?;
        same("sizes", sizes(node)?, wanted)?;
        scene.is_tidy()?;
        all_stay(&flows)
    })?;

    // A later change has an effect, so the programs read the new maps.
    scene.lead(OTHER, "other", &["two"])?;
    wait::until(CHANGE, || {
        let moved = |flow: &Flows| flow.asks(OTHER).is_ok_and(|server| server == "two");
        flows.iter().all(moved)
    })?;
    flows.into_iter().try_for_each(Flows::end)
}

#[test]
fn a_datagram_after_a_change_of_sizes_goes_by_the_choice_that_its_socket_made() -> Result<()> {
    let scene = carried::start()?;
    let flows = Flows::open(&scene.client)?;
    scene.resize([128, 256, 32])?;
    scene.node.restart()?;

    same("counted", choices(&scene, &flows)?, vec![0, 3])
}

/// Builds a Service with this many backends, at addresses that no host has.
fn crowd(vip: Vip, count: u8) -> Service {
    let backends = (0..count).map(|last| IpAddr::V4(Ipv4Addr::new(10, 244, 77, last)));
    Service::new("crowd", [vip.v4.into()])
        .port(Protocol::TCP, HTTP, HTTP_TARGET)
        .backends(backends)
}

/// Restarts the daemon with sizes that are too small; expects it to keep the current ones and to log a
/// line with these words.
fn refused(scene: &Scene, wanted: [u32; 3], words: &[&str]) -> Result<()> {
    let node = &scene.node;
    let before = sizes(node)?;
    let maps = folders(&node.bpffs().join(maps_folder("")))?;
    let logged = node.logs().len();
    scene.resize(wanted)?;
    node.restart()?;
    let log = node.logs().split_off(logged);
    let told = |line: &str| words.iter().all(|word| line.contains(word));
    ensure!(log.lines().any(told), "no {words:?} in {log}");
    same("sizes", sizes(node)?, before)?;
    same("maps", folders(&node.bpffs().join(maps_folder("")))?, maps)?;
    scene.is_tidy()
}

#[test]
#[ignore = "no kernel decides it: the daemon compares numbers"]
fn sizes_that_have_no_room_for_what_is_there_are_refused_and_told() -> Result<()> {
    let scene = carried::start()?;
    let node = &scene.node;
    // The Service `crowd` is programmed before `last`, which stays, so the indices of `last` are high.
    scene.resize([64, 256, 256])?;
    node.restart()?;
    node.apply(crowd(Vip::of(20), 150))?;
    until_backends(node, "crowd", 150)?;
    let last = Vip::of(21);
    scene.lead(last, "last", &["one"])?;
    until_backends(node, "last", 1)?;
    let flows = Flows::open(&scene.client)?;

    for (size, wanted) in [
        ("slots of 64", [64, 64, 256]),
        ("frontends of 4", [4, 256, 256]),
        ("backends of 64", [64, 256, 64]),
    ] {
        let words = format!("bpf.maps.{size} is too small");
        refused(&scene, wanted, &[&words])?;
    }
    // Few entries are left, but their indices are still high.
    node.withdraw("crowd.yaml")?;
    until_gone(node, "crowd")?;
    refused(
        &scene,
        [64, 256, 64],
        &["bpf.maps.backends of 64 is too small", "open connections"],
    )?;

    all_stay(&flows)?;
    for way in Way::TCP {
        way.connect(&scene.client, last, HTTP)?;
    }
    // Sizes that fit are applied.
    scene.resize([64, 64, 256])?;
    node.restart()?;
    same("sizes", sizes(node)?, [64, 64, 256])?;
    all_stay(&flows)
}

#[test]
fn a_daemon_that_is_killed_while_it_changes_sizes_leaves_what_the_next_one_goes_on_with()
-> Result<()> {
    let scene = carried::start()?;
    let node = &scene.node;
    let flows = Flows::open(&scene.client)?;
    node.kill9()?;
    let moments: [fn(&Scene) -> bool; 6] = [
        |scene| scene.has(&maps_folder("-next")),
        |scene| scene.has(&maps_folder("-next/services")),
        |scene| scene.has(&maps_folder("-next/host")),
        |scene| scene.has(&maps_folder("-old")),
        |scene| scene.has(&maps_folder("-old")) && !scene.has(&maps_folder("-old/services")),
        |_| false,
    ];

    let resize = |number: usize| {
        // Larger and smaller in turn, so that it never equals the current size.
        let size = u32::try_from(number)? + [65, 4096][number % 2];
        scene.resize([size, size, size])
    };
    scene.killed_at(&moments, resize, || all_stay(&flows))?;

    node.start()?;
    scene.is_tidy()?;
    all_stay(&flows)?;
    flows.into_iter().try_for_each(Flows::end)
}

/// Returns the maximum numbers of entries of the two steering maps.
fn room_for_steering(node: &Node) -> Result<[u32; 2]> {
    let pins = node.bpffs().join(maps_folder(""));
    let entries = |map: Map| MapInfo::from_pin(pins.join(map.name)).map(|info| info.max_entries());
    Ok([entries(STEER)?, entries(STEERED)?])
}

#[test]
#[ignore = "no kernel decides it: sizes that the daemon chooses"]
fn maps_of_steering_have_room_only_where_something_is_steered() -> Result<()> {
    let settings = Settings::from_environment()?;
    let wanted = settings.maps.steering;

    let alone = Node::with(settings.clone())?;
    alone.start()?;
    same("room without", room_for_steering(&alone)?, [1, 1])?;

    let site = Site::set(settings)?;
    site.node().start()?;
    let room = room_for_steering(site.node())?;
    same("room with", room, [wanted + 1, 2 * wanted + 1])
}
