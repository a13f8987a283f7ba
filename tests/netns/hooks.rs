//! Connected TCP and UDP sockets, on the host and in a pod: connect, receive and peer address with every
//! dialer.

use anyhow::Result;
use nix::errno::Errno;
use tunnel_tests::{
    manifest::{Protocol, Service},
    place::{ANSWER, connect_within},
};

use crate::{
    scene::{DIALLED, EMPTY, OTHER, Scene, WEB},
    support::{
        DNS, DNS_TARGET, HTTP, HTTP_TARGET, Vip, Way, ask, counted, errno, http, receive, same,
    },
};

#[test]
fn a_tcp_connect_to_a_cluster_ip_reaches_the_backend_and_shows_the_cluster_ip() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::TCP, |place, way| {
        let connect = || way.is_served(place, WEB, HTTP, "backend");
        let ((), grown) = counted(&scene.node, &["translated", "socket_tracked"], connect)?;
        same("counts", grown, vec![1, 1])
    })?;
    scene.give_back()
}

#[test]
fn a_tcp_socket_that_was_refused_can_connect_to_another_cluster_ip() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::TCP, |place, way| {
        let socket = way.tcp(place)?;
        let refused = connect_within(&socket, way.to(EMPTY, HTTP), ANSWER);
        same("error", errno(refused), Errno::ECONNREFUSED)?;

        connect_within(&socket, way.to(WEB, HTTP), ANSWER)?;
        let stream = std::net::TcpStream::from(socket);
        same("peer", stream.peer_addr()?, way.shown(WEB, HTTP))?;
        same("server", http(stream)?, "backend")
    })?;
    scene.give_back()
}

#[test]
fn a_connected_udp_socket_asks_the_backend_and_shows_the_cluster_ip() -> Result<()> {
    let scene = DIALLED.take()?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        let (answers, grown) = counted(&scene.node, &["translated", "translated_sticky"], || {
            socket.connect(way.to(WEB, DNS))?;
            socket.send(b"who?")?;
            let first = receive(&socket)?;
            socket.send(b"who?")?;
            Ok([first, receive(&socket)?])
        })?;
        // The sender of each answer is the cluster IP, like the peer address.
        let expected = ("backend".to_owned(), way.shown(WEB, DNS));
        same("answers", answers, [expected.clone(), expected])?;
        same("peer", socket.peer_addr()?, way.shown(WEB, DNS))?;
        // The kernel programs translate the connect, but no send on the connected socket.
        same("counts", grown, vec![1, 0])
    })?;
    scene.give_back()
}

#[test]
fn a_udp_socket_that_connects_again_shows_what_it_dialled_last() -> Result<()> {
    let scene = DIALLED.take()?;
    let backend = Vip::of_pod(scene.backend("backend")?);

    scene.each(&Way::UDP, |place, way| {
        let socket = way.udp(place)?;
        let steps = [
            (WEB, DNS, "backend"),
            (OTHER, DNS, "other"),
            (WEB, DNS, "backend"),
            (backend, DNS_TARGET, "backend"),
            (OTHER, DNS, "other"),
        ];
        for (vip, port, name) in steps {
            socket.connect(way.to(vip, port))?;
            same("peer", socket.peer_addr()?, way.shown(vip, port))?;
            same("server", ask(&socket)?, name)?;
        }
        Ok(())
    })?;
    scene.give_back()
}

/// Programs a Service whose ClusterIP and port are those of the first backend, and whose backend is the
/// other one.
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
    let scene = DIALLED.take()?;
    let chained = chain(&scene)?;

    scene.each(&Way::UDP, |place, way| {
        way.asked(place, chained, DNS_TARGET, "other")?;
        let socket = way.asked(place, WEB, DNS, "backend")?;
        same("peer", socket.peer_addr()?, way.shown(WEB, DNS))
    })?;
    scene.reaches(WEB, "backend")?;
    scene.give_back()
}

#[test]
fn a_connected_socket_is_not_translated_a_second_time_after_it_asked_another() -> Result<()> {
    let scene = DIALLED.take()?;
    chain(&scene)?;

    scene.each(&Way::UDP, |place, way| {
        let socket = way.connected(place, WEB, DNS)?;
        socket.send_to(b"who?", way.to(OTHER, DNS))?;
        same("server", ask(&socket)?, "backend")
    })?;
    scene.give_back()
}
