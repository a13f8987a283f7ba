//! `service.packets.delivery: redirect`: packets go past the network stack, which still does what only it can do.

use std::fs;

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::sandbox::Sandbox;

use super::{
    Backend, CLIENT, expect_reached, program_local_backend, route_to_node,
    start_with_remote_backend,
};
use crate::{
    fixture::Scene,
    service_addresses::{NODE_DNS, NODE_HTTP, configured},
    support::{Dialer, HOST, ensure_eq},
};

/// The number of datagrams in each direction.
const DATAGRAMS: u64 = 50;

/// Returns the number of packets that the network stack of a sandbox has forwarded, over IPv4 and IPv6.
fn forwarded(sandbox: &Sandbox) -> Result<[u64; 2]> {
    let read = |name: &str| fs::read_to_string(format!("/proc/{}/net/{name}", sandbox.pid()));
    let snmp = read("snmp")?;
    let mut lines = snmp.lines().filter_map(|line| line.strip_prefix("Ip: "));
    let (names, numbers) = (lines.next(), lines.next());
    let mut pairs = names
        .into_iter()
        .flat_map(str::split_whitespace)
        .zip(numbers.into_iter().flat_map(str::split_whitespace));
    let v4 = pairs.find(|(name, _)| *name == "ForwDatagrams");
    let v4 = v4.context("no ForwDatagrams")?.1.parse()?;
    let snmp6 = read("snmp6")?;
    let line = snmp6
        .lines()
        .find(|line| line.starts_with("Ip6OutForwDatagrams"));
    let v6 = line.and_then(|line| line.split_whitespace().nth(1));
    Ok([v4, v6.context("no Ip6OutForwDatagrams")?.parse()?])
}

/// Exchanges datagrams with the backend through the node port, and returns how many the stack of the node has forwarded.
fn exchange((scene, client): (&Scene, &Sandbox), backend: &Backend, index: usize) -> Result<u64> {
    let dialer = [Dialer::V4, Dialer::V6][index];
    let client = dialer.udp_socket(client)?;
    let before = forwarded(scene.node.host())?;
    for _ in 0..DATAGRAMS {
        client.send_to(b"ask", dialer.address(HOST, NODE_DNS))?;
        let (_, from) = backend.udp[index].recv_from(&mut [0; 16])?;
        backend.udp[index].send_to(b"answer", from)?;
        client.recv_from(&mut [0; 16])?;
    }
    Ok(forwarded(scene.node.host())?[index] - before[index])
}

/// Exchanges datagrams with the backend through the node port, and asserts that they are delivered as configured.
pub(super) fn expect_delivery(
    client: (&Scene, &Sandbox),
    backend: &Backend,
    index: usize,
    delivery: &str,
) -> Result<()> {
    let by_stack = if delivery == "stack" {
        2 * DATAGRAMS
    } else {
        0
    };
    let count = exchange(client, backend, index)?;
    // The first packets have to find their neighbours.
    ensure!(
        (by_stack..=by_stack + 8).contains(&count),
        "{delivery}: the stack has forwarded {count} of {} datagrams",
        2 * DATAGRAMS
    );
    Ok(())
}

#[test]
fn packets_go_past_the_stack_in_both_directions() -> Result<()> {
    for delivery in ["stack", "redirect"] {
        let scene = configured(&format!("packets: {{ delivery: {delivery} }}"))?;
        let (_remote, backend) = start_with_remote_backend(&scene)?;
        for index in [0, 1] {
            expect_delivery((&scene, scene.node.outside()), &backend, index, delivery)?;
        }
        let unavailable = scene.node.reason_count("redirect_unavailable")?;
        ensure!(unavailable <= 16, "{unavailable} packets not redirected");
        expect_reached(
            scene.node.outside(),
            &backend,
            (HOST, [NODE_HTTP, NODE_DNS]),
            HOST.ips(),
        )?;
    }
    Ok(())
}

#[test]
fn packets_to_and_from_pods_of_this_node_take_the_stack_which_sees_the_whole_connection()
-> Result<()> {
    let scene = configured("packets: { delivery: redirect }")?;
    route_to_node(&scene)?;
    scene.node.start()?;
    let (_pod, backend) = program_local_backend(&scene)?;
    for index in [0, 1] {
        let count = exchange((&scene, scene.node.outside()), &backend, index)?;
        ensure!(
            count >= 2 * DATAGRAMS,
            "the stack has forwarded {count} datagrams"
        );
    }
    expect_reached(
        scene.node.outside(),
        &backend,
        (HOST, [NODE_HTTP, NODE_DNS]),
        CLIENT.ips(),
    )
}

#[test]
fn a_redirected_packet_has_passed_a_router() -> Result<()> {
    for delivery in ["stack", "redirect"] {
        let scene = configured(&format!("packets: {{ delivery: {delivery} }}"))?;
        let (_remote, backend) = start_with_remote_backend(&scene)?;
        for (index, dialer) in [Dialer::V4, Dialer::V6].into_iter().enumerate() {
            exchange((&scene, scene.node.outside()), &backend, index)?;
            let client = dialer.udp_socket(scene.node.outside())?;
            client.connect(dialer.address(HOST, NODE_DNS))?;
            let options = socket2::SockRef::from(&client);
            // The node, the router before the backend, and the backend.
            for routers in [1, 2, 3_u8] {
                if index == 0 {
                    options.set_ttl_v4(routers.into())?;
                } else {
                    options.set_unicast_hops_v6(routers.into())?;
                }
                client.send(&[routers])?;
            }
            let mut first = [0];
            let received = backend.udp[index].recv_from(&mut first);
            let what = format!("{delivery}, {dialer:?}");
            received.with_context(|| what.clone())?;
            ensure_eq(&what, first, [3])?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: a setting of a link"]
fn only_the_named_uplinks_redirect_and_the_status_says_so() -> Result<()> {
    for (uplinks, redirects) in [("[other]", false), ("[other, up*]", true)] {
        let settings = format!("packets: {{ delivery: redirect, deliveryUplinks: {uplinks} }}");
        let scene = configured(&settings)?;
        scene.node.start()?;
        let status = scene.node.status()?["packets"].take();
        let warns = status["warnings"].to_string().contains("are redirected");
        ensure_eq("warned", warns, redirects)?;
        let names = status["redirecting"].to_string();
        ensure_eq("named", names.contains("uplink"), redirects).context(names)?;
    }
    Ok(())
}
