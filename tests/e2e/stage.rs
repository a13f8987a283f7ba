//! The stage of all specs: a Service with backends on the nodes, and clients on each node.

use std::{
    io,
    net::{SocketAddr, UdpSocket},
    thread,
    time::Duration,
};

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Type};
use tunnel_cluster::{Cluster, kubectl::Kubectl};
use tunnel_tests::{
    load::{Enough, Plan, Report, tcp},
    place::{Place, connect_within},
    wait,
};

use crate::manifests::{self, NAMESPACE};

/// The time that all nodes have to follow a change.
pub(crate) const KNOWN: Duration = Duration::from_secs(30);

/// The number of backends of the Service.
pub(crate) const BACKENDS: usize = 4;

/// The port of every Service.
const PORT: u16 = 80;

/// A client: a pod or a host.
#[derive(Clone, Debug)]
pub(crate) struct Client {
    /// The description of the client's place.
    pub(crate) name: String,
    pub(crate) place: Place,
}

/// The cluster, with the objects of the specs.
#[derive(Debug)]
pub(crate) struct Stage<'a> {
    pub(crate) cluster: &'a Cluster,
    /// A pod and the host of each node.
    pub(crate) clients: Vec<Client>,
}

impl<'a> Stage<'a> {
    /// Creates the objects, and waits until they are ready.
    pub(crate) fn set(cluster: &'a Cluster) -> Result<Self> {
        let kubectl = &cluster.kubectl;
        let mut objects = vec![
            manifests::namespace(),
            manifests::deployment("web", BACKENDS),
            manifests::service("web", &["TCP", "UDP"]),
        ];
        for node in &cluster.nodes {
            objects.push(manifests::client(&pod_on(node.name), node.name));
        }
        kubectl.apply(&objects.join("---\n"))?;
        kubectl.rolled_out(NAMESPACE, "deploy/web")?;
        let mut clients = Vec::new();
        for node in &cluster.nodes {
            let pod = pod_on(node.name);
            let ready = "--for=condition=Ready";
            kubectl.run(&["-n", NAMESPACE, "wait", ready, "pod", &pod])?;
            clients.push(Client {
                place: node.pod(kubectl, NAMESPACE, &pod)?,
                name: pod,
            });
            clients.push(Client {
                name: node.name.to_owned(),
                place: node.host.clone(),
            });
        }
        Ok(Self { cluster, clients })
    }

    pub(crate) const fn kubectl(&self) -> &Kubectl {
        &self.cluster.kubectl
    }

    /// Runs a command in the pod on a node.
    pub(crate) fn exec(&self, node: &str, words: &[&str]) -> Result<String> {
        self.run(&[&["exec", &pod_on(node), "--"], words].concat())
    }

    /// Runs `kubectl` in the namespace of the specs.
    pub(crate) fn run(&self, words: &[&str]) -> Result<String> {
        self.kubectl().run(&[&["-n", NAMESPACE], words].concat())
    }

    /// Returns the addresses of a Service, once each of them has answered every client.
    pub(crate) fn answering(&self, service: &str) -> Result<Vec<SocketAddr>> {
        let addresses = self.addresses(service)?;
        for client in &self.clients {
            for to in &addresses {
                wait::until(KNOWN, || client.ask(*to, 1).failed() == 0)
                    .with_context(|| format!("{service} ({to}) never answered {}", client.name))?;
            }
        }
        Ok(addresses)
    }

    /// Runs a story while every client connects to each of the addresses at a rate, for at most
    /// `longest`. No connect may fail. Returns the report of each load.
    pub(crate) fn under_load(
        &self,
        addresses: &[SocketAddr],
        rate: u32,
        longest: Duration,
        story: impl FnOnce() -> Result<()>,
    ) -> Result<Vec<Report>> {
        let enough = Enough::default();
        let (told, reports) = thread::scope(|scope| {
            let mut loads = Vec::new();
            for client in &self.clients {
                for to in addresses {
                    let plan = Plan::new(*to, rate, longest).until(&enough);
                    let load = scope.spawn(move || client.load(&plan));
                    loads.push((format!("{} → {to}", client.name), load));
                }
            }
            let told = enough.after(story);
            let loads = loads.into_iter();
            let reports = loads.map(|(name, load)| (name, load.join().unwrap_or_default()));
            (told, reports.collect::<Vec<(String, Report)>>())
        });
        told?;
        for (name, report) in &reports {
            ensure!(report.failed() == 0, "{name}: {:?}", report.failures);
            ensure!(report.attempts > 0, "{name}: no attempt");
        }
        Ok(reports.into_iter().map(|(_, report)| report).collect())
    }

    /// Returns the addresses of a Service.
    pub(crate) fn addresses(&self, service: &str) -> Result<Vec<SocketAddr>> {
        self.cluster.service(NAMESPACE, service, PORT)
    }
}

impl Client {
    /// Requests the name of the backend this many times.
    pub(crate) fn ask(&self, to: SocketAddr, times: u32) -> Report {
        let rate = 200;
        let lasting = Duration::from_secs(1) * times / rate;
        self.load(&Plan::new(to, rate, lasting))
    }

    /// Connects with a time limit.
    pub(crate) fn connect(&self, to: SocketAddr, within: Duration) -> io::Result<()> {
        let socket = self.place.socket(Domain::for_address(to), Type::STREAM)?;
        connect_within(&socket, to, within)
    }

    /// Runs the planned requests.
    pub(crate) fn load(&self, plan: &Plan) -> Report {
        let sockets = |domain, kind| self.place.socket(domain, kind);
        tcp::run_at(plan, "/hostname", &sockets)
    }

    /// Creates a UDP socket in the family of an address.
    pub(crate) fn udp(&self, to: SocketAddr) -> io::Result<UdpSocket> {
        let any = if to.is_ipv4() { "0.0.0.0:0" } else { "[::]:0" };
        self.place.udp(any)
    }

    /// Requests the name of the backend in a datagram.
    pub(crate) fn ask_by_datagram(&self, to: SocketAddr) -> Result<String> {
        let socket = self.udp(to)?;
        socket.send_to(b"hostname", to)?;
        let mut answer = [0; 256];
        let (length, from) = socket.recv_from(&mut answer)?;
        ensure!(from == to, "{to} was asked, and {from} answered");
        Ok(String::from_utf8_lossy(&answer[..length]).into_owned())
    }
}

/// Returns the name of the client pod on a node.
pub(crate) fn pod_on(node: &str) -> String {
    format!("on-{node}")
}
