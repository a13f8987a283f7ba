//! An outsider sends packets to the ingress over a second network interface of the node, which looks like a pod's:
//! one end of a veth pair, without a route via a gateway.

use std::{
    fs,
    net::{SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{
    culvert_instance::{Instance, InstanceSettings},
    node::Node,
    node_network::POD_RANGES,
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    tunnel_testbed::{KUBELET_PORTS, TunnelTestbed},
    wait,
};

use crate::{
    guard::daemon::network_status,
    support::{CHANGE_TIMEOUT, run},
};

/// The steering addresses of the edge node's kubelet, with the port of the ingress.
const STEERING: [&str; 2] = ["198.19.0.1:10270", "[fd00:c01e::1]:10270"];

/// The timeout for a connection whose packets should be dropped.
const DROP_TIMEOUT: Duration = Duration::from_millis(300);

/// Connects another machine to the node by a second network interface, `second`. `addresses` are `ip` commands that
/// run on the node.
fn stranger(node: &Node, addresses: &str) -> Result<Sandbox> {
    let stranger = node.network().create_unconnected("stranger")?;
    let pid = stranger.pid();
    node.host().ip(&format!(
        "link add second type veth peer name eth0 netns {pid}\nlink set second up\n{addresses}"
    ))?;
    stranger.ip("link set lo up\nlink set eth0 up\n")?;
    Ok(stranger)
}

fn connect(from: &Sandbox, to: SocketAddr) -> Result<TcpStream> {
    let socket = from.socket(Domain::for_address(to), Type::STREAM)?;
    connect_within(&socket, to, DROP_TIMEOUT)?;
    Ok(socket.into())
}

/// Sends a request to the kubelet by dialling the ingress directly.
fn request_from_outside(testbed: &TunnelTestbed, from: &Sandbox, to: &str) -> Result<()> {
    let stream = connect(from, to.parse()?)?;
    stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    let dialled = TunnelTestbed::addr_v4(KUBELET_PORTS[0]);
    testbed.client(stream, dialled)?.healthz().map(drop)
}

/// Waits until the status lists a link in the given field.
fn wait_listed(node: &Node, field: &str, name: &str) -> Result<()> {
    let is_listed = || {
        let view = network_status(node).unwrap_or_default();
        let names = view[field].as_array().cloned().unwrap_or_default();
        names.iter().any(|listed| listed == name)
    };
    wait::until(CHANGE_TIMEOUT, is_listed)
        .with_context(|| format!("{field} lacks {name}: {:?}", network_status(node)))
}

/// Requests `/healthz` of the kubelet. Returns an error if the guard drops a packet, which would be sent again only after
/// a second.
fn request_at_once(testbed: &TunnelTestbed, from: &Sandbox) -> Result<()> {
    let dropped = || testbed.node().reason_count("guard_dropped");
    let before = dropped()?;
    testbed.request_healthz(from)?;
    let after = dropped()?;
    ensure!(after == before, "the guard dropped {}", after - before);
    Ok(())
}

#[test]
fn an_outsider_on_a_second_veth_interface_does_not_reach_the_kubelet() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let (node, pod) = (testbed.node(), testbed.pod()?);
    let stranger = stranger(
        node,
        "addr add 203.0.113.1/24 dev second\naddr add fd00:203::1/64 dev second nodad\n",
    )?;
    stranger.ip(
        "addr add 203.0.113.2/24 dev eth0\naddr add fd00:203::2/64 dev eth0 nodad\n\
         route add default via 203.0.113.1\nroute add default via fd00:203::1\n",
    )?;
    let before = testbed.kubelet().record()?.exchanges.len();

    // First while the daemon notices the link, and then with the guard.
    for _ in 0..2 {
        for to in STEERING {
            let reached = request_from_outside(&testbed, &stranger, to);
            ensure!(reached.is_err(), "the outsider reaches the kubelet at {to}");
        }
        wait_listed(node, "uplinks", "second")?;
    }
    ensure!(
        node.reason_count("guard_dropped")? > 0,
        "no packet was dropped"
    );
    let after = testbed.kubelet().record()?.exchanges.len();
    ensure!(
        after == before,
        "the kubelet got {} requests",
        after - before
    );
    testbed.request_healthz(node.host())?;
    testbed.request_healthz(&pod)?;
    let shown = node.culvert(&["status"])?.stdout;
    ensure!(shown.contains("1: pod1"), "{shown}");

    // A link that the config names leads to pods.
    node.stop()?;
    let config = fs::read_to_string(node.config_path())?;
    let named = config.replace("service:\n", "service:\n  podLinks: [sec*]\n");
    fs::write(node.config_path(), named)?;
    node.start()?;
    wait_listed(node, "podLinks", "second")?;
    let reached = || request_from_outside(&testbed, &stranger, STEERING[0]).is_ok();
    wait::until(CHANGE_TIMEOUT, reached).context("a named link is refused")
}

#[test]
#[ignore = "independent of the kernel: `an_outsider_on_a_second_veth_interface_does_not_reach_the_kubelet` follows links on each kernel"]
fn an_outsider_with_link_local_addresses_only_does_not_reach_the_kubelet() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    let stranger = stranger(node, "addr add fe80::1/64 dev second nodad\n")?;
    stranger.ip("route add default via fe80::1 dev eth0\n")?;

    let reached = request_from_outside(&testbed, &stranger, STEERING[1]);

    ensure!(reached.is_err(), "the outsider reaches the kubelet");
    wait_listed(node, "refusedLinks", "second")?;
    ensure!(
        node.reason_count("arrived_unsteered")? > 0,
        "the refusal isn't counted"
    );
    let shown = node.culvert(&["status"])?.stdout;
    ensure!(shown.contains("refused links       1: second"), "{shown}");
    testbed.request_healthz(node.host())
}

#[test]
fn a_point_to_point_neighbour_is_no_pod_but_a_pod_may_have_an_address_of_another_range()
-> Result<()> {
    let testbed = TunnelTestbed::prepare(InstanceSettings::from_environment()?)?;
    let (node, pod) = (testbed.node(), testbed.pod()?);
    let config = fs::read_to_string(node.config_path())?;
    let is_kept = |line: &&str| !line.contains("clusterCIDRs");
    let lines: Vec<_> = config.lines().filter(is_kept).collect();
    fs::write(node.config_path(), lines.join("\n"))?;
    node.apply(Instance::node().pod_cidrs(&POD_RANGES))?;
    testbed.start()?;
    wait_listed(node, "podLinks", "pod1")?;

    let _stranger = stranger(node, "")?;
    for address in [
        "203.0.113.1 peer 203.0.113.2",
        "fd00:203::1 peer fd00:203::2",
        "fd00:203::3/128",
    ] {
        run(node.host(), &format!("ip addr add {address} dev second"))?;
    }
    wait_listed(node, "refusedLinks", "second")?;
    let routes = run(node.host(), "ip -6 route show dev second")?;
    ensure!(routes.contains("fd00:203::2 "), "{routes}");

    // Calico's addresses are not in the Node object's ranges.
    run(node.host(), "ip route add 192.168.3.4/32 dev second")?;
    wait_listed(node, "podLinks", "second")?;
    testbed.request_healthz(&pod)
}

#[test]
fn a_pod_reaches_the_kubelet_as_soon_as_its_route_or_its_bridge_is_there() -> Result<()> {
    let testbed = TunnelTestbed::new()?;
    let node = testbed.node();
    let host = node.host();

    // A CNI plugin adds a pod's link first, and its route later.
    let pod = testbed.pod()?;
    let routes = [format!("{}/32", pod.v4()), format!("{}/128", pod.v6())];
    for route in &routes {
        run(host, &format!("ip route del {route} dev pod1"))?;
    }
    wait_listed(node, "refusedLinks", "pod1")?;
    for route in &routes {
        run(host, &format!("ip route add {route} dev pod1"))?;
    }
    request_at_once(&testbed, &pod)?;
    wait_listed(node, "podLinks", "pod1")?;

    // The link of another pod is replaced by a port of a bridge, which has an address in the pod range.
    let bridged = node.pod("bridged")?;
    let pid = bridged.pid();
    for command in [
        "link del pod2",
        "link add cni0 type bridge",
        &format!("link add port type veth peer name eth0 netns {pid}"),
        "link set port master cni0 up",
        "link set cni0 up",
        "addr add 10.1.0.129/25 dev cni0",
    ] {
        run(host, &format!("ip {command}"))?;
    }
    bridged.ip(
        "link set eth0 up\naddr add 10.1.0.130/25 dev eth0\nroute add default via 10.1.0.129\n",
    )?;
    request_at_once(&testbed, &bridged)?;
    wait_listed(node, "podLinks", "cni0")
}
