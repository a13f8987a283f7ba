//! Connections to edge nodes from machines outside the cloud node, and from pods whose sockets meet no hook, which the cloud
//! node forwards into the tunnel.

use std::{
    fs,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    culvert_instance::InstanceSettings,
    edge_node::{EDGE_V4, EDGE_V6},
    node_network::{HOST_V4, HOST_V6, OUTSIDE_V4, OUTSIDE_V6},
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
};

use super::{client, edge_addresses, expect_refused, expect_unsteered};
use crate::support::{count_during, ensure_eq, errno, is_unreachable, run};

/// Further addresses of the machine outside, which aren't listed.
const UNLISTED: [IpAddr; 2] = [
    IpAddr::V4(Ipv4Addr::new(192, 0, 2, 77)),
    IpAddr::V6(Ipv6Addr::new(0x2001, 0xdb8, 0, 0, 0, 0, 0, 0x77)),
];

/// Prepares a testbed with additional settings of steering and of Services.
fn prepare(steering: &str, service: &str) -> Result<TunnelTestbed> {
    let mut settings = InstanceSettings::from_environment()?;
    service.clone_into(&mut settings.node_ports);
    let testbed = TunnelTestbed::prepare(settings)?;
    let path = testbed.node().config_path();
    let config = fs::read_to_string(&path)?;
    let before = "steering: {}";
    ensure!(config.contains(before), "{config}");
    let after = format!("steering: {{ {steering} }}");
    fs::write(&path, config.replace(before, &after))?;
    Ok(testbed)
}

/// Adds routes to the edge node that lead through the cloud node.
fn route_through(sandbox: &Sandbox, gateways: [&str; 2], device: &str) -> Result<()> {
    let [v4, v6] = gateways;
    sandbox.ip(&format!(
        "route add {EDGE_V4}/32 via {v4} dev {device}\nroute add {EDGE_V6}/128 via {v6} dev {device}\n"
    ))
}

fn route_outside(testbed: &TunnelTestbed) -> Result<()> {
    let gateways = [HOST_V4.to_string(), HOST_V6.to_string()];
    let [v4, v6] = &gateways;
    route_through(testbed.node().outside(), [v4, v6], "eth0")
}

/// Connects a socket that is bound to an address to the edge node.
fn connect_from(sandbox: &Sandbox, from: IpAddr, to: SocketAddr) -> Result<std::io::Result<()>> {
    let socket = sandbox.socket(Domain::for_address(to), Type::STREAM)?;
    socket.bind(&SocketAddr::new(from, 0).into())?;
    Ok(connect_within(&socket, to, RESPONSE_TIMEOUT))
}

#[test]
fn listed_machines_reach_the_kubelet_through_the_node_and_others_do_not() -> Result<()> {
    // Processes and pods of the node may not use the ingress, except the host itself.
    let listed = format!(
        "forwarded: [\"{OUTSIDE_V4}/32\", \"{OUTSIDE_V6}/128\"], allow: [host, 192.0.2.0/24, 10.1.0.0/24, \"fd00:10:1::/64\"]"
    );
    let testbed = prepare(&listed, "packets: { links: uplinks }")?;
    let (node, outside) = (testbed.node(), testbed.node().outside());
    route_outside(&testbed)?;
    let [v4, v6] = UNLISTED;
    run(outside, &format!("ip addr add {v4}/24 dev eth0"))?;
    let v6 = format!("ip addr add {v6}/64 dev eth0 nodad preferred_lft 0");
    run(outside, &v6)?;
    testbed.start()?;

    for (to, own) in edge_addresses(KUBELET_PORTS[0]).into_iter().zip(UNLISTED) {
        let connect = || client(&testbed, outside, to);
        let (mut kubelet, counted) = count_during(node, &["steered", "arrived_unsteered"], connect)
            .with_context(|| format!("{to}: {}", node.logs()))?;
        kubelet.healthz().with_context(|| to.to_string())?;
        ensure_eq("peer", kubelet.peer()?, to)?;
        ensure_eq("steered", counted, vec![1, 0])?;
        kubelet.healthz().context("the second request")?;

        let error = errno(connect_from(outside, own, to)?);
        ensure!(is_unreachable(error), "{own} → {to}: {error:?}");
    }
    let flows = node.culvert(&["flows"])?.stdout;
    ensure!(flows.contains("10.20.0.7:10250"), "{flows}");
    let to = format!("{}/TCP", edge_addresses(KUBELET_PORTS[0])[0]);
    let from = format!("{OUTSIDE_V4}:40000");
    let explained = node.culvert(&["explain", "--from", &from, "--to", &to, "--by", "uplink"])?;
    ensure!(
        explained.stdout.contains("198.19.0.") && explained.stdout.contains("sent to the tunnel"),
        "{}{}",
        explained.stdout,
        explained.stderr
    );

    // Without the daemon, nothing listens at the steering address.
    node.kill9()?;
    for to in edge_addresses(KUBELET_PORTS[0]) {
        expect_refused(outside, to)?;
    }
    node.start()?;
    testbed.wait_for_kubelet()?;
    for to in edge_addresses(KUBELET_PORTS[0]) {
        client(&testbed, outside, to)
            .context("after the restart")?
            .healthz()?;
    }
    Ok(())
}

#[test]
fn pods_whose_sockets_meet_no_hook_reach_the_kubelet_if_links_of_pods_are_included() -> Result<()> {
    for (links, is_reached) in [("all", true), ("uplinks", false)] {
        let testbed = prepare("", &format!("packets: {{ links: {links} }}"))?;
        let pod = testbed.pod()?;
        let sandbox = testbed
            .node()
            .network()
            .share_namespace(&pod, "without-hooks", None)?;
        route_through(&sandbox, ["169.254.1.1", "fe80::1"], "eth0")?;
        testbed.start()?;
        for to in edge_addresses(KUBELET_PORTS[0]) {
            if is_reached {
                let mut kubelet = client(&testbed, &sandbox, to)?;
                kubelet.healthz().with_context(|| to.to_string())?;
                ensure_eq("peer", kubelet.peer()?, to)?;
            } else {
                expect_unsteered(&sandbox, to)?;
            }
        }
    }
    Ok(())
}
