//! `loadBalancerSourceRanges` restrict the clients of a load balancer's address. Also the address by which
//! a client is identified.

use std::net::IpAddr;

use anyhow::{Context as _, Result};
use tunnel_common::{addr::Address, affinity::Client, select, service::Set};
use tunnel_tests::{
    admin,
    manifest::Service,
    node::Node,
    place::{ANSWER, Place, connect_within},
    shared::Shared,
    wait,
};

use crate::{
    reach::{BALANCER, EXTERNAL, LOOPBACK},
    scene::{Scene, WEB},
    support::{
        CHANGE, DNS, HOST, HTTP, Vip, Way, ask, ask_to, counted, errno, is_refused, no_way, same,
    },
};

/// Additional addresses of a pod.
const SECOND: Vip = Vip::of(220);
const REFUSED: &str = "source_range_denied";

static SCENE: Shared<Scene> = Shared::new(|| Scene::started(&BACKENDS));
const BACKENDS: [&str; 3] = ["one", "two", "three"];

/// Builds a Service of type LoadBalancer whose source ranges have only these addresses.
fn open_to(scene: &Scene, addresses: &[IpAddr]) -> Service {
    let ranges = addresses.iter().map(|ip| {
        let length = if ip.is_ipv4() { 32 } else { 128 };
        format!("\"{ip}/{length}\"")
    });
    let ranges = ranges.collect::<Vec<_>>().join(", ");
    WEB.service("web")
        .of_type("LoadBalancer")
        .spec(&format!("externalIPs: [{}]", EXTERNAL.listed()))
        .spec(&format!("loadBalancerSourceRanges: [{ranges}]"))
        .load_balancer(&BALANCER.ingress())
        .backends(scene.all())
}

/// Asserts that TCP and UDP sockets of a place get answers from this VIP, with every dialer.
fn is_admitted(place: &Place, vip: Vip) -> Result<()> {
    for way in Way::TCP {
        way.dial(place, vip, HTTP)
            .with_context(|| format!("TCP, {way:?}"))?;
    }
    for way in Way::UDP {
        let socket = way.udp(place)?;
        let (_, from) =
            ask_to(&socket, way.to(vip, DNS)).with_context(|| format!("UDP, {way:?}"))?;
        same("sender", from, way.shown(vip, DNS))?;
        let socket = way.connected(place, vip, DNS)?;
        ask(&socket).with_context(|| format!("connected UDP, {way:?}"))?;
    }
    Ok(())
}

/// Asserts that each connect and datagram to this VIP is refused as unreachable, and counted.
fn is_shut_out(node: &Node, place: &Place, vip: Vip) -> Result<()> {
    let (tcp, udp) = no_way()?;
    for way in Way::TCP {
        is_refused(node, REFUSED, tcp, || way.connect(place, vip, HTTP))
            .with_context(|| format!("TCP, {way:?}"))?;
    }
    for way in Way::UDP {
        let (socket, to) = (way.udp(place)?, way.to(vip, DNS));
        is_refused(node, REFUSED, udp, || socket.connect(to))
            .and_then(|()| is_refused(node, REFUSED, udp, || socket.send_to(b"who?", to)))
            .with_context(|| format!("UDP, {way:?}"))?;
    }
    Ok(())
}

#[test]
fn only_pods_in_the_ranges_reach_the_address_of_a_load_balancer() -> Result<()> {
    let scene = Scene::started(&BACKENDS)?;
    let (node, inside) = (&scene.node, &scene.client);
    let outside = &node.pod("outside")?;
    scene.program(open_to(&scene, &[inside.v4(), inside.v6()]))?;

    // The pods have made no connects before.
    is_shut_out(node, outside, BALANCER)?;
    is_admitted(inside, BALANCER)?;
    is_shut_out(node, node.host(), BALANCER).context("from the host")?;
    // The other addresses are open to all clients.
    for place in [&***inside, &***outside, node.host()] {
        is_admitted(place, WEB)?;
        is_admitted(place, EXTERNAL)?;
    }
    Ok(())
}

#[test]
fn the_host_reaches_it_if_its_address_is_in_the_ranges() -> Result<()> {
    let scene = SCENE.take()?;
    let node = &scene.node;
    scene.program(open_to(&scene, &HOST.ips()))?;

    is_admitted(node.host(), BALANCER)?;
    is_shut_out(node, &scene.client, BALANCER)?;
    // With another of its addresses as source, the host counts as another client.
    let (tcp, _) = no_way()?;
    for way in [Way::V4, Way::V6] {
        let own = way.to(LOOPBACK, 0);
        let socket = way.tcp(node.host())?;
        socket.bind(&own.into())?;
        let connected = connect_within(&socket, way.to(BALANCER, HTTP), ANSWER);
        same("error", errno(connected), tcp).with_context(|| format!("from {own}"))?;
    }
    scene.give_back()
}

#[test]
fn a_socket_that_is_bound_to_an_address_comes_from_there() -> Result<()> {
    let scene = SCENE.take()?;
    let node = &scene.node;
    let pod = &node.pod("bound")?;
    SECOND.add_to(pod, "lo")?;
    scene.program(open_to(&scene, &SECOND.ips()))?;

    is_shut_out(node, pod, BALANCER)?;
    for way in Way::TCP {
        let own = way.to(SECOND, 0);
        // The connect is permitted, but never completes, since the node has no route back to the address.
        let socket = way.tcp(pod)?;
        socket.bind(&own.into())?;
        socket.set_nonblocking(true)?;
        let connect = || Ok(socket.connect(&way.to(BALANCER, HTTP).into()));
        let (connected, grown) = counted(node, &[REFUSED, "translated"], connect)?;
        let failed = errno(connected);
        same("counted", grown, vec![0, 1]).with_context(|| format!("from {own}: {failed}"))?;
    }
    scene.give_back()
}

#[test]
fn ranges_come_change_and_go_while_it_runs() -> Result<()> {
    let scene = SCENE.take()?;
    let node = &scene.node;
    let (inside, outside) = (&scene.client, &node.pod("outside")?);
    scene.program(open_to(&scene, &[]))?;
    is_admitted(inside, BALANCER)?;

    let is = |place: &Place, admitted: bool| {
        let connect = |way: Way| way.connect(place, BALANCER, HTTP);
        [Way::V4, Way::V6]
            .into_iter()
            .all(|way| connect(way).is_ok() == admitted)
    };
    let becomes = |text: &str, admitted: [bool; 2]| {
        let is_so = || is(inside, admitted[0]) && is(outside, admitted[1]);
        wait::until(CHANGE, is_so).context(text.to_owned())
    };
    node.apply(open_to(&scene, &[inside.v4(), inside.v6()]))?;
    becomes("ranges come", [true, false])?;
    node.apply(open_to(&scene, &[outside.v4(), outside.v6()]))?;
    becomes("ranges change", [false, true])?;

    // The next daemon adopts the entries, and its audit finds no difference.
    node.kill9()?;
    becomes("without a daemon", [false, true])?;
    node.start()?;
    becomes("after a restart", [false, true])?;
    let drift = admin::metric(&node.metrics()?, "culvert_map_drift_total{map=\"all\"}");
    same("drift", drift, Some(0))?;

    node.apply(open_to(&scene, &[]))?;
    becomes("ranges go", [true, true])?;
    scene.give_back()
}

#[test]
fn a_client_is_known_by_its_address() -> Result<()> {
    let scene = Scene::started(&BACKENDS)?;
    let node = &scene.node;
    let hashed = open_to(&scene, &[]).annotated("culvert.dev/algorithm", "source-hash");
    scene.program(hashed)?;
    // Adding an address does not change the address that identifies a client.
    for (place, device, v4, v6) in [
        (node.host(), "uplink", "192.0.2.77", "2001:db8:77::77"),
        (&**scene.client, "eth0", "10.1.77.77", "fd00:10:1:77::77"),
    ] {
        place.ip(&format!(
            "addr add {v4}/32 dev {device}\naddr add {v6}/128 dev {device} nodad\n"
        ))?;
    }

    for (who, place) in scene.places() {
        for way in Way::TCP {
            let own = match (who, way) {
                ("host", Way::V6) => HOST.v6.into(),
                ("host", _) => HOST.v4.into(),
                _ => scene.client.address(way.family()),
            };
            // The hash depends only on the client's address, not on the node or earlier pods.
            let client = Client::of_address(Address::from_ip(own));
            let set = Set { base: 0, len: 3 };
            let place_in_set = select::place(set, select::hash(client.words()));
            let mut targets = scene.all();
            targets.retain(|ip| ip.is_ipv4() == own.is_ipv4());
            targets.sort_unstable();
            let expected = place_in_set.and_then(|at| targets.get(usize::try_from(at).ok()?));
            let name = way.dial(place, BALANCER, HTTP)?;
            let pod = scene.backend(&name)?;
            let seen = pod.address(way.family());
            same("backend", Some(&seen), expected)
                .with_context(|| format!("{way:?} from the {who}, {own}"))?;
        }
    }
    Ok(())
}
