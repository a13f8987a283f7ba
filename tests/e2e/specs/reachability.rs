//! Works through the table of [`tunnel_tests::reachability`] on the cloud node, under either proxy.
//!
//! Packets of a pod on another node arrive there only if it dials the node's own address: its node translates the other
//! addresses itself.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    net::{IpAddr, SocketAddr, TcpStream},
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_cluster::{network, proxy::Proxy};
use tunnel_tests::{
    reachability::{Address, Client, Outcome, Place, Policy, cases},
    sandbox::{Sandbox, connect_within},
    wait,
};

use crate::{
    fixture::{Fixture, SYNC_TIMEOUT},
    manifests::{self, ExternalService},
};

/// The time limit for an answer that is expected, and for one that is not.
const ANSWER: Duration = Duration::from_secs(2);
const NO_ANSWER: Duration = Duration::from_millis(500);

/// The router's routes to the Services' addresses.
const ROUTES: [(&str, &str); 2] = [
    ("198.18.0.0/15", "10.96.0.0/16"),
    ("fd00:18::/32", "fd00:10:96::/112"),
];

/// A Service with one backend.
struct Target {
    number: u8,
    place: Place,
    policy: Policy,
}

impl Target {
    fn all() -> Vec<Self> {
        let mut all = Vec::new();
        for (number, place) in (0..).step_by(2).zip(Place::ALL) {
            for (offset, policy) in (0..).zip(Policy::ALL) {
                let number = number + offset;
                all.push(Self {
                    number,
                    place,
                    policy,
                });
            }
        }
        all
    }

    fn name(&self) -> String {
        format!("{}-{:?}", server_name(self.place), self.policy).to_lowercase()
    }

    /// Returns a pair of addresses outside the cluster's ranges.
    fn ips(&self, kind: u8) -> Result<[IpAddr; 2]> {
        let number = self.number;
        let v4 = format!("198.18.{kind}.{number}").parse()?;
        Ok([v4, format!("fd00:18::{kind}:{number}").parse()?])
    }

    fn node_port(&self) -> u16 {
        31_100 + u16::from(self.number)
    }

    /// Returns the addresses that a client dials, IPv4 first.
    fn dialled(&self, fixture: &Fixture<'_>, address: Address) -> Result<[SocketAddr; 2]> {
        let pair = |ips: [IpAddr; 2], port| ips.map(|ip| SocketAddr::new(ip, port));
        Ok(match address {
            Address::ClusterIp => {
                let all = fixture.addresses(&self.name())?;
                let [v4, v6] = all[..] else {
                    anyhow::bail!("{} has no two addresses", self.name());
                };
                [v4, v6]
            }
            Address::NodePort => {
                let [v4, v6] = network::addresses(0);
                pair([v4.parse()?, v6.parse()?], self.node_port())
            }
            Address::LoadBalancer => pair(self.ips(1)?, 80),
            Address::ExternalIp => pair(self.ips(2)?, 80),
        })
    }

    fn create(&self, fixture: &Fixture<'_>) -> Result<()> {
        let (name, policy) = (self.name(), format!("{:?}", self.policy));
        let service = ExternalService {
            name: &name,
            server: server_name(self.place),
            policy: &policy,
            external_ips: self.ips(2)?,
            node_port: self.node_port(),
        };
        fixture.kubectl().apply(&service.manifest())?;
        let [v4, v6] = self.ips(1)?;
        let status = format!(
            r#"{{"status": {{"loadBalancer": {{"ingress": [{{"ip": "{v4}"}}, {{"ip": "{v6}"}}]}}}}}}"#
        );
        let patch = ["patch", "service", &name, "--subresource=status", "--patch"];
        fixture.run_kubectl(&[&patch[..], &[&*status]].concat())?;
        Ok(())
    }
}

const fn server_name(place: Place) -> &'static str {
    match place {
        Place::ThisNode => "server-here",
        Place::HostNetwork => "server-on-host",
        Place::OtherNode => "server-elsewhere",
    }
}

pub(super) fn is_as_the_table_says(fixture: &Fixture<'_>) -> Result<()> {
    let [here, elsewhere, ..] = &fixture.cluster.nodes[..] else {
        anyhow::bail!("the cluster does not have two nodes");
    };
    let objects = Place::ALL.map(|place| {
        let (node, in_host_network) = match place {
            Place::ThisNode => (here, false),
            Place::HostNetwork => (here, true),
            Place::OtherNode => (elsewhere, false),
        };
        manifests::server(server_name(place), node.name, in_host_network)
    });
    fixture.kubectl().apply(&objects.join("---\n"))?;
    for place in Place::ALL {
        let ready = "--for=condition=Ready";
        fixture.run_kubectl(&["wait", ready, "pod", server_name(place), "--timeout=60s"])?;
    }
    let targets = Target::all();
    for target in &targets {
        target.create(fixture)?;
    }
    let router = &fixture.cluster.shared.network.router;
    route(router, "add")?;
    let result = check(fixture, &targets);
    let routed = route(router, "del");
    let mut names = vec!["delete".to_owned(), "--wait=false".to_owned()];
    names.extend(
        targets
            .iter()
            .map(|target| format!("service/{}", target.name())),
    );
    names.extend(Place::ALL.map(|place| format!("pod/{}", server_name(place))));
    let names: Vec<&str> = names.iter().map(String::as_str).collect();
    let deleted = fixture.run_kubectl(&names).map(drop);
    result.and(routed).and(deleted)
}

/// Adds or deletes the router's routes to the Services' addresses.
fn route(router: &Sandbox, action: &str) -> Result<()> {
    for ((external, cluster), via) in ROUTES.into_iter().zip(network::addresses(0)) {
        router.ip(&format!(
            "route {action} {external} via {via}\nroute {action} {cluster} via {via}\n"
        ))?;
    }
    Ok(())
}

fn check(fixture: &Fixture<'_>, targets: &[Target]) -> Result<()> {
    // With all links, Culvert masquerades as kube-proxy does.
    let is_on_uplinks = match &fixture.cluster.proxy {
        Proxy::Culvert(deployment) => !deployment.includes_pod_links,
        Proxy::KubeProxy => false,
    };
    let pod_name = crate::fixture::client_pod(fixture.cluster.nodes[1].name);
    let mut clients = fixture.clients.iter();
    let pod = clients.find(|client| client.name == pod_name);
    let pod = &pod.context("there is no client pod")?.sandbox;
    let router = &fixture.cluster.shared.network.router;
    let mut differences: BTreeMap<String, String> = BTreeMap::new();
    for case in cases() {
        let is_other_address = case.address != Address::NodePort;
        let client = match case.client {
            Client::PodElsewhere if is_other_address => continue,
            // Those of pods whose sockets meet no hook are checked in network namespaces.
            Client::PodHere => continue,
            Client::PodElsewhere => pod,
            Client::Outside => router,
        };
        let mut all = targets.iter();
        let target = all.find(|it| it.place == case.place && it.policy == case.policy);
        let target = target.context("there is no such Service")?;
        let expected = if is_on_uplinks {
            case.culvert
        } else {
            case.kube_proxy
        };
        for to in target.dialled(fixture, case.address)? {
            expect(client, to, expected).with_context(|| format!("{case}, {to}"))?;
        }
        if case.culvert != case.kube_proxy {
            let text = format!(
                "Culvert: {:?}, kube-proxy: {:?}",
                case.culvert, case.kube_proxy
            );
            differences.insert(case.to_string(), text);
        }
    }
    for (case, difference) in differences {
        println!("  differs: {case}: {difference}");
    }
    Ok(())
}

/// Asserts the outcome over both protocols.
fn expect(client: &Sandbox, to: SocketAddr, expected: Outcome) -> Result<()> {
    type Attempt = fn(&Sandbox, SocketAddr, Duration) -> Result<SocketAddr>;
    let attempts: [(&str, Attempt); 2] = [("TCP", ask_by_tcp), ("UDP", ask_by_udp)];
    for (protocol, ask) in attempts {
        let check = || {
            let limit = if expected == Outcome::NoAnswer {
                NO_ANSWER
            } else {
                ANSWER
            };
            let outcome = match ask(client, to, limit) {
                Err(_) => Outcome::NoAnswer,
                Ok(seen) if is_of_node(seen.ip()) => Outcome::SeesNode,
                Ok(_) => Outcome::SeesClient,
            };
            ensure!(
                outcome == expected,
                "{protocol}: {outcome:?}, expected {expected:?}"
            );
            Ok(())
        };
        let mut last = Ok(());
        // The Service may not be programmed yet.
        let reached = wait::until(SYNC_TIMEOUT, || {
            last = check();
            last.is_ok()
        });
        reached.or(last)?;
    }
    Ok(())
}

/// Returns true for the addresses that the node has: those of its uplink and of its bridge to pods.
fn is_of_node(ip: IpAddr) -> bool {
    let [v4, v6] = network::addresses(0);
    let all = [&*v4, &*v6, "10.244.0.1", "fd00:244::1"];
    all.iter().any(|own| own.parse() == Ok(ip))
}

/// Asks for the client's address over TCP.
fn ask_by_tcp(client: &Sandbox, to: SocketAddr, within: Duration) -> Result<SocketAddr> {
    let socket = client.socket(Domain::for_address(to), Type::STREAM)?;
    connect_within(&socket, to, within)?;
    let mut stream = TcpStream::from(socket);
    ensure!(
        stream.peer_addr()? == to,
        "the peer is {}",
        stream.peer_addr()?
    );
    stream.set_read_timeout(Some(within))?;
    stream.write_all(b"GET /clientip HTTP/1.0\r\n\r\n")?;
    let mut response = String::new();
    stream.read_to_string(&mut response)?;
    let body = response.rsplit("\r\n\r\n").next().unwrap_or_default();
    body.trim()
        .parse()
        .with_context(|| format!("the response is {response:?}"))
}

/// Asks for the client's address over UDP.
fn ask_by_udp(client: &Sandbox, to: SocketAddr, within: Duration) -> Result<SocketAddr> {
    let socket = client.udp(if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" })?;
    socket.set_read_timeout(Some(within))?;
    socket.send_to(b"clientip", to)?;
    let mut reply = [0; 128];
    let (length, from) = socket.recv_from(&mut reply)?;
    ensure!(from == to, "the reply is from {from}");
    let text = String::from_utf8_lossy(&reply[..length]).into_owned();
    text.trim()
        .parse()
        .with_context(|| format!("the reply is {text:?}"))
}
