//! Packets of pods whose sockets are in no cgroup of the instance, such as those of virtual machines, and packets to pods: with
//! `service.packets.links: all`.

use std::{
    fs, io,
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    node_network::NodeNetwork,
    pod::Pod,
    sandbox::{Sandbox, connect_within},
};

use super::{
    ADDRESSES, Backend, CLIENT, REMOTE, attached, connect_to_node_port, exchange_stream,
    expect_reached, remote, route_to_node, service, start_with_remote_backend,
};
use crate::{
    fixture::{Scene, WEB},
    service_addresses::configured,
    support::{Dialer, HOST, HTTP, Vip, ensure_eq, run, until_eq},
};

/// The bridge's addresses, in a part of the range of pods.
const BRIDGE: Vip = on_bridge(1);

/// Returns the addresses with a number in the bridge's subnets.
const fn on_bridge(number: u8) -> Vip {
    Vip {
        v4: Ipv4Addr::new(10, 1, 0, 128 + number),
        v6: Ipv6Addr::new(0xfd00, 0x10, 1, 0, 0x8000, 0, 0, number as u16),
    }
}

/// Creates a sandbox that shares a pod's network namespace, but whose sockets meet no hook. It has routes to the addresses
/// of Services, since its packets must leave the pod.
pub(super) fn unhooked(network: &NodeNetwork, pod: &Pod) -> Result<Sandbox> {
    let name = format!("{}-without-hooks", pod.name());
    let sandbox = network.share_namespace(pod, &name, None)?;
    let routes = ADDRESSES.map(|(_, Vip { v4, v6 }, _)| {
        format!(
            "route add {v4}/32 via 169.254.1.1 dev eth0\nroute add {v6}/128 via fe80::1 dev eth0\n"
        )
    });
    sandbox.ip(&routes.concat())?;
    Ok(sandbox)
}

/// Creates a pod outside the instance's cgroup that is connected to the bridge `cni0`, which has the address [`BRIDGE`].
fn pod_on_bridge(scene: &Scene, number: u8) -> Result<(Sandbox, [IpAddr; 2])> {
    let name = format!("port{number}");
    let pod = scene.node.network().create_unconnected(&name)?;
    let ips = on_bridge(number);
    let (pid, gateway) = (pod.pid(), BRIDGE);
    let host = scene.node.host();
    host.ip(&format!(
        "link add {name} type veth peer name eth0 netns {pid}\n"
    ))?;
    run(host, &format!("ip link set {name} master cni0"))?;
    host.ip(&format!("link set {name} up\n"))?;
    pod.ip(&format!(
        "link set lo up\n\
         link set eth0 up\n\
         addr add {}/25 dev eth0\n\
         addr add {}/65 dev eth0 nodad\n\
         route add default via {}\n\
         route add default via {}\n",
        ips.v4, ips.v6, gateway.v4, gateway.v6
    ))?;
    Ok((pod, ips.ips()))
}

fn add_bridge(scene: &Scene) -> Result<()> {
    let Vip { v4, v6 } = BRIDGE;
    run(scene.node.host(), "ip link add cni0 type bridge")?;
    scene.node.host().ip(&format!(
        "addr add {v4}/25 dev cni0\n\
         addr add {v6}/65 dev cni0 nodad\n\
         link set cni0 up\n"
    ))
}

/// Restarts the daemon with another value of `service.packets.links`.
fn switch(scene: &Scene, from: &str, to: &str) -> Result<()> {
    let config = fs::read_to_string(scene.node.config_path())?;
    let [from, to] = [from, to].map(|links| format!("links: {links}"));
    ensure!(config.contains(&from), "{config}");
    fs::write(scene.node.config_path(), config.replace(&from, &to))?;
    scene.node.restart()
}

#[test]
fn pods_on_a_bridge_reach_each_other_and_themselves() -> Result<()> {
    let scene = configured("packets: { links: all }\n  podLinks: [cni0]")?;
    add_bridge(&scene)?;
    let (client, client_ips) = pod_on_bridge(&scene, 2)?;
    let (server, ips) = pod_on_bridge(&scene, 3)?;
    let backend = Backend::at(&server, ips)?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(ips))?;
    for (what, vip, ports) in ADDRESSES {
        // On the way back, the bridge would deliver the replies without the node.
        for (whom, pod) in [("another pod", &client), ("the backend", &server)] {
            let reached = expect_reached(pod, &backend, (vip, ports), BRIDGE.ips());
            reached.with_context(|| format!("{what}, from {whom}"))?;
        }
    }

    // Packets that are for no Service aren't masqueraded.
    let listener = server.listen((ips[0], 7777))?;
    let _stream = client.connect((ips[0], 7777))?;
    let (_, peer) = listener.accept()?;
    ensure_eq("the client of the pod itself", peer.ip(), client_ips[0])
}

/// Starts the daemon, and asserts whom a backend on another node sees if a client dials the cluster IP.
fn expect_seen_elsewhere(scene: &Scene, client: &Sandbox, seen: [IpAddr; 2]) -> Result<()> {
    let (_remote, backend) = start_with_remote_backend(scene)?;
    let (what, vip, ports) = ADDRESSES[0];
    expect_reached(client, &backend, (vip, ports), seen).context(what)
}

#[test]
#[ignore = "independent of the kernel: the test above covers the programs"]
fn senders_behind_the_named_bridge_are_local() -> Result<()> {
    for (bridge, is_local) in [("cni0", true), ("other", false)] {
        let scene = configured(&format!(
            "packets: {{ links: all }}\n  podLinks: [cni0]\n  detectLocal: BridgeInterface\n  bridgeInterface: {bridge}"
        ))?;
        add_bridge(&scene)?;
        let (client, client_ips) = pod_on_bridge(&scene, 2)?;
        let seen = if is_local { client_ips } else { HOST.ips() };
        expect_seen_elsewhere(&scene, &client, seen)
            .with_context(|| format!("detectLocal with {bridge}"))?;
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the daemon compares names of links"]
fn senders_on_links_with_the_named_prefix_are_local() -> Result<()> {
    for (prefix, is_local) in [("pod", true), ("lxc", false)] {
        let scene = configured(&format!(
            "packets: {{ links: all }}\n  detectLocal: InterfaceNamePrefix\n  interfaceNamePrefix: {prefix}"
        ))?;
        let sender = scene.node.pod("sender")?;
        let client = unhooked(scene.node.network(), &sender)?;
        let seen = if is_local {
            [sender.v4(), sender.v6()]
        } else {
            HOST.ips()
        };
        expect_seen_elsewhere(&scene, &client, seen)
            .with_context(|| format!("detectLocal with {prefix}"))?;
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the programs at the sockets search the same ranges"]
fn packets_of_pods_and_from_outside_must_be_in_the_source_ranges() -> Result<()> {
    for admitted in ["the pod", "the client outside"] {
        let scene = configured("packets: { links: all }")?;
        route_to_node(&scene)?;
        let sender = scene.node.pod("sender")?;
        let pod = unhooked(scene.node.network(), &sender)?;
        let remote = remote(&scene)?;
        let backend = Backend::at(&remote, REMOTE.ips())?;
        scene.node.start()?;
        let Vip { v4, v6 } = if admitted == "the pod" {
            Vip::of_pod(&sender)
        } else {
            CLIENT
        };
        let ranges = format!("loadBalancerSourceRanges: [\"{v4}/32\", \"{v6}/128\"]");
        let restricted = service("Cluster").of_type("LoadBalancer").spec(&ranges);
        scene.program(restricted.backends(REMOTE.ips()))?;
        let [_, _, (_, balancer, ports), (_, external, _)] = ADDRESSES;
        let clients = [
            ("the pod", &pod),
            ("the client outside", scene.node.outside()),
        ];
        for (name, client) in clients {
            let check = || {
                // The ranges are for the load balancer's address only.
                expect_reached(client, &backend, (external, ports), HOST.ips())?;
                if name == admitted {
                    expect_reached(client, &backend, (balancer, ports), HOST.ips())
                } else {
                    expect_dropped(&scene, client, (balancer, ports))
                }
            };
            check().with_context(|| format!("{name}, while {admitted} is admitted"))?;
        }
    }
    Ok(())
}

/// Asserts that a connection and a datagram get no answer, since the client is in no source range.
fn expect_dropped(
    scene: &Scene,
    client: &Sandbox,
    (vip, [http, dns]): (Vip, [u16; 2]),
) -> Result<()> {
    for dialer in [Dialer::V4, Dialer::V6] {
        let count = || scene.node.reason_count("source_range_denied");
        let before = count()?;
        let within = Duration::from_millis(300);
        let socket = dialer.tcp_socket(client)?;
        let connected = connect_within(&socket, dialer.address(vip, http), within);
        let kind = connected.err().context("a connection")?.kind();
        ensure_eq("TCP", kind, io::ErrorKind::TimedOut)?;
        let socket = dialer.udp_socket(client)?;
        socket.set_read_timeout(Some(within))?;
        socket.send_to(b"ask", dialer.address(vip, dns))?;
        let answer = socket.recv_from(&mut [0; 16]);
        let kind = answer.err().context("an answer")?.kind();
        ensure_eq("UDP", kind, io::ErrorKind::WouldBlock)?;
        ensure!(count()? >= before + 2, "not counted");
    }
    Ok(())
}

#[test]
fn flows_go_on_when_links_of_pods_are_included_and_left_out_again() -> Result<()> {
    let scene = configured("packets: { links: uplinks }")?;
    route_to_node(&scene)?;
    let pod = scene.node.pod("local")?;
    let ips = [pod.v4(), pod.v6()];
    let backend = Backend::at(&pod, ips)?;
    let sender = scene.node.pod("sender")?;
    let client = unhooked(scene.node.network(), &sender)?;
    let outside = scene.node.outside();
    scene.node.start()?;
    ensure_eq("programs on the uplink", attached(&scene)?, 2)?;
    scene.program(service("Cluster").backends(ips))?;

    let connect = || -> Result<_> {
        let (one, other) = connect_to_node_port(outside, &backend)?;
        let seen = other.peer_addr()?.ip();
        Ok(((one, other), seen))
    };
    let mut open = Vec::new();
    let (first, seen) = connect()?;
    ensure_eq("seen with the uplinks only", seen, CLIENT.ips()[0])?;
    open.push(first);

    switch(&scene, "uplinks", "all")?;
    ensure!(attached(&scene)? > 2, "no programs on links of pods");
    let (second, seen) = connect()?;
    ensure_eq("seen with all links", seen, HOST.ips()[0])?;
    open.push(second);
    let stream = Dialer::V4.connect(&client, WEB, HTTP)?;
    let (accepted, peer) = backend.tcp[0].accept()?;
    ensure_eq(
        "the pod, whose sockets meet no hook",
        peer.ip(),
        sender.v4(),
    )?;
    open.push((stream, accepted));

    switch(&scene, "all", "uplinks")?;
    ensure!(attached(&scene)? > 2, "flows need the programs");
    let (third, seen) = connect()?;
    ensure_eq("seen with the uplinks again", seen, CLIENT.ips()[0])?;
    open.push(third);
    for (number, (one, other)) in open.iter().enumerate() {
        exchange_stream(one, other).with_context(|| format!("connection {number}"))?;
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: `flows_go_on_when_links_of_pods_are_included_and_left_out_again` shows that programs are attached"]
fn programs_leave_the_links_of_pods_when_no_flow_needs_them() -> Result<()> {
    let scene = configured("packets: { links: all }")?;
    let pod = scene.node.pod("local")?;
    let backend = Backend::at(&pod, [pod.v4(), pod.v6()])?;
    scene.node.start()?;
    let new = scene.node.pod("new")?;
    // Two programs on the uplink, and on the link of each pod: the client, the backend, `local` and `new`.
    until_eq("programs", 10, || attached(&scene))?;
    let status = scene.node.status()?;
    let pod_links = status["packets"]["podLinks"].as_array().map(Vec::len);
    ensure_eq("links of pods", pod_links, Some(4))?;
    drop((backend, new));

    switch(&scene, "all", "uplinks")?;
    until_eq("programs", 2, || attached(&scene))
}
