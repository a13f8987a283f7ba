//! Uplinks of other kinds than a network card: a VLAN, a bond, a bridge, and a tunnel between nodes. Clients behind them reach
//! Services, and clients elsewhere reach backends behind them. `links` has the link without a link-layer header.

use std::net::Ipv4Addr;

use anyhow::{Context as _, Result};
use tunnel_tests::{
    feature::{self, Feature},
    sandbox::Sandbox,
    test_name, wireguard,
};

use super::{
    ADDRESSES, Backend, REMOTE, expect_reached,
    host::{elsewhere, outside_the_cgroup},
    links::{NEAR, route_to_node_from, set_up},
    program_local_backend, route_to_node, service,
};
use crate::{
    fixture::Scene,
    service_addresses::configured,
    support::{ensure_eq, run},
};

/// The addresses of the node and of the other node on the cable between them.
const NEAR_UNDER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 65);
const FAR_UNDER: Ipv4Addr = Ipv4Addr::new(203, 0, 113, 66);

/// A kind of link. At either end, the link `over` is created on top of `under`, an end of a cable.
struct Kind {
    /// The commands of `ip` that create the link on the node.
    near: String,
    /// The commands of `ip` that create the other end.
    far: String,
    /// True if the links are of WireGuard, which has keys.
    is_wireguard: bool,
}

impl Kind {
    fn new(near: String, far: String) -> Self {
        Self {
            near,
            far,
            is_wireguard: false,
        }
    }
}

/// Connects the node and [`REMOTE`] by a link of a kind.
fn connect(scene: &Scene, kind: &Kind) -> Result<Sandbox> {
    let remote = scene.node.network().create_unconnected("remote")?;
    let host = scene.node.host();
    let pid = remote.pid();
    host.ip(&format!(
        "link add under type veth peer name under netns {pid}\n"
    ))?;
    let ends = [
        (host, NEAR_UNDER, &kind.near, NEAR),
        (&remote, FAR_UNDER, &kind.far, REMOTE.ips()),
    ];
    for (sandbox, under, commands, ips) in ends {
        sandbox.ip(&format!("addr add {under}/30 dev under\n"))?;
        for command in commands.lines() {
            run(sandbox, &format!("ip {command}"))?;
        }
        sandbox.ip("link set under up\n")?;
        set_up(sandbox, "over", ips)?;
    }
    if kind.is_wireguard {
        wireguard::connect("over", [(host, NEAR_UNDER), (&remote, FAR_UNDER)])?;
    }
    route_to_node_from(&remote)?;
    Ok(remote)
}

/// Starts a node that is connected to [`REMOTE`] by a link of a kind.
fn start(kind: &Kind) -> Result<(Scene, Sandbox)> {
    let scene = configured("uplinks: [uplink, under, over]")?;
    route_to_node(&scene)?;
    let remote = connect(&scene, kind)?;
    scene.node.start()?;
    Ok((scene, remote))
}

/// Checks that packets are translated exactly once on a link of a kind, in either direction.
fn expect_translated(kind: &Kind) -> Result<()> {
    let (scene, remote) = start(kind)?;
    let (_pod, backend) = program_local_backend(&scene)?;
    for (what, vip, ports) in ADDRESSES {
        let reached = expect_reached(&remote, &backend, (vip, ports), REMOTE.ips());
        reached.with_context(|| format!("{what}, from behind the link"))?;
    }

    // Another node, because the change of a Service's backends would take some time.
    let (scene, remote) = start(kind)?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    for (what, vip, ports) in ADDRESSES.into_iter().skip(1) {
        let reached = expect_reached(scene.node.outside(), &backend, (vip, ports), NEAR);
        reached.with_context(|| format!("{what}, with a backend behind the link"))?;
    }
    let process = outside_the_cgroup(&scene, REMOTE)?;
    for (what, vip, ports) in elsewhere() {
        let reached = expect_reached(&process, &backend, (vip, ports), NEAR);
        reached.with_context(|| format!("{what}, from the host"))?;
    }
    Ok(())
}

#[test]
fn packets_are_translated_on_a_vlan_of_an_uplink() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Vlan])? {
        return Ok(());
    }
    let vlan = "link add over link under type vlan id 5\n".to_owned();
    expect_translated(&Kind::new(vlan.clone(), vlan))
}

#[test]
fn packets_are_translated_on_a_vlan_of_a_bond() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Vlan, Feature::Bond])? {
        return Ok(());
    }
    expect_translated(&Kind::new(
        "link add bond type bond mode active-backup miimon 100\n\
         link set under down\n\
         link set under master bond\n\
         link set bond up\n\
         link add over link bond type vlan id 5\n"
            .to_owned(),
        "link add over link under type vlan id 5\n".to_owned(),
    ))
}

#[test]
fn packets_are_translated_on_wireguard_between_nodes() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Wireguard])? {
        return Ok(());
    }
    let link = "link add over type wireguard\n".to_owned();
    expect_translated(&Kind {
        near: link.clone(),
        far: link,
        is_wireguard: true,
    })
}

#[test]
fn packets_are_translated_on_a_bridge_that_has_the_card_as_a_port() -> Result<()> {
    let bridge = "link add over type bridge\n\
                  link set under master over\n"
        .to_owned();
    expect_translated(&Kind::new(bridge.clone(), bridge))
}

#[test]
fn packets_are_translated_on_a_vxlan_between_nodes() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Vxlan])? {
        return Ok(());
    }
    let vxlan = |own: Ipv4Addr, peer: Ipv4Addr| {
        format!("link add over type vxlan id 5 dstport 4789 local {own} remote {peer} dev under\n")
    };
    expect_translated(&Kind::new(
        vxlan(NEAR_UNDER, FAR_UNDER),
        vxlan(FAR_UNDER, NEAR_UNDER),
    ))
}

#[test]
fn packets_are_translated_on_an_ip_tunnel_between_nodes_unless_its_header_is_in_the_way()
-> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Sit])? {
        return Ok(());
    }
    let tunnel = |own: Ipv4Addr, peer: Ipv4Addr| {
        format!("link add over type sit mode any local {own} remote {peer} dev under\n")
    };
    let kind = Kind::new(tunnel(NEAR_UNDER, FAR_UNDER), tunnel(FAR_UNDER, NEAR_UNDER));
    let (scene, _remote) = start(&kind)?;
    let packets = scene.node.status()?["packets"].take();
    let warnings = packets["warnings"].to_string();
    let is_left_out = warnings.contains("over has neither Ethernet nor bare IP packets");
    let release = run(scene.node.host(), "cat /proc/sys/kernel/osrelease")?;
    ensure_eq("left out", is_left_out, release.starts_with("5.10.")).context(warnings)?;
    if is_left_out {
        return Ok(());
    }
    drop(scene);
    expect_translated(&kind)
}
