//! Node ports, load balancer addresses and external IPs of a Service, and policies that restrict traffic
//! to endpoints of this node.

use std::net::{Ipv4Addr, Ipv6Addr};

use anyhow::{Context as _, Result};
use nix::errno::Errno;
use socket2::SockRef;
use tunnel_tests::{
    instance,
    manifest::{Protocol, Service},
    place::{ANSWER, Place, connect_within},
    shared::Shared,
    topology, wait,
};

use crate::{
    listeners::Listening,
    scene::{Scene, WEB},
    support::{
        CHANGE, DNS, DNS_TARGET, HOST, HTTP, HTTP_TARGET, Vip, Way, errno, is_refused, no_way,
        same, until_backends,
    },
};

pub(crate) const LOOPBACK: Vip = Vip {
    v4: Ipv4Addr::LOCALHOST,
    v6: Ipv6Addr::LOCALHOST,
};
const OUTSIDE: Vip = Vip {
    v4: topology::OUTSIDE_V4,
    v6: topology::OUTSIDE_V6,
};
/// Addresses that a test adds to the host while the daemon runs.
const NEW: Vip = Vip {
    v4: Ipv4Addr::new(198, 51, 100, 7),
    v6: Ipv6Addr::new(0x2001, 0xdb8, 0x51, 0, 0, 0, 0, 7),
};
/// Addresses to which there is no route.
pub(crate) const BALANCER: Vip = Vip::of(200);
pub(crate) const EXTERNAL: Vip = Vip::of(201);
pub(crate) const NODE_HTTP: u16 = 30_080;
pub(crate) const NODE_DNS: u16 = 30_053;

static SCENE: Shared<Scene> = Shared::new(|| Scene::started(&["backend"]));

/// Creates a node with a backend and a `nodePortAddresses` setting, without starting the daemon.
fn configured(setting: &str) -> Result<Scene> {
    Scene::with(&["backend"], |settings| {
        setting.clone_into(&mut settings.node_ports);
    })
}

/// Builds a Service with node ports, without endpoints.
pub(crate) fn service() -> Service {
    Service::new("web", WEB.ips())
        .port(Protocol::TCP, HTTP, HTTP_TARGET)
        .node_port(NODE_HTTP)
        .port(Protocol::UDP, DNS, DNS_TARGET)
        .node_port(NODE_DNS)
}

/// Builds a Service like [`service`], with an external IP and a load balancer address of each family.
pub(crate) fn service_everywhere() -> Service {
    service()
        .spec(&format!("externalIPs: [{}]", EXTERNAL.listed()))
        .load_balancer(&BALANCER.ingress())
}

/// Asserts that the backend answers every TCP and UDP dialer, with the dialled address as peer or sender.
fn answers(place: &Place, vip: Vip, [http_port, dns_port]: [u16; 2]) -> Result<()> {
    for way in Way::TCP {
        way.is_served(place, vip, http_port, "backend")?;
    }
    for way in Way::UDP {
        way.is_answered(&way.udp(place)?, vip, dns_port, "backend")?;
    }
    Ok(())
}

#[test]
fn loopback_has_node_ports_on_the_host_and_is_a_pods_own() -> Result<()> {
    let scene = SCENE.take()?;
    scene.program(service().backends(scene.all()))?;

    answers(scene.node.host(), LOOPBACK, [NODE_HTTP, NODE_DNS])?;

    for way in [Way::V4, Way::V6] {
        let refused = errno(way.connect(&scene.client, LOOPBACK, NODE_HTTP));
        same("error in a pod", refused, Errno::ECONNREFUSED)?;
        let own = scene.client.listen(way.to(LOOPBACK, NODE_HTTP))?;
        way.connect(&scene.client, LOOPBACK, NODE_HTTP)?;
        drop(own);
    }
    scene.give_back()
}

#[test]
fn loopback_node_ports_leave_sockets_that_are_bound_to_loopback_alone() -> Result<()> {
    let scene = SCENE.take()?;
    let host = scene.node.host();
    scene.program(service().backends(scene.all()))?;
    answers(host, LOOPBACK, [NODE_HTTP, NODE_DNS])?;

    for way in Way::TCP {
        let connect = || -> Result<_> {
            let socket = way.tcp(host)?;
            socket.bind(&way.to(LOOPBACK, 0).into())?;
            let to = way.to(LOOPBACK, NODE_HTTP);
            Ok(connect_within(&socket, to, ANSWER))
        };
        same("error without a listener", errno(connect()?), Errno::ECONNREFUSED)?;
        let own = host.listen(way.to(LOOPBACK, NODE_HTTP))?;
        connect()?.with_context(|| format!("{way:?} to its own listener"))?;
        drop(own);
    }
    for way in Way::UDP {
        let own = host.udp(way.to(LOOPBACK, NODE_DNS))?;
        let socket = way.udp(host)?;
        SockRef::from(&socket).bind(&way.shown(LOOPBACK, 0).into())?;
        socket
            .send_to(b"who?", way.to(LOOPBACK, NODE_DNS))
            .with_context(|| format!("{way:?} to its own listener"))?;
        let (_, from) = own.recv_from(&mut [0; 16])?;
        same("sender", from.port(), socket.local_addr()?.port())?;
    }
    scene.give_back()
}

#[test]
fn node_ports_follow_the_addresses_of_the_node() -> Result<()> {
    let scene = configured("nodePortAddresses: [198.51.100.0/24, \"2001:db8:51::/64\"]")?;
    scene.start([service().backends(scene.all())])?;
    let host = scene.node.host();
    for way in [Way::V4, Way::V6] {
        let primary = errno(way.connect(host, HOST, NODE_HTTP));
        same("error at an address outside of the ranges", primary, Errno::ECONNREFUSED)?;
    }

    // Connects to addresses of these ranges fail at once, except to those that the node has.
    host.ip("route add unreachable 198.51.100.0/24\nroute add unreachable 2001:db8:51::/64\n")?;
    NEW.add_to(host, "uplink")?;

    for (name, place) in scene.places() {
        wait::until(CHANGE, || {
            answers(place, NEW, [NODE_HTTP, NODE_DNS]).is_ok()
        })
        .with_context(|| format!("from {name}"))?;
    }
    NEW.delete_from(host, "uplink")?;
    let is_gone = |way: Way| way.connect(host, NEW, NODE_HTTP).is_err();
    wait::until(CHANGE, || Way::TCP.into_iter().all(is_gone))
        .context("the node port is still served at the removed address")
}

#[test]
fn node_ports_are_the_services_though_something_of_the_host_listens_there() -> Result<()> {
    let scene = SCENE.take()?;
    let host = scene.node.host();
    let _tcp = host.listen(("::", NODE_HTTP))?;
    let _udp = host.udp(("::", NODE_DNS))?;
    scene.program(service().backends(scene.all()))?;

    for (name, place) in scene.places() {
        answers(place, HOST, [NODE_HTTP, NODE_DNS]).with_context(|| name.to_owned())?;
    }
    scene.give_back()
}

#[test]
#[ignore = "no kernel decides it: entries in the maps"]
fn external_and_load_balancer_ips_are_the_services_though_this_node_listens_there() -> Result<()> {
    let scene = Scene::new(&["backend"])?;
    let host = scene.node.host();
    let mut listening = Vec::new();
    for vip in [BALANCER, EXTERNAL] {
        vip.add_to(host, "lo")?;
        listening.push(Listening::at(host, vip.ips(), [HTTP, DNS])?);
    }
    scene.start([service_everywhere().backends(scene.all())])?;

    for (name, place) in scene.places() {
        for vip in [BALANCER, EXTERNAL] {
            answers(place, vip, [HTTP, DNS]).with_context(|| format!("{vip:?} from {name}"))?;
        }
    }
    Ok(())
}

#[test]
fn a_policy_local_without_an_endpoint_of_this_node_finds_no_way() -> Result<()> {
    let (error, _) = no_way()?;
    let scene = SCENE.take()?;
    let away = service()
        .spec("internalTrafficPolicy: Local")
        .on("other")
        .backends(OUTSIDE.ips());
    scene.program(away)?;

    scene.each(&Way::TCP, |place, way| {
        is_refused(&scene.node, "no_local_backend", error, || {
            way.connect(place, WEB, HTTP)
        })
    })?;
    // Without any endpoint, the connect is refused like that to any other Service.
    scene
        .node
        .apply(service().spec("internalTrafficPolicy: Local"))?;
    for way in [Way::V4, Way::V6] {
        let failed = || errno(way.connect(scene.node.host(), WEB, HTTP));
        wait::until(CHANGE, || failed() == Errno::ECONNREFUSED)
            .with_context(|| format!("{way:?}: the connect is not refused"))?;
    }
    scene.give_back()
}

#[test]
#[ignore = "no kernel decides it: the daemon chooses the endpoints"]
fn a_service_that_keeps_to_its_node_leads_to_endpoints_of_this_node_and_else_refuses() -> Result<()>
{
    let scene = configured("topologyKeys: honor")?;
    let web = |node| {
        service()
            .annotated("openyurt.io/topologyKeys", "kubernetes.io/hostname")
            .on(node)
            .backends(scene.all())
    };
    scene.start([web("other")])?;

    scene.each(&[Way::V4, Way::V6], |place, way| {
        let refused = errno(way.connect(place, WEB, HTTP));
        same("error", refused, Errno::ECONNREFUSED)
    })?;

    scene.node.apply(web(instance::NODE))?;
    until_backends(&scene.node, "web", 1)?;
    for (name, place) in scene.places() {
        answers(place, WEB, [HTTP, DNS]).with_context(|| format!("from {name}"))?;
    }
    Ok(())
}
