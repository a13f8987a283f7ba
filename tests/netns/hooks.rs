//! Connected sockets: every hook, family and protocol, from the host and from a pod.

use std::sync::Arc;

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use tunnel_tests::{
    manifest::{Protocol, Service},
    node::Node,
    place::{ANSWER, connect_within},
    pod::{Pod, Server},
};

use crate::support::{
    DNS, DNS_TARGET, HTTP, HTTP_TARGET, Vip, Way, addresses, ask, clients, counted, errno, http,
    receive, same, serve, until_backends,
};

const WEB: Vip = Vip::of(10);
const OTHER: Vip = Vip::of(11);
const EMPTY: Vip = Vip::of(12);

/// A node with a client, two backends and a Service for each, and a Service without any.
struct Stage {
    node: Node,
    client: Arc<Pod>,
    backend: Arc<Pod>,
    _servers: [Server; 2],
}

impl Stage {
    fn new() -> Result<Self> {
        let node = Node::new()?;
        let (client, backend) = (node.pod("client")?, node.pod("backend")?);
        let other = node.pod("other")?;
        node.apply(WEB.service("web").backends(addresses(&[&*backend])))?;
        node.apply(OTHER.service("other").backends(addresses(&[&*other])))?;
        node.apply(EMPTY.service("empty"))?;
        let servers = [serve(&backend)?, serve(&other)?];
        node.start()?;
        Ok(Self {
            node,
            client,
            backend,
            _servers: servers,
        })
    }
}

#[test]
fn a_tcp_connect_to_a_cluster_ip_reaches_the_backend_and_shows_the_cluster_ip() -> Result<()> {
    let stage = Stage::new()?;

    for (from, place) in clients(stage.node.host(), &stage.client) {
        for way in Way::TCP {
            let what = format!("{way:?} from the {from}");
            let (stream, grown) = counted(&stage.node, &["translated", "socket_tracked"], || {
                Ok(way.connect(place, WEB, HTTP)?)
            })
            .context(what.clone())?;
            same(&what, stream.peer_addr()?, way.shown(WEB, HTTP))?;
            same(&what, http(stream)?, "backend".to_owned())?;
            same(&what, grown, vec![1, 1])?;
        }
    }
    Ok(())
}

#[test]
fn a_tcp_socket_that_was_refused_can_connect_to_another_cluster_ip() -> Result<()> {
    let stage = Stage::new()?;

    for (from, place) in clients(stage.node.host(), &stage.client) {
        for way in Way::TCP {
            let what = format!("{way:?} from the {from}");
            let socket = way.tcp(place)?;
            let refused = connect_within(&socket, way.to(EMPTY, HTTP), ANSWER);
            same(&what, errno(refused), Errno::ECONNREFUSED)?;

            connect_within(&socket, way.to(WEB, HTTP), ANSWER).context(what.clone())?;
            let stream = std::net::TcpStream::from(socket);
            same(&what, stream.peer_addr()?, way.shown(WEB, HTTP))?;
            same(&what, http(stream)?, "backend".to_owned())?;
        }
    }
    Ok(())
}

#[test]
fn a_connected_udp_socket_asks_the_backend_and_shows_the_cluster_ip() -> Result<()> {
    let stage = Stage::new()?;

    for (from, place) in clients(stage.node.host(), &stage.client) {
        for way in Way::UDP {
            let what = format!("{way:?} from the {from}");
            let socket = way.udp(place)?;
            let (names, grown) = counted(&stage.node, &["translated", "translated_sticky"], || {
                socket.connect(way.to(WEB, DNS))?;
                Ok([ask(&socket)?, ask(&socket)?])
            })
            .context(what.clone())?;
            same(&what, names, ["backend", "backend"].map(str::to_owned))?;
            same(&what, socket.peer_addr()?, way.shown(WEB, DNS))?;
            // Sends of a connected socket are translated by its connect alone.
            same(&what, grown, vec![1, 0])?;
        }
    }
    Ok(())
}

#[test]
fn the_sender_of_an_answer_to_a_connected_udp_socket_is_the_cluster_ip() -> Result<()> {
    let stage = Stage::new()?;

    for (from, place) in clients(stage.node.host(), &stage.client) {
        for way in Way::UDP {
            let what = format!("{way:?} from the {from}");
            let socket = way.udp(place)?;
            socket.connect(way.to(WEB, DNS))?;
            socket.send(b"who?")?;
            let (_, sender) = receive(&socket).context(what.clone())?;
            same(&what, sender, way.shown(WEB, DNS))?;
        }
    }
    Ok(())
}

#[test]
fn a_udp_socket_that_connects_again_shows_what_it_dialled_last() -> Result<()> {
    let stage = Stage::new()?;
    let backend = Vip::of_pod(&stage.backend);

    for (from, place) in clients(stage.node.host(), &stage.client) {
        for way in Way::UDP {
            let what = format!("{way:?} from the {from}");
            let socket = way.udp(place)?;
            let steps = [
                (WEB, DNS, "backend"),
                (OTHER, DNS, "other"),
                (WEB, DNS, "backend"),
                (backend, DNS_TARGET, "backend"),
                (OTHER, DNS, "other"),
            ];
            for (vip, port, name) in steps {
                socket.connect(way.to(vip, port)).context(what.clone())?;
                same(&what, socket.peer_addr()?, way.shown(vip, port))?;
                same(&what, ask(&socket)?, name.to_owned())?;
            }
        }
    }
    Ok(())
}

/// Gives the first backend's address and port to a Service that leads to the other one.
fn chain(stage: &Stage) -> Result<Vip> {
    let chained = Vip::of_pod(&stage.backend);
    let other = stage.node.pod("other")?;
    let service = Service::new("chained", [chained.v4.into(), chained.v6.into()])
        .port(Protocol::Udp, DNS_TARGET, DNS_TARGET)
        .port(Protocol::Tcp, HTTP_TARGET, HTTP_TARGET)
        .backends(addresses(&[&*other]));
    stage.node.apply(service)?;
    until_backends(&stage.node, "chained", 1)?;
    Ok(chained)
}

#[test]
fn a_backend_that_is_itself_a_cluster_ip_is_not_translated_a_second_time() -> Result<()> {
    let stage = Stage::new()?;
    let chained = chain(&stage)?;

    for (from, place) in clients(stage.node.host(), &stage.client) {
        for way in Way::UDP {
            let what = format!("{way:?} from the {from}");
            let socket = way.udp(place)?;
            socket.connect(way.to(chained, DNS_TARGET))?;
            same(&what, ask(&socket)?, "other".to_owned())?;

            let socket = way.udp(place)?;
            socket.connect(way.to(WEB, DNS))?;
            same(&what, ask(&socket)?, "backend".to_owned())?;
            same(&what, socket.peer_addr()?, way.shown(WEB, DNS))?;
        }
        for way in Way::TCP {
            let what = format!("{way:?} from the {from}");
            let stream = way.connect(place, WEB, HTTP)?;
            same(&what, http(stream)?, "backend".to_owned())?;
        }
    }
    Ok(())
}

#[test]
fn a_connected_socket_is_not_translated_a_second_time_after_it_asked_another() -> Result<()> {
    let stage = Stage::new()?;
    chain(&stage)?;

    for (from, place) in clients(stage.node.host(), &stage.client) {
        for way in Way::UDP {
            let what = format!("{way:?} from the {from}");
            let socket = way.udp(place)?;
            socket.connect(way.to(WEB, DNS))?;
            socket.send_to(b"who?", way.to(OTHER, DNS))?;
            same(
                &what,
                ask(&socket).context(what.clone())?,
                "backend".to_owned(),
            )?;
        }
    }
    Ok(())
}
