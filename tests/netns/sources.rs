//! Who may use the address of a load balancer (`loadBalancerSourceRanges`), and who a client is.

use std::net::{IpAddr, SocketAddr};

use anyhow::{Context as _, Result};
use socket2::SockAddr;
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
    scene::Scene,
    support::{CHANGE, DNS, HOST, HTTP, Vip, Way, ask_to, counted, errno, http, no_way, same},
};

const WEB: Vip = Vip::of(40);
/// Addresses that lead nowhere by themselves.
const BALANCER: Vip = Vip::of(200);
const EXTERNAL: Vip = Vip::of(201);
/// Further addresses of a pod.
const SECOND: Vip = Vip::of(220);
const REFUSED: &str = "source_refused";

static SCENE: Shared<Scene> = Shared::new(|| Scene::started(&BACKENDS));
const BACKENDS: [&str; 3] = ["one", "two", "three"];

/// A Service with a load balancer that only these addresses may use.
fn open_to(scene: &Scene, addresses: &[IpAddr]) -> Service {
    let ranges = addresses.iter().map(|ip| {
        let length = if ip.is_ipv4() { 32 } else { 128 };
        format!("\"{ip}/{length}\"")
    });
    let ranges: Vec<_> = ranges.collect();
    WEB.service("web")
        .of_type("LoadBalancer")
        .spec(&format!("externalIPs: [{}]", EXTERNAL.listed()))
        .spec(&format!(
            "loadBalancerSourceRanges: [{}]",
            ranges.join(", ")
        ))
        .load_balancer(&format!(
            "{{ ip: \"{}\" }}, {{ ip: \"{}\" }}",
            BALANCER.v4, BALANCER.v6
        ))
        .backends(scene.all())
}

/// That TCP and UDP sockets of a place are answered at these addresses, in every way.
fn is_admitted(place: &Place, vip: Vip) -> Result<()> {
    for way in Way::TCP {
        http(way.connect(place, vip, HTTP)?).with_context(|| format!("TCP, {way:?}"))?;
    }
    for way in Way::UDP {
        let socket = way.udp(place)?;
        let (_, from) =
            ask_to(&socket, way.to(vip, DNS)).with_context(|| format!("UDP, {way:?}"))?;
        same("sender", from, way.shown(vip, DNS))?;
        let socket = way.udp(place)?;
        socket.connect(way.to(vip, DNS))?;
        crate::support::ask(&socket).with_context(|| format!("connected UDP, {way:?}"))?;
    }
    Ok(())
}

/// That they find no way there, and that this is counted each time.
fn is_shut_out(node: &Node, place: &Place, vip: Vip) -> Result<()> {
    let (tcp, udp) = no_way()?;
    for way in Way::TCP {
        let socket = way.tcp(place)?;
        let attempt = || Ok(errno(connect_within(&socket, way.to(vip, HTTP), ANSWER)));
        let (failed, grown) = counted(node, &[REFUSED], attempt)?;
        same("error", (failed, grown), (tcp, vec![1])).with_context(|| format!("TCP, {way:?}"))?;
    }
    for way in Way::UDP {
        let socket = way.udp(place)?;
        let attempt = || {
            let to = way.to(vip, DNS);
            Ok([
                errno(socket.connect(to)),
                errno(socket.send_to(b"who?", to)),
            ])
        };
        let (failed, grown) = counted(node, &[REFUSED], attempt)?;
        same("error", (failed, grown), ([udp; 2], vec![2]))
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

    // Each pod connects here for the first time.
    is_shut_out(node, outside, BALANCER)?;
    is_admitted(inside, BALANCER)?;
    is_shut_out(node, node.host(), BALANCER).context("from the host")?;
    // The other addresses are for all.
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
    // From another of its addresses it is another client.
    let (tcp, _) = no_way()?;
    for (way, own) in [
        (Way::V4, IpAddr::from([127, 0, 0, 1])),
        (Way::V6, IpAddr::from([0, 0, 0, 0, 0, 0, 0, 1])),
    ] {
        let socket = way.tcp(node.host())?;
        socket.bind(&SockAddr::from(SocketAddr::new(own, 0)))?;
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
    for (way, own) in Way::TCP.into_iter().zip([
        SECOND.v4.into(),
        SECOND.v6.into(),
        IpAddr::V6(SECOND.v4.to_ipv6_mapped()),
    ]) {
        // The answer would not come back: the node has no route to the address. The connect may.
        let socket = way.tcp(pod)?;
        socket.bind(&SockAddr::from(SocketAddr::new(own, 0)))?;
        socket.set_nonblocking(true)?;
        let connect = || Ok(socket.connect(&SockAddr::from(way.to(BALANCER, HTTP))));
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
        let answer = Way::V4.connect(place, BALANCER, HTTP);
        let answer6 = Way::V6.connect(place, BALANCER, HTTP);
        [answer, answer6]
            .iter()
            .all(|answer| answer.is_ok() == admitted)
    };
    let becomes = |text: &str, admitted: [bool; 2]| {
        let is_so = || is(inside, admitted[0]) && is(outside, admitted[1]);
        wait::until(CHANGE, is_so).context(text.to_owned())
    };
    node.apply(open_to(&scene, &[inside.v4(), inside.v6()]))?;
    becomes("ranges come", [true, false])?;
    node.apply(open_to(&scene, &[outside.v4(), outside.v6()]))?;
    becomes("ranges change", [false, true])?;

    // A daemon that takes the maps over leaves it at that, and finds nothing wrong with it.
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
    // What comes to a device later changes nobody's name.
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
            // Wherever it is, and whatever ran there before.
            let client = Client::of_address(Address::from_ip(own));
            let set = Set { base: 0, len: 3 };
            let place_in_set = select::place(set, select::hash(client.words()));
            let mut targets = scene.all();
            targets.retain(|ip| ip.is_ipv4() == own.is_ipv4());
            targets.sort_unstable();
            let expected = place_in_set.and_then(|at| targets.get(usize::try_from(at).ok()?));
            let name = http(way.connect(place, BALANCER, HTTP)?)?;
            let pod = scene.backend(&name)?;
            let seen = pod.address(way.family());
            same("backend", Some(&seen), expected)
                .with_context(|| format!("{way:?} from the {who}, {own}"))?;
        }
    }
    Ok(())
}
