//! The links whose packets are translated.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    manifest::{Protocol, Service},
    sandbox::{Process, Sandbox},
    wait,
};

use super::{
    ADDRESSES, Backend, REMOTE, expect_reached,
    host::{elsewhere, outside_the_cgroup},
    program_local_backend,
    refusals::expect_refused,
    route_to_node, service,
};
use crate::{
    fixture::Scene,
    service_addresses::configured,
    support::{CHANGE_TIMEOUT, DNS, DNS_TARGET, Dialer, HTTP, HTTP_TARGET, Vip, ensure_eq, run},
};

/// Returns the names of the uplinks whose packets are translated, and the warnings about them.
fn shown(scene: &Scene) -> Result<(Vec<String>, String)> {
    let status = scene.node.status()?;
    let uplinks = serde_json::from_value(status["packets"]["uplinks"].clone())?;
    Ok((uplinks, status["packets"]["warnings"].to_string()))
}

#[test]
fn new_uplinks_get_programs_and_ports_are_left_out() -> Result<()> {
    let scene = configured("uplinks: [uplink, more, port]")?;
    let host = scene.node.host();
    for command in [
        "ip link add more type veth peer name more-peer",
        "ip link set more up",
        "ip link add bridge type bridge",
        "ip link add port type veth peer name port-peer",
        "ip link set port master bridge up",
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
    ensure_eq(
        "warnings",
        warnings.as_str(),
        r#"["packets on port are not translated, because it is a port of bridge; service.uplinks should name bridge"]"#,
    )?;

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

#[test]
fn programs_and_filters_of_others_on_uplinks_are_named() -> Result<()> {
    let scene = configured("uplinks: [uplink, more]")?;
    let host = scene.node.host();
    run(host, "ip link add more type veth peer name more-peer")?;
    run(host, "ip link set more up")?;
    let directory = scene.node.network().lab().directory();
    let attach = |output: &str, arguments: &[&str]| {
        let command = host.lab_command(&[&["attach-empty"], arguments].concat())?;
        command.start_until("attached", &directory.join(output), CHANGE_TIMEOUT)
    };
    let _others = [
        attach("program.log", &["uplink"])?,
        attach("filter.log", &["--filter", "more"])?,
    ];
    scene.node.start()?;
    for (uplink, direction) in [
        ("uplink", "ingress"),
        ("uplink", "egress"),
        ("more", "ingress"),
        ("more", "egress"),
    ] {
        let other = format!("program empty on {uplink} ({direction})");
        let is_named = || {
            let status = scene.node.culvert(&["status"]);
            status.is_ok_and(|status| status.stdout.contains(&other))
        };
        wait::until(CHANGE_TIMEOUT, is_named).with_context(|| format!("{other} is not named"))?;
    }
    let others = scene.node.status()?["packets"]["others"].clone();
    ensure_eq(
        "programs of others",
        others.as_array().map(Vec::len),
        Some(4),
    )
}

/// The node's addresses on the link to [`REMOTE`].
pub(super) const NEAR: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(203, 0, 113, 1)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0x113, 0, 0, 0, 0, 1)),
];

/// Sets up an end of the link between the node and [`REMOTE`].
pub(super) fn set_up(sandbox: &Sandbox, link: &str, [v4, v6]: [IpAddr; 2]) -> Result<()> {
    sandbox.ip(&format!(
        "link set lo up\n\
         link set {link} up\n\
         addr add {v4}/28 dev {link}\n\
         addr add {v6}/64 dev {link} nodad\n"
    ))
}

/// Routes everything from [`REMOTE`] to the node.
pub(super) fn route_to_node_from(remote: &Sandbox) -> Result<()> {
    NEAR.into_iter()
        .try_for_each(|gateway| remote.ip(&format!("route add default via {gateway}\n")))
}

/// Creates the pod [`REMOTE`] on another node, to which a link without a link-layer header leads. Returns the processes that
/// pass on packets, too.
fn remote_behind_tun(scene: &Scene) -> Result<(Sandbox, [Process; 2])> {
    let remote = scene.node.network().create_unconnected("remote")?;
    let directory = scene.node.network().lab().directory();
    let end = |sandbox: &Sandbox, own: &str, peer: &str, ips: [IpAddr; 2]| -> Result<_> {
        let path = |name: &str| directory.join(name).display().to_string();
        let output = directory.join(format!("{own}.log"));
        let create = sandbox
            .lab_command(&["tun", "--name", "tun"])?
            .option("--own", path(own))
            .option("--peer", path(peer));
        let process = create.start_until("created", &output, CHANGE_TIMEOUT)?;
        set_up(sandbox, "tun", ips)?;
        Ok(process)
    };
    let near = end(scene.node.host(), "near", "far", NEAR)?;
    let far = end(&remote, "far", "near", REMOTE.ips())?;
    route_to_node_from(&remote)?;
    Ok((remote, [near, far]))
}

/// Starts a node that reaches the pod [`REMOTE`] over a link without a link-layer header.
fn start_with_tun() -> Result<(Scene, Sandbox, [Process; 2])> {
    let scene = configured("uplinks: [uplink, tun]")?;
    route_to_node(&scene)?;
    let (remote, ends) = remote_behind_tun(&scene)?;
    scene.node.start()?;
    let (uplinks, _) = shown(&scene)?;
    let wanted = ["uplink", "tun"].map(str::to_owned);
    ensure_eq("uplinks", uplinks, wanted.to_vec())?;
    Ok((scene, remote, ends))
}

#[test]
fn clients_behind_a_link_without_ethernet_header_reach_services_and_are_refused() -> Result<()> {
    let (scene, remote, _ends) = start_with_tun()?;
    let (_pod, backend) = program_local_backend(&scene)?;
    for (what, vip, ports) in ADDRESSES {
        expect_reached(&remote, &backend, (vip, ports), REMOTE.ips()).context(what)?;
    }

    let without_endpoints = Vip::of(9);
    let empty = Service::new("empty", without_endpoints.ips());
    let empty = empty.port(Protocol::TCP, HTTP, HTTP_TARGET);
    scene.program(empty.port(Protocol::UDP, DNS, DNS_TARGET))?;
    for dialer in [Dialer::V4, Dialer::V6] {
        expect_refused(&remote, dialer, (without_endpoints, [HTTP, DNS]))?;
    }
    Ok(())
}

#[test]
fn clients_are_masqueraded_on_a_link_without_ethernet_header() -> Result<()> {
    let (scene, remote, _ends) = start_with_tun()?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    let (what, vip, ports) = ADDRESSES[1];
    expect_reached(scene.node.outside(), &backend, (vip, ports), NEAR).context(what)?;

    // The host reaches the Service over the link itself.
    let process = outside_the_cgroup(&scene, REMOTE)?;
    for (what, vip, ports) in elsewhere() {
        let reached = expect_reached(&process, &backend, (vip, ports), NEAR);
        reached.with_context(|| format!("{what}, from the host"))?;
    }
    Ok(())
}
