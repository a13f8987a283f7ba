//! UDP sockets that are connected to an address when it becomes a Service's address.

use anyhow::Result;
use tunnel_tests::manifest::{Protocol, Service};

use crate::{
    fixture::{DIALLED, OTHER, Scene, WEB},
    support::{DNS, DNS_TARGET, Dialer, Vip, ensure_eq, query},
};

/// Makes the address of the pod `backend` an external IP of a Service whose own backend is the pod `other`.
fn take_over(scene: &Scene) -> Result<Vip> {
    let taken = Vip::of_pod(scene.backend("backend")?);
    let service = Service::new("taker", Vip::of(50).ips())
        .spec(&format!("externalIPs: [{}]", taken.yaml_list()))
        .port(Protocol::UDP, DNS_TARGET, DNS_TARGET)
        .backends(scene.addresses(&["other"])?);
    scene.program(service)?;
    Ok(taken)
}

#[test]
fn a_socket_keeps_its_answers_when_its_peer_becomes_an_external_ip() -> Result<()> {
    let scene = DIALLED.lease()?;
    let peer = Vip::of_pod(scene.backend("backend")?);
    let connect =
        |sandbox: &_, dialer: Dialer| dialer.connect_udp_to(sandbox, peer, DNS_TARGET, "backend");
    let before = scene.map_clients(&Dialer::UDP, connect)?;
    // These sockets have also sent to another Service before.
    let mixed = scene.map_clients(&Dialer::UDP, |sandbox, dialer| {
        let socket = connect(sandbox, dialer)?;
        socket.send_to(b"who?", dialer.address(OTHER, DNS))?;
        Ok(socket)
    })?;

    let taken = take_over(&scene)?;

    for (client, socket) in before.iter().chain(&mixed) {
        let dialer = client.dialer;
        let expected = dialer.reported_address(taken, DNS_TARGET);
        for _ in 0..3 {
            ensure_eq(&client.to_string(), query(socket)?, "backend")?;
        }
        ensure_eq("peer", socket.peer_addr()?, expected)?;

        // The socket can still use Services, and is translated after it connects again.
        socket.send_to(b"who?", dialer.address(OTHER, DNS))?;
        ensure_eq(&client.to_string(), query(socket)?, "backend")?;
        socket.connect(dialer.address(WEB, DNS))?;
        ensure_eq("server at a cluster IP", query(socket)?, "backend")?;
        ensure_eq(
            "peer",
            socket.peer_addr()?,
            dialer.reported_address(WEB, DNS),
        )?;
        socket.connect(dialer.address(taken, DNS_TARGET))?;
        ensure_eq("server after a reconnect", query(socket)?, "other")?;
        ensure_eq("peer", socket.peer_addr()?, expected)?;
    }
    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        dialer
            .connect_udp_to(sandbox, taken, DNS_TARGET, "other")
            .map(drop)
    })?;
    scene.give_back()
}
