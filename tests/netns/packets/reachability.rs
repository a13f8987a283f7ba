//! Works through the table of [`tunnel_tests::reachability`], over both protocols and in both families.

use std::{
    io::Write as _,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr},
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::{
    culvert_instance,
    manifest::{Protocol, Service},
    node_network,
    pod::Pod,
    reachability::{Address, Case, Client, Outcome, Place, Policy, cases, cases_of_pods_here},
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
};

use super::{Backend, CLIENT, REMOTE, pod_elsewhere, remote};
use crate::{
    fixture::Scene,
    service_addresses::configured,
    support::{DNS, DNS_TARGET, Dialer, HOST, HTTP, HTTP_TARGET, Vip, ensure_eq},
};

/// The ranges that contain the pods of this node and on the other one.
const POD_RANGES: &[&str] = &[
    "203.0.113.0/24",
    "2001:db8:113::/48",
    node_network::POD_RANGES[0],
    node_network::POD_RANGES[1],
];

/// The pod on another node that is a client.
const POD: Vip = Vip {
    v4: Ipv4Addr::new(203, 0, 113, 18),
    v6: Ipv6Addr::new(0x2001, 0xdb8, 0x113, 1, 0, 0, 0, 2),
};

/// The time after which a client gets no answer any more.
const NO_ANSWER: Duration = Duration::from_millis(400);

/// A Service for each place and policy.
#[derive(Clone, Copy)]
struct Addresses {
    number: u8,
}

impl Addresses {
    fn of(place: Place, policy: Policy) -> Result<Self> {
        let all = Place::ALL
            .iter()
            .flat_map(|place| Policy::ALL.map(|it| (*place, it)));
        let number = all.enumerate().find(|(_, it)| *it == (place, policy));
        let (number, _) = number.context("there is no such Service")?;
        Ok(Self {
            number: u8::try_from(number)?,
        })
    }

    fn vip(self, address: Address) -> Vip {
        match address {
            Address::ClusterIp => Vip::of(20 + self.number),
            Address::NodePort => HOST,
            Address::LoadBalancer => Vip::of(30 + self.number),
            Address::ExternalIp => Vip::of(40 + self.number),
        }
    }

    /// Returns the ports for HTTP and DNS.
    fn ports(self, address: Address) -> [u16; 2] {
        let number = u16::from(self.number);
        match address {
            Address::NodePort => [30_100 + number, 30_200 + number],
            Address::ClusterIp | Address::LoadBalancer | Address::ExternalIp => [HTTP, DNS],
        }
    }

    fn service(self, place: Place, policy: Policy) -> Service {
        let [http, dns] = self.ports(Address::NodePort);
        let name = format!("{place:?}-{policy:?}").to_lowercase();
        let service = Service::new(&name, self.vip(Address::ClusterIp).ips())
            .port(Protocol::TCP, HTTP, HTTP_TARGET)
            .node_port(http)
            .port(Protocol::UDP, DNS, DNS_TARGET)
            .node_port(dns)
            .spec(&format!("externalTrafficPolicy: {policy:?}"))
            .spec(&format!(
                "externalIPs: [{}]",
                self.vip(Address::ExternalIp).yaml_list()
            ))
            .load_balancer(&self.vip(Address::LoadBalancer).yaml_ingress());
        match place {
            Place::ThisNode | Place::HostNetwork => service.on_node(culvert_instance::NODE_NAME),
            Place::OtherNode => service.on_node("other"),
        }
    }
}

/// A client, and how long it waits for an answer.
struct Attempt<'a> {
    client: &'a Sandbox,
    dialer: Dialer,
    vip: Vip,
    within: Duration,
}

impl Attempt<'_> {
    /// Connects, and returns the client's address as the backend sees it, or None if there is no answer.
    fn tcp(&self, port: u16, backend: &Backend) -> Result<Option<IpAddr>> {
        let socket = self.dialer.tcp_socket(self.client)?;
        let to = self.dialer.address(self.vip, port);
        if connect_within(&socket, to, self.within).is_err() {
            return Ok(None);
        }
        let stream = std::net::TcpStream::from(socket);
        ensure_eq("the peer's name", stream.peer_addr()?, to)?;
        let (mut accepted, from) = backend.tcp[self.family()].accept()?;
        accepted.write_all(b"hello")?;
        stream.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
        let mut received = [0; 5];
        std::io::Read::read_exact(&mut &stream, &mut received).context("no data")?;
        ensure!(&received == b"hello", "other data");
        Ok(Some(from.ip()))
    }

    /// Sends a request, and returns the client's address as the backend sees it, or None if there is no answer.
    fn udp(&self, port: u16, backend: &Backend) -> Result<Option<IpAddr>> {
        let socket = self.dialer.udp_socket(self.client)?;
        let to = self.dialer.address(self.vip, port);
        let udp = &backend.udp[self.family()];
        udp.set_read_timeout(Some(self.within))?;
        socket.set_read_timeout(Some(self.within))?;
        let mut buffer = [0; 16];
        let mut seen = None;
        // The second request and reply belong to a flow that exists.
        for _ in 0..2 {
            socket.send_to(b"ask", to)?;
            let Ok((length, from)) = udp.recv_from(&mut buffer) else {
                return Ok(None);
            };
            udp.send_to(&buffer[..length], from)?;
            match socket.recv_from(&mut buffer) {
                Ok((_, sender)) if sender == to => seen = Some(from.ip()),
                Ok(_) | Err(_) => return Ok(None),
            }
        }
        Ok(seen)
    }

    fn family(&self) -> usize {
        usize::from(self.dialer == Dialer::V6)
    }
}

/// A node with a Service for each place and policy, and the clients.
struct Table {
    scene: Scene,
    pod_elsewhere: Sandbox,
    /// A pod of this node, and a sandbox in its network whose sockets meet no hook.
    pod_here: (Arc<Pod>, Sandbox),
    backends: Vec<(Place, Backend)>,
    /// The other node's pod, and the pod of this node.
    _pods: (Sandbox, Arc<Pod>),
}

impl Table {
    fn new(links: &str) -> Result<Self> {
        Self::with_packets(&format!("links: {links}"))
    }

    fn with_packets(settings: &str) -> Result<Self> {
        let scene = configured(&format!(
            "detectLocal: NodeCIDR\n  packets: {{ {settings} }}"
        ))?;
        let node = culvert_instance::Instance::node();
        scene.node.apply(node.pod_cidrs(POD_RANGES))?;
        let remote = remote(&scene)?;
        let pod_elsewhere = pod_elsewhere(&scene, "client", POD)?;
        let listener = scene.node.pod("listener")?;
        let sender = scene.node.pod("sender")?;
        let unhooked = super::pod_links::unhooked(scene.node.network(), &sender)?;
        unhooked.ip("route add 10.96.0.0/24 via 169.254.1.1 dev eth0\n\
             route add fd00:10:96::/112 via fe80::1 dev eth0\n")?;
        let Vip { v4, v6 } = HOST;
        // These routes are more specific than the ones that make Service addresses unreachable.
        scene.node.outside().ip(&format!(
            "route add 10.96.0.0/24 via {v4}\nroute add fd00:10:96::/112 via {v6}\n"
        ))?;
        let backend_ips = |place| match place {
            Place::ThisNode => [listener.v4(), listener.v6()],
            Place::HostNetwork => HOST.ips(),
            Place::OtherNode => REMOTE.ips(),
        };
        let backend_hosts = [&**listener, scene.node.host(), &remote];
        let backends = Place::ALL.into_iter().zip(backend_hosts);
        let backends: Vec<_> = backends
            .map(|(place, sandbox)| Ok((place, Backend::at(sandbox, backend_ips(place))?)))
            .collect::<Result<_>>()?;
        scene.node.start()?;
        for place in Place::ALL {
            for policy in Policy::ALL {
                let service = Addresses::of(place, policy)?.service(place, policy);
                scene.program(service.backends(backend_ips(place)))?;
            }
        }
        Ok(Self {
            scene,
            pod_elsewhere,
            pod_here: (sender, unhooked),
            backends,
            _pods: (remote, listener),
        })
    }

    /// Returns the client of a case, and its addresses.
    fn client(&self, case: Case) -> (&Sandbox, [IpAddr; 2]) {
        match case.client {
            Client::Outside => (self.scene.node.outside(), CLIENT.ips()),
            Client::PodElsewhere => (&self.pod_elsewhere, POD.ips()),
            Client::PodHere => (
                &self.pod_here.1,
                [self.pod_here.0.v4(), self.pod_here.0.v6()],
            ),
        }
    }

    fn expect(&self, case: Case, expected: Outcome, dialer: Dialer) -> Result<()> {
        let (client, ips) = self.client(case);
        let family = usize::from(dialer == Dialer::V6);
        let (expected, within) = match expected {
            Outcome::SeesClient => (Some(ips[family]), RESPONSE_TIMEOUT),
            Outcome::SeesNode => (Some(HOST.ips()[family]), RESPONSE_TIMEOUT),
            Outcome::NoAnswer => (None, NO_ANSWER),
        };
        let addresses = Addresses::of(case.place, case.policy)?;
        let attempt = Attempt {
            client,
            dialer,
            vip: addresses.vip(case.address),
            within,
        };
        let [http, dns] = addresses.ports(case.address);
        let backend = self.backends.iter().find(|(place, _)| *place == case.place);
        let (_, backend) = backend.context("no backend")?;
        ensure_eq("TCP", attempt.tcp(http, backend)?, expected)?;
        ensure_eq("UDP", attempt.udp(dns, backend)?, expected)
    }

    /// Asks `culvert explain` about a case, and asserts that the answer is what the traffic meets.
    fn expect_explained(
        &self,
        case: Case,
        expected: Outcome,
        (dialer, protocol): (Dialer, &str),
    ) -> Result<()> {
        let (_, ips) = self.client(case);
        let ip = ips[usize::from(dialer == Dialer::V6)];
        let addresses = Addresses::of(case.place, case.policy)?;
        let [http, dns] = addresses.ports(case.address);
        let port = if protocol == "TCP" { http } else { dns };
        let to = dialer.address(addresses.vip(case.address), port);
        let (from, to) = (ip.to_string(), format!("{to}/{protocol}"));
        let mut arguments = vec!["--from", &from, "--to", &to];
        let link = super::link_to(Vip::of_pod(&self.pod_here.0));
        if case.client == Client::PodHere {
            // Without the link, the answer is about a socket that meets the hooks.
            arguments.extend(["--by", &link]);
        }
        let answer = super::explain::explain(&self.scene, &arguments)?;
        let node = HOST.ips()[usize::from(dialer == Dialer::V6)];
        let (outcome, seen) = match expected {
            Outcome::SeesClient => ("delivered", Some(ip)),
            Outcome::SeesNode => ("delivered", Some(node)),
            // The request arrives, but the reply doesn't pass this node.
            Outcome::NoAnswer if case.address == Address::ClusterIp => ("delivered", Some(ip)),
            Outcome::NoAnswer => ("dropped", None),
        };
        ensure_eq("outcome", answer["outcome"].as_str(), Some(outcome))?;
        let seen_as = answer["seenAs"].as_str().map(str::parse::<SocketAddr>);
        let seen_as = seen_as.transpose()?.map(|at| at.ip());
        ensure_eq("seen as", seen_as, seen)
    }
}

#[test]
fn every_client_reaches_every_backend_at_every_address_as_the_table_says() -> Result<()> {
    let table = Table::new("uplinks")?;
    for case in cases() {
        for dialer in [Dialer::V4, Dialer::V6] {
            table
                .expect(case, case.culvert, dialer)
                .with_context(|| format!("{dialer:?}, {case}"))?;
        }
    }
    Ok(())
}

#[test]
fn with_all_links_backends_see_whom_they_see_with_kube_proxy() -> Result<()> {
    let table = Table::new("all")?;
    for case in cases().into_iter().chain(cases_of_pods_here()) {
        for dialer in [Dialer::V4, Dialer::V6] {
            table
                .expect(case, case.kube_proxy, dialer)
                .with_context(|| format!("{dialer:?}, {case}"))?;
        }
    }
    Ok(())
}

#[test]
#[ignore = "independent of the kernel: `explain` shows that the programs run for an explanation"]
fn explanations_agree_with_the_table() -> Result<()> {
    let all = [(Dialer::V4, "TCP"), (Dialer::V6, "UDP")];
    let table = Table::new("uplinks")?;
    for case in cases() {
        for asked in all {
            table
                .expect_explained(case, case.culvert, asked)
                .with_context(|| format!("{asked:?}, {case}"))?;
        }
    }
    // The programs are the same, so each of these cases is asked about once.
    for (delivery, places) in [
        ("stack", &Place::ALL[..]),
        ("redirect", &[Place::OtherNode]),
    ] {
        let table = Table::with_packets(&format!("links: all, delivery: {delivery}"))?;
        let cases = cases().into_iter().chain(cases_of_pods_here());
        let cases = cases.filter(|case| places.contains(&case.place));
        let asked = [all[0], all[1], all[1], all[0]].into_iter().cycle();
        for (case, asked) in cases.zip(asked) {
            table
                .expect_explained(case, case.kube_proxy, asked)
                .with_context(|| format!("all links, {delivery}, {asked:?}, {case}"))?;
        }
    }
    Ok(())
}
