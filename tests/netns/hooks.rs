//! Tests the hooks with connected TCP and UDP sockets, on the host and in a pod: with every dialer, sockets
//! connect, receive, and report their peer address.

use anyhow::Result;
use nix::errno::Errno;
use tunnel_tests::{
    manifest::{Protocol, Service},
    sandbox::{RESPONSE_TIMEOUT, connect_within},
};

use crate::{
    fixture::{DIALLED, EMPTY, OTHER, Scene, WEB},
    support::{
        DNS, DNS_TARGET, Dialer, HTTP, HTTP_TARGET, Vip, count_during, ensure_eq, errno,
        http_server_name, query, receive,
    },
};

#[test]
fn a_tcp_connect_to_a_cluster_ip_reaches_the_backend_and_shows_the_cluster_ip() -> Result<()> {
    let scene = DIALLED.lease()?;

    scene.for_each_client(&Dialer::TCP, |sandbox, dialer| {
        let connect = || dialer.expect_served(sandbox, WEB, HTTP, "backend");
        let ((), increases) =
            count_during(&scene.node, &["translated", "socket_tracked"], connect)?;
        ensure_eq("counts", increases, vec![1, 1])
    })?;
    scene.give_back()
}

#[test]
fn a_tcp_socket_that_was_refused_can_connect_to_another_cluster_ip() -> Result<()> {
    let scene = DIALLED.lease()?;

    scene.for_each_client(&Dialer::TCP, |sandbox, dialer| {
        let socket = dialer.tcp_socket(sandbox)?;
        let refused = connect_within(&socket, dialer.address(EMPTY, HTTP), RESPONSE_TIMEOUT);
        ensure_eq("error", errno(refused), Errno::ECONNREFUSED)?;

        connect_within(&socket, dialer.address(WEB, HTTP), RESPONSE_TIMEOUT)?;
        let stream = std::net::TcpStream::from(socket);
        ensure_eq(
            "peer",
            stream.peer_addr()?,
            dialer.reported_address(WEB, HTTP),
        )?;
        ensure_eq("server", http_server_name(stream)?, "backend")
    })?;
    scene.give_back()
}

#[test]
fn a_connected_udp_socket_reaches_the_backend_and_shows_the_cluster_ip() -> Result<()> {
    let scene = DIALLED.lease()?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        let (answers, increases) =
            count_during(&scene.node, &["translated", "translated_sticky"], || {
                socket.connect(dialer.address(WEB, DNS))?;
                socket.send(b"who?")?;
                let first = receive(&socket)?;
                socket.send(b"who?")?;
                Ok([first, receive(&socket)?])
            })?;
        // Each reply's sender must be the cluster IP, and so must the socket's peer address.
        let expected = ("backend".to_owned(), dialer.reported_address(WEB, DNS));
        ensure_eq("answers", answers, [expected.clone(), expected])?;
        ensure_eq(
            "peer",
            socket.peer_addr()?,
            dialer.reported_address(WEB, DNS),
        )?;
        // The kernel programs translate connect(), but leave sends on the connected socket alone.
        ensure_eq("counts", increases, vec![1, 0])
    })?;
    scene.give_back()
}

#[test]
fn a_udp_socket_that_connects_again_shows_the_address_that_it_dialled_last() -> Result<()> {
    let scene = DIALLED.lease()?;
    let backend = Vip::of_pod(scene.backend("backend")?);

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.udp_socket(sandbox)?;
        let steps = [
            (WEB, DNS, "backend"),
            (OTHER, DNS, "other"),
            (WEB, DNS, "backend"),
            (backend, DNS_TARGET, "backend"),
            (OTHER, DNS, "other"),
        ];
        for (vip, port, name) in steps {
            socket.connect(dialer.address(vip, port))?;
            ensure_eq(
                "peer",
                socket.peer_addr()?,
                dialer.reported_address(vip, port),
            )?;
            ensure_eq("server", query(&socket)?, name)?;
        }
        Ok(())
    })?;
    scene.give_back()
}

#[test]
fn a_udp_socket_whose_second_connect_fails_keeps_showing_the_cluster_ip() -> Result<()> {
    let scene = DIALLED.lease()?;
    let socket = Dialer::V4.connect_udp(&scene.client, WEB, DNS)?;

    // The socket lacks SO_BROADCAST.
    let refused = socket.connect("255.255.255.255:53");
    ensure_eq("error", errno(refused), Errno::EACCES)?;

    let expected = Dialer::V4.reported_address(WEB, DNS);
    ensure_eq("peer", socket.peer_addr()?, expected)?;
    ensure_eq("server", query(&socket)?, "backend")?;
    scene.give_back()
}

/// Programs a Service whose ClusterIP is the address of the pod `backend`, whose ports are that pod's ports,
/// and whose own backend is the pod `other`.
fn chain(scene: &Scene) -> Result<Vip> {
    let chained = Vip::of_pod(scene.backend("backend")?);
    let service = Service::new("chained", [chained.v4.into(), chained.v6.into()])
        .port(Protocol::UDP, DNS_TARGET, DNS_TARGET)
        .port(Protocol::TCP, HTTP_TARGET, HTTP_TARGET)
        .backends(scene.addresses(&["other"])?);
    scene.program(service)?;
    Ok(chained)
}

#[test]
fn a_backend_that_is_itself_a_cluster_ip_is_not_translated_a_second_time() -> Result<()> {
    let scene = DIALLED.lease()?;
    let chained = chain(&scene)?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        dialer.connect_udp_to(sandbox, chained, DNS_TARGET, "other")?;
        let socket = dialer.connect_udp_to(sandbox, WEB, DNS, "backend")?;
        ensure_eq(
            "peer",
            socket.peer_addr()?,
            dialer.reported_address(WEB, DNS),
        )
    })?;
    scene.expect_served(WEB, "backend")?;
    scene.give_back()
}

#[test]
fn a_connected_socket_is_not_translated_a_second_time_after_it_sent_to_another_service()
-> Result<()> {
    let scene = DIALLED.lease()?;
    chain(&scene)?;

    scene.for_each_client(&Dialer::UDP, |sandbox, dialer| {
        let socket = dialer.connect_udp(sandbox, WEB, DNS)?;
        socket.send_to(b"who?", dialer.address(OTHER, DNS))?;
        ensure_eq("server", query(&socket)?, "backend")
    })?;
    scene.give_back()
}
