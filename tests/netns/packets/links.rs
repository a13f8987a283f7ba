//! The links whose packets are translated.

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use crate::{
    fixture::Scene,
    service_addresses::configured,
    support::{CHANGE_TIMEOUT, ensure_eq, run},
};

/// Returns the names of the uplinks whose packets are translated, and the warnings about them.
fn shown(scene: &Scene) -> Result<(Vec<String>, String)> {
    let status = scene.node.status()?;
    let uplinks = serde_json::from_value(status["packets"]["uplinks"].clone())?;
    Ok((uplinks, status["packets"]["warnings"].to_string()))
}

#[test]
fn new_uplinks_get_programs_and_those_without_ethernet_header_and_ports_are_left_out() -> Result<()>
{
    let scene = configured("uplinks: [uplink, more, tun, port]")?;
    let host = scene.node.host();
    for command in [
        "ip link add more type veth peer name more-peer",
        "ip link set more up",
        "ip link add bridge type bridge",
        "ip link add port type veth peer name port-peer",
        "ip link set port master bridge up",
        "ip tuntap add mode tun name tun",
        "ip link set tun up",
    ] {
        run(host, command)?;
    }
    scene.node.start()?;
    let (uplinks, warnings) = shown(&scene)?;
    ensure_eq(
        "uplinks",
        uplinks,
        vec!["uplink".to_owned(), "more".to_owned()],
    )?;
    ensure!(
        warnings.contains("uplink tun has no Ethernet header"),
        "{warnings}"
    );
    ensure!(!warnings.contains("port"), "{warnings}");

    // A link with the same name is another link.
    for command in [
        "del more",
        "add more type veth peer name more-peer",
        "set more up",
    ] {
        run(host, &format!("ip link {command}"))?;
    }
    let shown = run(host, "ip -o link show dev more")?;
    let (index, _) = shown.split_once(':').context("no index")?;
    let pin = scene.node.bpffs().join(format!("links/in-{index}"));
    wait::until(CHANGE_TIMEOUT, || pin.exists()).with_context(|| format!("no {}", pin.display()))
}
