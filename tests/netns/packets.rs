//! Packets from a client outside the node, which meet no socket hook of it: they reach the Service at each of its
//! addresses, and the replies come from the address that the client dialled.

mod cluster_ips;
mod errors;
mod explain;
mod flood;
mod flows;
mod forged;
mod fragments;
mod host;
mod link_kinds;
mod links;
mod neighbours;
mod netfilter;
mod nfs;
mod order;
mod pod_links;
mod ports;
mod reachability;
mod redirect;
mod refusals;
mod sctp;
mod udp_backends;
mod under_load;
mod uplink_changes;

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, UdpSocket},
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use aya::maps::{HashMap, MapData};
use tunnel_tests::{
    culvert_instance,
    manifest::{NodeObject, Service},
    node_network::{OUTSIDE_V4, OUTSIDE_V6},
    pod::{Pod, Server},
    sandbox::{RESPONSE_TIMEOUT, Sandbox},
    server::{Listener, ServerKind},
    wait,
};

use crate::{
    capabilities,
    fixture::{Scene, WEB},
    service_addresses::{self, BALANCER, EXTERNAL, NODE_DNS, NODE_HTTP, configured},
    support::{
        CHANGE_TIMEOUT, DNS, DNS_TARGET, Dialer, HOST, HTTP, HTTP_TARGET, Vip, ensure_eq,
        maps_directory, run,
    },
};

const ENABLED: &str = "packets: { enabled: true }";

/// The addresses that the Service has, each with its IPs and its HTTP and DNS ports.
const ADDRESSES: [(&str, Vip, [u16; 2]); 4] = [
    ("the cluster IP", WEB, [HTTP, DNS]),
    ("the node port", HOST, [NODE_HTTP, NODE_DNS]),
    ("the load balancer", BALANCER, [HTTP, DNS]),
    ("the external IP", EXTERNAL, [HTTP, DNS]),
];

const CLIENT: Vip = Vip {
    v4: OUTSIDE_V4,
    v6: OUTSIDE_V6,
};

/// The pod on another node.
const REMOTE: Vip = Vip {
    v4: Ipv4Addr::new(203, 0, 113, 2),
    v6: Ipv6Addr::new(0x2001, 0xdb8, 0x113, 0, 0, 0, 0, 2),
};

/// Routes the Service's addresses from outside to the node.
fn route_to_node(scene: &Scene) -> Result<()> {
    let routes = [WEB, BALANCER, EXTERNAL].map(|Vip { v4, v6 }| {
        let Vip { v4: via4, v6: via6 } = HOST;
        format!("route add {v4}/32 via {via4}\nroute add {v6}/128 via {via6}\n")
    });
    scene.node.outside().ip(&routes.concat())
}

/// Creates the pod [`REMOTE`] on another node.
fn remote(scene: &Scene) -> Result<Sandbox> {
    pod_elsewhere(scene, "remote", REMOTE)
}

/// Creates a pod on another node, which is reached through the sandbox outside. Its gateways are the addresses before
/// its own.
fn pod_elsewhere(scene: &Scene, name: &str, pod: Vip) -> Result<Sandbox> {
    let sandbox = scene.node.network().create_unconnected(name)?;
    let (pid, outside) = (sandbox.pid(), scene.node.outside());
    for family in ["ipv4.ip_forward", "ipv6.conf.all.forwarding"] {
        outside.sysctl(&format!("net.{family}"), "1")?;
    }
    let Vip { v4, v6 } = pod;
    let gateway4 = Ipv4Addr::from_bits(v4.to_bits() - 1);
    let gateway6 = Ipv6Addr::from_bits(v6.to_bits() - 1);
    outside.ip(&format!(
        "link add {name} type veth peer name eth0 netns {pid}\n\
         link set {name} up\n\
         addr add {gateway4}/28 dev {name}\n\
         addr add {gateway6}/64 dev {name} nodad\n"
    ))?;
    sandbox.ip(&format!(
        "link set lo up\n\
         link set eth0 up\n\
         addr add {v4}/28 dev eth0\n\
         addr add {v6}/64 dev eth0 nodad\n\
         route add default via {gateway4}\n\
         route add default via {gateway6}\n"
    ))?;
    Ok(sandbox)
}

/// Creates the pod [`REMOTE`] with servers of the given name on the target ports of the Services.
fn remote_server(scene: &Scene, name: &str) -> Result<(Sandbox, Server)> {
    let remote = remote(scene)?;
    let server = serve_in(scene, &remote, name)?;
    Ok((remote, server))
}

/// Starts servers of the given name in a sandbox, on the target ports of the Services.
fn serve_in(scene: &Scene, sandbox: &Sandbox, name: &str) -> Result<Server> {
    let listeners = [
        Listener::new(ServerKind::Http, HTTP_TARGET),
        Listener::new(ServerKind::Udp, DNS_TARGET),
    ];
    let directory = scene.node.network().lab().directory();
    Server::start_in(sandbox, directory, name, &listeners, None)
}

/// A backend's sockets.
struct Backend {
    tcp: [TcpListener; 2],
    udp: [UdpSocket; 2],
}

impl Backend {
    fn at(sandbox: &Sandbox, ips: [IpAddr; 2]) -> Result<Self> {
        let [v4, v6] = ips;
        let tcp = |ip| sandbox.listen(SocketAddr::new(ip, HTTP_TARGET));
        let udp = |ip| sandbox.udp(SocketAddr::new(ip, DNS_TARGET));
        let backend = Self {
            tcp: [tcp(v4)?, tcp(v6)?],
            udp: [udp(v4)?, udp(v6)?],
        };
        for socket in &backend.udp {
            socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        }
        Ok(backend)
    }
}

/// Starts a node whose Service has its backend on another node.
fn start_with_remote_backend(scene: &Scene) -> Result<(Sandbox, Backend)> {
    route_to_node(scene)?;
    let remote = remote(scene)?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    scene.node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    Ok((remote, backend))
}

/// Programs a Service of policy Local with the backend in the pod `local` of this node.
fn program_local_backend(scene: &Scene) -> Result<(Arc<Pod>, Backend)> {
    let pod = scene.node.pod("local")?;
    let ips = [pod.v4(), pod.v6()];
    let backend = Backend::at(&pod, ips)?;
    let of_pod = service("Local").on_node(culvert_instance::NODE_NAME);
    scene.program(of_pod.backends(ips))?;
    Ok((pod, backend))
}

/// Connects to the node port over IPv4. Returns both ends.
fn connect_to_node_port(client: &Sandbox, backend: &Backend) -> Result<(TcpStream, TcpStream)> {
    let stream = Dialer::V4.connect(client, HOST, NODE_HTTP)?;
    Ok((stream, backend.tcp[0].accept()?.0))
}

/// Asserts that a client outside reaches the backend at an address, in both directions, and that the backend sees the
/// client under the given addresses.
fn expect_reached(
    client: &Sandbox,
    backend: &Backend,
    (vip, [http, dns]): (Vip, [u16; 2]),
    seen: [IpAddr; 2],
) -> Result<()> {
    let families = [Dialer::V4, Dialer::V6].into_iter().zip(seen);
    for ((dialer, seen), (tcp, udp)) in families.zip(backend.tcp.iter().zip(&backend.udp)) {
        let check = || {
            let stream = dialer.connect(client, vip, http).context("no connection")?;
            let (accepted, peer) = tcp.accept()?;
            ensure_eq("the client of TCP", peer.ip(), seen)?;
            exchange_stream(&stream, &accepted)?;
            let socket = dialer.udp_socket(client)?;
            let mut buffer = [0; 16];
            for _ in 0..3 {
                socket.send_to(b"ask", dialer.address(vip, dns))?;
                let (length, from) = udp.recv_from(&mut buffer).context("no datagram")?;
                ensure_eq("the client of UDP", from.ip(), seen)?;
                udp.send_to(&buffer[..length], from)?;
                let (length, from) = socket.recv_from(&mut buffer).context("no reply")?;
                ensure_eq("the sender of the reply", from, dialer.address(vip, dns))?;
                ensure!(&buffer[..length] == b"ask", "another reply");
            }
            Ok(())
        };
        check().with_context(|| format!("{dialer:?} at {vip:?}"))?;
    }
    Ok(())
}

/// Sends some data in each direction, more than fits into one packet.
fn exchange_stream(one: &TcpStream, other: &TcpStream) -> Result<()> {
    exchange_within(one, other, RESPONSE_TIMEOUT)
}

/// Sends some data in each direction as [`exchange_stream`] does, and waits for it so long.
fn exchange_within(one: &TcpStream, other: &TcpStream, limit: Duration) -> Result<()> {
    use std::io::{Read as _, Write as _};
    other.set_read_timeout(Some(limit))?;
    one.set_read_timeout(Some(limit))?;
    let data = vec![7; 20_000];
    for (mut from, mut to) in [(one, other), (other, one), (one, other)] {
        let mut received = vec![0; data.len()];
        from.write_all(&data)?;
        to.read_exact(&mut received).context("no data")?;
        ensure!(received == data, "other data");
    }
    Ok(())
}

/// Returns the name of the host's link to the pod with these addresses.
fn link_to(pod: Vip) -> String {
    let [.., number] = pod.v4.octets();
    format!("pod{number}")
}

/// Returns the number of attached programs that translate packets.
fn attached(scene: &Scene) -> Result<usize> {
    let names = std::fs::read_dir(scene.node.bpffs().join("links"))?.flatten();
    let names = names.map(|link| link.file_name().to_string_lossy().into_owned());
    let is_translation = |name: &String| name.starts_with("in-") || name.starts_with("out-");
    Ok(names.filter(is_translation).count())
}

fn service(policy: &str) -> Service {
    service_addresses::service_at_all_addresses().spec(&format!("externalTrafficPolicy: {policy}"))
}

#[test]
fn a_client_in_the_range_of_pods_is_local_and_others_are_masqueraded_on_cluster_ips() -> Result<()>
{
    let scene = configured("detectLocal: NodeCIDR")?;
    let pods = &["203.0.113.0/24", "2001:db8:113::/64"];
    let node = culvert_instance::Instance::node();
    scene.node.apply(node.pod_cidrs(pods))?;
    route_to_node(&scene)?;
    let remote = remote(&scene)?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    scene.node.start()?;
    let (what, vip, ports) = ADDRESSES[0];
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    let outside = scene.node.outside();
    expect_reached(outside, &backend, (vip, ports), HOST.ips()).context(what)?;

    // The backend is its own client, and gets the replies only through this node.
    for (what, vip, ports) in ADDRESSES {
        let reached = expect_reached(&remote, &backend, (vip, ports), HOST.ips());
        reached.with_context(|| format!("{what}, from the backend"))?;
    }
    Ok(())
}

#[test]
fn the_address_of_the_node_object_and_configured_ports_stand_for_clients() -> Result<()> {
    const OF_NODE: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 99);
    let scene = configured("packets: { address: node, ports: 50000-50010 }")?;
    route_to_node(&scene)?;
    let remote = remote(&scene)?;
    let backend = Backend::at(&remote, REMOTE.ips())?;
    let Vip { v4, .. } = HOST;
    let (node, outside) = (&scene.node, scene.node.outside());
    node.host().ip(&format!("addr add {OF_NODE}/32 dev lo\n"))?;
    outside.ip(&format!("route add {OF_NODE}/32 via {v4}\n"))?;
    node.apply(NodeObject::new(
        culvert_instance::NODE_NAME,
        [OF_NODE.into()],
    ))?;
    node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;

    let vip = Vip {
        v4: OF_NODE,
        ..HOST
    };
    let stream = Dialer::V4.connect(outside, vip, NODE_HTTP)?;
    let (_, peer) = backend.tcp[0].accept()?;
    drop(stream);
    ensure_eq("the client", peer.ip(), IpAddr::V4(OF_NODE))?;
    ensure!((50_000..=50_010).contains(&peer.port()), "{peer}");
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: `under_load` changes the size of the map, too"]
fn connections_go_on_when_the_map_of_flows_gets_another_size() -> Result<()> {
    const CONNECTIONS: u32 = 20;
    let scene = Scene::with(&["backend"], |settings| settings.maps.flows = 32)?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let client = scene.node.outside();
    let connect = || connect_to_node_port(client, &backend);
    let mut open: Vec<_> = (0..CONNECTIONS).map(|_| connect()).collect::<Result<_>>()?;
    // A larger map, and then one that is smaller than the first one, but has room for the connections.
    for flows in [64, 24] {
        scene.node.resize(|settings| settings.maps.flows = flows)?;
        scene.node.restart()?;
        for (number, (one, other)) in open.iter().enumerate() {
            exchange_stream(one, other)
                .with_context(|| format!("connection {number}, {flows} flows"))?;
        }
        open.push(connect().with_context(|| format!("{flows} flows"))?);
        let capacity = scene.node.status()?["flows"]["capacity"].clone();
        ensure_eq("entries", capacity, serde_json::json!(3 * flows + 1))?;
    }
    Ok(())
}

/// The number of kills that [`connections_go_on_after_a_kill_while_the_flows_move`] makes.
const KILLS: u32 = 6;

#[test]
#[ignore = "independent of the kernel: the daemon decides which maps it opens"]
fn connections_go_on_after_a_kill_while_the_flows_move() -> Result<()> {
    let scene = Scene::with(&["backend"], |settings| settings.maps.flows = 32)?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let node = &scene.node;
    let connect = || connect_to_node_port(node.outside(), &backend);
    let replaced = node.bpffs().join(maps_directory("-old"));
    let mut open = vec![connect()?];
    let mut killed = 0;
    for number in 0..KILLS {
        node.stop()?;
        let flows = [64, 32][usize::try_from(number % 2)?];
        node.resize(|settings| settings.maps.flows = flows)?;
        node.launch()?;
        wait::until_briefly(CHANGE_TIMEOUT, || replaced.exists())?;
        node.kill9()?;
        killed += u32::from(replaced.join("flows").exists());
        // The attached programs store this flow in the map that was to be replaced.
        open.push(connect()?);
        capabilities::start(node)?;
        for (index, (one, other)) in open.iter().enumerate() {
            exchange_stream(one, other)
                .with_context(|| format!("connection {index} after kill {number}"))?;
        }
        ensure!(!replaced.exists(), "the replaced maps are not removed");
        let capacity = node.status()?["flows"]["capacity"].clone();
        ensure_eq("entries", capacity, serde_json::json!(3 * flows + 1))?;
    }
    ensure!(killed > 0, "no kill came while the flows moved");
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: the daemon decides which maps it opens"]
fn connections_of_both_maps_go_on_after_a_kill_while_programs_are_replaced() -> Result<()> {
    let scene = Scene::with(&["backend"], |settings| settings.maps.flows = 32)?;
    let (_remote, backend) = start_with_remote_backend(&scene)?;
    let node = &scene.node;
    let connect = || connect_to_node_port(node.outside(), &backend);
    let [current, replaced] = ["", "-old"].map(|suffix| node.bpffs().join(maps_directory(suffix)));
    let old_map = node.bpffs().with_file_name("flows");
    let of_old_map = connect()?;
    std::fs::hard_link(current.join("flows"), &old_map)?;
    node.resize(|settings| settings.maps.flows = 64)?;
    node.restart()?;
    let of_new_map = connect()?;

    // Makes the maps those of a daemon that is killed while it replaces the programs.
    node.kill9()?;
    std::fs::create_dir(&replaced)?;
    std::fs::rename(&old_map, replaced.join("flows"))?;
    let flows = |directory: &Path| {
        let map = aya::maps::Map::HashMap(MapData::from_pin(directory.join("flows"))?);
        anyhow::Ok(HashMap::<_, [u8; 44], [u8; 104]>::try_from(map)?)
    };
    let mut new_map = flows(&current)?;
    for key in flows(&replaced)?.keys() {
        new_map.remove(&key?)?;
    }

    capabilities::start(node)?;
    for (what, (one, other)) in [("old", of_old_map), ("new", of_new_map)] {
        exchange_stream(&one, &other).with_context(|| format!("the flow of the {what} map"))?;
    }
    ensure!(!replaced.exists(), "the replaced map is not removed");
    Ok(())
}

#[test]
fn programs_are_detached_when_packets_are_turned_off() -> Result<()> {
    let scene = configured(ENABLED)?;
    scene.node.start()?;
    ensure_eq("programs", attached(&scene)?, 2)?;

    let config = std::fs::read_to_string(scene.node.config_path())?;
    std::fs::write(
        scene.node.config_path(),
        config.replace("enabled: true", "enabled: false"),
    )?;
    scene.node.restart()?;
    ensure_eq("programs", attached(&scene)?, 0)?;
    let show = run(scene.node.host(), "tc filter show dev uplink egress")?;
    ensure!(!show.contains("out"), "{show}");
    Ok(())
}
