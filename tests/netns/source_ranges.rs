//! Tests source ranges (`loadBalancerSourceRanges`), which restrict the clients that may use a load
//! balancer's address. Also tests which of its addresses identifies a client.

use std::net::IpAddr;

use anyhow::{Context as _, Result, ensure};
use tunnel_common::{addr::Address, affinity::Client, select, service::IndexRange};
use tunnel_tests::{
    admin,
    manifest::Service,
    node::Node,
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    shared_fixture::SharedFixture,
    wait,
};

use crate::{
    fixture::{Scene, WEB},
    service_addresses::{BALANCER, EXTERNAL, LOOPBACK},
    support::{
        CHANGE_TIMEOUT, DNS, Dialer, HOST, HTTP, Vip, count_during, ensure_eq, errno,
        expect_refusal, query, query_to, unreachable_errors,
    },
};

/// Additional addresses of a pod or of the host.
const SECOND: Vip = Vip::of(220);
const REFUSED: &str = "source_range_denied";

static SCENE: SharedFixture<Scene> = SharedFixture::new(|| Scene::started(&BACKENDS));
const BACKENDS: [&str; 3] = ["one", "two", "three"];

/// Builds a Service of type LoadBalancer whose source ranges contain only the given addresses; without
/// addresses, it has no source ranges.
fn open_to(scene: &Scene, addresses: &[IpAddr]) -> Service {
    let ranges = addresses.iter().map(|ip| {
        let length = if ip.is_ipv4() { 32 } else { 128 };
        format!("\"{ip}/{length}\"")
    });
    let ranges = ranges.collect::<Vec<_>>().join(", ");
    WEB.service("web")
        .of_type("LoadBalancer")
        .spec(&format!("externalIPs: [{}]", EXTERNAL.yaml_list()))
        .spec(&format!("loadBalancerSourceRanges: [{ranges}]"))
        .load_balancer(&BALANCER.yaml_ingress())
        .backends(scene.all_addresses())
}

/// Asserts that TCP and UDP clients in a sandbox get replies from the VIP, with every dialer.
fn expect_admitted(sandbox: &Sandbox, vip: Vip) -> Result<()> {
    for dialer in Dialer::TCP {
        dialer
            .dial(sandbox, vip, HTTP)
            .with_context(|| format!("TCP, {dialer:?}"))?;
    }
    for dialer in Dialer::UDP {
        let socket = dialer.udp_socket(sandbox)?;
        let (_, from) = query_to(&socket, dialer.address(vip, DNS))
            .with_context(|| format!("UDP, {dialer:?}"))?;
        ensure_eq("sender", from, dialer.reported_address(vip, DNS))?;
        let socket = dialer.connect_udp(sandbox, vip, DNS)?;
        query(&socket).with_context(|| format!("connected UDP, {dialer:?}"))?;
    }
    Ok(())
}

/// Asserts that every connection and datagram to the VIP is refused as unreachable, and that each refusal is
/// counted.
fn expect_denied(node: &Node, sandbox: &Sandbox, vip: Vip) -> Result<()> {
    let (tcp, udp) = unreachable_errors()?;
    for dialer in Dialer::TCP {
        expect_refusal(node, REFUSED, tcp, || dialer.connect(sandbox, vip, HTTP))
            .with_context(|| format!("TCP, {dialer:?}"))?;
    }
    for dialer in Dialer::UDP {
        let (socket, to) = (dialer.udp_socket(sandbox)?, dialer.address(vip, DNS));
        expect_refusal(node, REFUSED, udp, || socket.connect(to))
            .and_then(|()| expect_refusal(node, REFUSED, udp, || socket.send_to(b"who?", to)))
            .with_context(|| format!("UDP, {dialer:?}"))?;
    }
    Ok(())
}

#[test]
fn only_pods_in_the_ranges_reach_the_address_of_a_load_balancer() -> Result<()> {
    let scene = Scene::started(&BACKENDS)?;
    let (node, inside) = (&scene.node, &scene.client);
    let outside = &node.pod("outside")?;
    scene.program(open_to(&scene, &[inside.v4(), inside.v6()]))?;

    // Neither pod has made any connection so far.
    expect_denied(node, outside, BALANCER)?;
    expect_admitted(inside, BALANCER)?;
    expect_denied(node, node.host(), BALANCER).context("from the host")?;
    // The Service's other addresses are open to all clients.
    for sandbox in [&***inside, &***outside, node.host()] {
        expect_admitted(sandbox, WEB)?;
        expect_admitted(sandbox, EXTERNAL)?;
    }
    Ok(())
}

#[test]
fn the_host_reaches_a_load_balancer_if_its_address_is_in_the_ranges() -> Result<()> {
    let scene = SCENE.lease()?;
    let node = &scene.node;
    scene.program(open_to(&scene, &HOST.ips()))?;

    expect_admitted(node.host(), BALANCER)?;
    expect_denied(node, &scene.client, BALANCER)?;
    // A socket that is bound to another of the host's addresses counts as a different client.
    SECOND.add_to(node.host(), "uplink")?;
    let (tcp, _) = unreachable_errors()?;
    for dialer in [Dialer::V4, Dialer::V6] {
        let own = dialer.address(SECOND, 0);
        let socket = dialer.tcp_socket(node.host())?;
        socket.bind(&own.into())?;
        let connected = connect_within(&socket, dialer.address(BALANCER, HTTP), RESPONSE_TIMEOUT);
        ensure_eq("error", errno(connected), tcp).with_context(|| format!("from {own}"))?;
    }
    SECOND.delete_from(node.host(), "uplink")?;
    // A loopback address does not identify a client: the connection is permitted, but has no route.
    for dialer in [Dialer::V4, Dialer::V6] {
        let socket = dialer.tcp_socket(node.host())?;
        socket.bind(&dialer.address(LOOPBACK, 0).into())?;
        socket.set_nonblocking(true)?;
        let connect = || Ok(socket.connect(&dialer.address(BALANCER, HTTP).into()));
        let (connected, increases) = count_during(node, &[REFUSED, "translated"], connect)?;
        ensure!(connected.is_err());
        ensure_eq("counted", increases, vec![0, 1])?;
    }
    scene.give_back()
}

#[test]
fn the_source_of_a_bound_socket_is_its_bound_address() -> Result<()> {
    let scene = SCENE.lease()?;
    let node = &scene.node;
    let pod = &node.pod("bound")?;
    SECOND.add_to(pod, "lo")?;
    scene.program(open_to(&scene, &SECOND.ips()))?;

    expect_denied(node, pod, BALANCER)?;
    for dialer in Dialer::TCP {
        let own = dialer.address(SECOND, 0);
        // The connection is permitted but never established, since the node has no route to the pod's
        // additional addresses.
        let socket = dialer.tcp_socket(pod)?;
        socket.bind(&own.into())?;
        socket.set_nonblocking(true)?;
        let connect = || Ok(socket.connect(&dialer.address(BALANCER, HTTP).into()));
        let (connected, increases) = count_during(node, &[REFUSED, "translated"], connect)?;
        let failed = errno(connected);
        ensure_eq("counted", increases, vec![0, 1])
            .with_context(|| format!("from {own}: {failed}"))?;
    }
    scene.give_back()
}

#[test]
fn source_ranges_are_added_changed_and_removed_while_the_daemon_runs() -> Result<()> {
    let scene = SCENE.lease()?;
    let node = &scene.node;
    let (inside, outside) = (&scene.client, &node.pod("outside")?);
    scene.program(open_to(&scene, &[]))?;
    expect_admitted(inside, BALANCER)?;

    let is = |sandbox: &Sandbox, admitted: bool| {
        let connect = |dialer: Dialer| dialer.connect(sandbox, BALANCER, HTTP);
        [Dialer::V4, Dialer::V6]
            .into_iter()
            .all(|dialer| connect(dialer).is_ok() == admitted)
    };
    let becomes = |text: &str, admitted: [bool; 2]| {
        let is_so = || is(inside, admitted[0]) && is(outside, admitted[1]);
        wait::until(CHANGE_TIMEOUT, is_so).context(text.to_owned())
    };
    node.apply(open_to(&scene, &[inside.v4(), inside.v6()]))?;
    becomes("ranges come", [true, false])?;
    node.apply(open_to(&scene, &[outside.v4(), outside.v6()]))?;
    becomes("ranges change", [false, true])?;

    // The next daemon adopts the entries, and its audit finds no differences.
    node.kill9()?;
    becomes("without a daemon", [false, true])?;
    node.start()?;
    becomes("after a restart", [false, true])?;
    let drift = admin::metric(&node.metrics()?, "culvert_map_drift_total{map=\"all\"}");
    ensure_eq("drift", drift, Some(0))?;

    node.apply(open_to(&scene, &[]))?;
    becomes("ranges go", [true, true])?;
    scene.give_back()
}

#[test]
fn a_client_is_identified_by_its_address() -> Result<()> {
    let scene = Scene::started(&BACKENDS)?;
    let node = &scene.node;
    let hashed = open_to(&scene, &[]).annotated("culvert.dev/algorithm", "source-hash");
    scene.program(hashed)?;
    // An additional address does not change the address that identifies a client.
    for (sandbox, device, v4, v6) in [
        (node.host(), "uplink", "192.0.2.77", "2001:db8:77::77"),
        (&**scene.client, "eth0", "10.1.77.77", "fd00:10:1:77::77"),
    ] {
        sandbox.ip(&format!(
            "addr add {v4}/32 dev {device}\naddr add {v6}/128 dev {device} nodad\n"
        ))?;
    }

    for (who, sandbox) in scene.sandboxes() {
        for dialer in Dialer::TCP {
            let own = match (who, dialer) {
                ("host", Dialer::V6) => HOST.v6.into(),
                ("host", _) => HOST.v4.into(),
                _ => scene.client.address(dialer.family()),
            };
            // The hash depends only on the client's address, not on the node or on previously created pods.
            let client = Client::of_address(Address::from_ip(own));
            let set = IndexRange { base: 0, len: 3 };
            let place_in_set = select::offset_in(set, select::hash(client.words()));
            let mut targets = scene.all_addresses();
            targets.retain(|ip| ip.is_ipv4() == own.is_ipv4());
            targets.sort_unstable();
            let expected = place_in_set.and_then(|at| targets.get(usize::try_from(at).ok()?));
            let name = dialer.dial(sandbox, BALANCER, HTTP)?;
            let pod = scene.backend(&name)?;
            let seen = pod.address(dialer.family());
            ensure_eq("backend", Some(&seen), expected)
                .with_context(|| format!("{dialer:?} from the {who}, {own}"))?;
        }
    }
    Ok(())
}
