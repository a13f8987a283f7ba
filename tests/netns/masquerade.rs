//! Whom a backend sees: the pod or the host that dialled, whatever address it dialled. Where kube-proxy
//! puts the node's address in its place, there is no packet to be changed here.

use std::{
    net::{IpAddr, SocketAddr, TcpListener, UdpSocket},
    sync::Arc,
};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    instance,
    place::Place,
    pod::Pod,
    shared::{Fixture as _, Shared},
};

use crate::{
    reach::{self, BALANCER, EXTERNAL, HOST, NODE_DNS, NODE_HTTP, WEB},
    scene::Scene,
    support::{DNS, DNS_TARGET, HTTP, HTTP_TARGET, Vip, Way, addresses, same},
};

/// The addresses of the Service, with the ports there.
const ADDRESSES: [(&str, Vip, [u16; 2]); 4] = [
    ("the cluster IP", WEB, [HTTP, DNS]),
    ("the node port", HOST, [NODE_HTTP, NODE_DNS]),
    ("the load balancer", BALANCER, [HTTP, DNS]),
    ("the external IP", EXTERNAL, [HTTP, DNS]),
];

static SCENE: Shared<Scene> = Shared::new(|| Scene::started(&[]));

/// A Service of one backend, with this policy for traffic from outside; who is that backend.
fn program(scene: &Scene, policy: &str) -> Result<Arc<Pod>> {
    let backend = scene.node.pod("backend")?;
    let web = reach::service_everywhere()
        .spec(&format!("externalTrafficPolicy: {policy}"))
        .on(instance::NODE)
        .backends(addresses(&[&backend]));
    scene.program(web)?;
    Ok(backend)
}

/// Whom the backend sees when a place dials each address of the Service over each protocol and
/// family: that place, by the address that it has.
fn sees(backend: &Pod, place: &Place, as_whom: [IpAddr; 2]) -> Result<()> {
    let listening = Listening::new(backend)?;
    for (what, vip, [http, dns]) in ADDRESSES {
        for (way, as_whom) in [Way::V4, Way::V6].into_iter().zip(as_whom) {
            let (own, seen) = listening
                .tcp(place, way, way.to(vip, http))
                .with_context(|| format!("{way:?} to {what}"))?;
            same(what, (own, seen.ip()), (seen, as_whom))?;
            let seen = listening
                .udp(place, way, way.to(vip, dns))
                .with_context(|| format!("{way:?} to {what}, UDP"))?;
            same(what, seen, as_whom)?;
        }
    }
    Ok(())
}

/// What the backend listens with, in either family.
struct Listening {
    tcp: [TcpListener; 2],
    udp: [UdpSocket; 2],
}

impl Listening {
    fn new(pod: &Pod) -> Result<Self> {
        let ips: [IpAddr; 2] = [pod.v4(), pod.v6()];
        let [tcp4, tcp6] = ips.map(|ip| pod.listen((ip, HTTP_TARGET)));
        let [udp4, udp6] = ips.map(|ip| pod.udp((ip, DNS_TARGET)));
        Ok(Self {
            tcp: [tcp4?, tcp6?],
            udp: [udp4?, udp6?],
        })
    }

    const fn of(way: Way) -> usize {
        match way {
            Way::V6 => 1,
            Way::V4 | Way::Mapped | Way::V4OnV6 => 0,
        }
    }

    /// The address of a client that connects, as it knows it, and as the backend sees it.
    fn tcp(&self, place: &Place, way: Way, to: SocketAddr) -> Result<(SocketAddr, SocketAddr)> {
        let client = place.connect(to)?;
        let (_stream, seen) = self.tcp[Self::of(way)].accept()?;
        Ok((client.local_addr()?, seen))
    }

    /// The address of a client that sends a datagram, as the backend sees it.
    fn udp(&self, place: &Place, way: Way, to: SocketAddr) -> Result<IpAddr> {
        way.udp(place)?.send_to(b"who am I?", to)?;
        let (_, seen) = self.udp[Self::of(way)].recv_from(&mut [0; 16])?;
        Ok(seen.ip())
    }
}

#[test]
fn a_backend_sees_the_pod_that_dials_whatever_address_that_dials() -> Result<()> {
    let scene = SCENE.take()?;
    let own = [scene.client.v4(), scene.client.v6()];
    for policy in ["Cluster", "Local"] {
        let backend = program(&scene, policy)?;
        sees(&backend, &scene.client, own).context(policy)?;
        scene.restore()?;
    }
    scene.give_back()
}

#[test]
fn a_backend_sees_the_node_where_its_host_dials() -> Result<()> {
    let scene = SCENE.take()?;
    for policy in ["Cluster", "Local"] {
        let backend = program(&scene, policy)?;
        let own = [HOST.v4.into(), HOST.v6.into()];
        sees(&backend, scene.node.host(), own).context(policy)?;
        scene.restore()?;
    }
    scene.give_back()
}

#[test]
fn a_pod_that_reaches_itself_through_its_service_sees_itself() -> Result<()> {
    let scene = SCENE.take()?;
    let backend = program(&scene, "Cluster")?;
    sees(&backend, &backend, [backend.v4(), backend.v6()])?;
    scene.give_back()
}
