//! A backend sees the client's own address, whichever of the Service's addresses the client dials. kube-proxy
//! masquerades packets; Culvert translates at the socket, before there is a packet.

use std::{net::IpAddr, sync::Arc};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    culvert_instance,
    pod::Pod,
    sandbox::Sandbox,
    shared_fixture::{Fixture as _, SharedFixture},
};

use crate::{
    fixture::{Scene, WEB},
    local_listeners::TestListeners,
    service_addresses::{self, BALANCER, EXTERNAL, NODE_DNS, NODE_HTTP},
    support::{DNS, DNS_TARGET, Dialer, HOST, HTTP, HTTP_TARGET, Vip, addresses, ensure_eq},
};

/// The kinds of address that the Service has, each with its IPs and its HTTP and DNS ports.
const ADDRESSES: [(&str, Vip, [u16; 2]); 4] = [
    ("the cluster IP", WEB, [HTTP, DNS]),
    ("the node port", HOST, [NODE_HTTP, NODE_DNS]),
    ("the load balancer", BALANCER, [HTTP, DNS]),
    ("the external IP", EXTERNAL, [HTTP, DNS]),
];

static SCENE: SharedFixture<Scene> = SharedFixture::new(|| Scene::started(&[]));

/// Programs a Service with one backend and the given `externalTrafficPolicy`, and returns the backend.
fn program(scene: &Scene, policy: &str) -> Result<Arc<Pod>> {
    let backend = scene.node.pod("backend")?;
    let web = service_addresses::service_at_all_addresses()
        .spec(&format!("externalTrafficPolicy: {policy}"))
        .on_node(culvert_instance::NODE_NAME)
        .backends(addresses(&[&backend]));
    scene.program(web)?;
    Ok(backend)
}

/// Asserts that the backend sees the given client addresses when the sandbox dials each of the Service's
/// addresses over TCP and UDP, in both address families.
fn expect_client_address(backend: &Pod, sandbox: &Sandbox, client: [IpAddr; 2]) -> Result<()> {
    let ips = [backend.v4(), backend.v6()];
    let listening = TestListeners::at(backend, ips, [HTTP_TARGET, DNS_TARGET])?;
    for (what, vip, [http, dns]) in ADDRESSES {
        for (dialer, client) in [Dialer::V4, Dialer::V6].into_iter().zip(client) {
            let check = || {
                let own = sandbox.connect(dialer.address(vip, http))?.local_addr()?;
                let seen = listening.accept(dialer)?;
                ensure_eq("TCP", (own, seen.ip()), (seen, client))?;
                dialer
                    .udp_socket(sandbox)?
                    .send_to(b"who am I?", dialer.address(vip, dns))?;
                let (_, seen) = listening.udp(dialer).recv_from(&mut [0; 16])?;
                ensure_eq("UDP", seen.ip(), client)
            };
            check().with_context(|| format!("{dialer:?} to {what}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_backend_sees_clients_by_their_own_addresses_at_every_address_of_the_service() -> Result<()> {
    let scene = SCENE.lease()?;
    for policy in ["Cluster", "Local"] {
        let backend = program(&scene, policy)?;
        for (who, sandbox, own) in [
            ("a pod", &**scene.client, Vip::of_pod(&scene.client)),
            ("the host", scene.node.host(), HOST),
            ("the backend itself", &**backend, Vip::of_pod(&backend)),
        ] {
            let seen = expect_client_address(&backend, sandbox, own.ips());
            seen.with_context(|| format!("{who}, policy {policy}"))?;
        }
        scene.restore()?;
    }
    scene.give_back()
}
