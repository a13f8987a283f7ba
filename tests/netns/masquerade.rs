//! A backend sees the client's own address, for every address of the Service. kube-proxy masquerades
//! packets; Culvert translates at the socket, before there is a packet.

use std::{net::IpAddr, sync::Arc};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    instance,
    place::Place,
    pod::Pod,
    shared::{Fixture as _, Shared},
};

use crate::{
    listeners::Listening,
    reach::{self, BALANCER, EXTERNAL, NODE_DNS, NODE_HTTP},
    scene::{Scene, WEB},
    support::{DNS, DNS_TARGET, HOST, HTTP, HTTP_TARGET, Vip, Way, addresses, same},
};

/// The addresses of the Service, with their HTTP and DNS ports.
const ADDRESSES: [(&str, Vip, [u16; 2]); 4] = [
    ("the cluster IP", WEB, [HTTP, DNS]),
    ("the node port", HOST, [NODE_HTTP, NODE_DNS]),
    ("the load balancer", BALANCER, [HTTP, DNS]),
    ("the external IP", EXTERNAL, [HTTP, DNS]),
];

static SCENE: Shared<Scene> = Shared::new(|| Scene::started(&[]));

/// Programs a Service with one backend and this `externalTrafficPolicy`; returns the backend.
fn program(scene: &Scene, policy: &str) -> Result<Arc<Pod>> {
    let backend = scene.node.pod("backend")?;
    let web = reach::service_everywhere()
        .spec(&format!("externalTrafficPolicy: {policy}"))
        .on(instance::NODE)
        .backends(addresses(&[&backend]));
    scene.program(web)?;
    Ok(backend)
}

/// Asserts that the backend sees these client addresses, for each address of the Service, protocol and
/// family that the place dials.
fn sees(backend: &Pod, place: &Place, as_whom: [IpAddr; 2]) -> Result<()> {
    let ips = [backend.v4(), backend.v6()];
    let listening = Listening::at(backend, ips, [HTTP_TARGET, DNS_TARGET])?;
    for (what, vip, [http, dns]) in ADDRESSES {
        for (way, as_whom) in [Way::V4, Way::V6].into_iter().zip(as_whom) {
            let story = || {
                let own = place.connect(way.to(vip, http))?.local_addr()?;
                let seen = listening.accept(way)?;
                same("TCP", (own, seen.ip()), (seen, as_whom))?;
                way.udp(place)?.send_to(b"who am I?", way.to(vip, dns))?;
                let (_, seen) = listening.udp(way).recv_from(&mut [0; 16])?;
                same("UDP", seen.ip(), as_whom)
            };
            story().with_context(|| format!("{way:?} to {what}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_backend_sees_a_pod_the_host_and_itself_by_their_own_addresses_whatever_they_dial() -> Result<()>
{
    let scene = SCENE.take()?;
    for policy in ["Cluster", "Local"] {
        let backend = program(&scene, policy)?;
        for (who, place, own) in [
            ("a pod", &**scene.client, Vip::of_pod(&scene.client)),
            ("the host", scene.node.host(), HOST),
            ("the backend itself", &**backend, Vip::of_pod(&backend)),
        ] {
            let seen = sees(&backend, place, own.ips());
            seen.with_context(|| format!("{who}, policy {policy}"))?;
        }
        scene.restore()?;
    }
    scene.give_back()
}
