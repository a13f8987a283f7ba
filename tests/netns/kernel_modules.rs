//! Tests that need kernel modules that not every kernel has: SCTP, dummy interfaces and IPVS.

use std::net::SocketAddr;

use anyhow::{Context as _, Result, ensure};
use socket2::{Domain, Protocol as Transport, Socket, Type};
use tunnel_tests::{
    feature::{self, Feature},
    ipvs::{self, Ipvs},
    manifest::Protocol,
    sandbox::{RESPONSE_TIMEOUT, Sandbox, connect_within},
    test_name, wait,
};

use crate::{
    fixture::{Scene, WEB},
    guard::daemon::{FOLLOW_TIMEOUT, guards, network_status, steering_node},
    support::{
        Dialer, HOST, HTTP, HTTP_TARGET, count_during, ensure_eq, http_server_name, run, serve,
    },
    untranslated::SERVICE_REASONS,
};

const SIGNAL: u16 = 3868;

/// Starts a node with the Service `web`, which also has an SCTP port.
fn start_web_with_sctp() -> Result<Scene> {
    let scene = Scene::new(&["backend"])?;
    let service = WEB.service("web").port(Protocol::SCTP, SIGNAL, SIGNAL);
    scene.start([service.backends(scene.all_addresses())])?;
    Ok(scene)
}

fn sctp(sandbox: &Sandbox, to: SocketAddr) -> Result<Socket> {
    let domain = Domain::for_address(to);
    let socket = sandbox.socket_with_protocol(domain, Type::STREAM, Transport::SCTP)?;
    socket.set_read_timeout(Some(RESPONSE_TIMEOUT))?;
    Ok(socket)
}

/// The kernel has no hook for connect() on an SCTP socket, so the packets keep the ClusterIP as their
/// destination and are routed normally. In this test, an external host has that address. In a real cluster,
/// no host has it, and the client gets an error from the network, usually a timeout after several minutes.
#[test]
fn an_sctp_connect_of_a_pod_goes_to_the_cluster_ip_itself_and_tcp_is_served() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Sctp])? {
        return Ok(());
    }
    let scene = start_web_with_sctp()?;
    let outside = scene.node.outside();
    let (v4, v6) = (WEB.v4, WEB.v6);
    WEB.add_to(outside, "lo")?;
    scene.node.host().ip(&format!(
        "route add {v4} via 192.0.2.2\nroute add {v6} via 2001:db8::2\n"
    ))?;
    scene.client.ip(&format!(
        "route add {v4} via 169.254.1.1\nroute add {v6} via fe80::1 dev eth0\n"
    ))?;

    for vip in WEB.ips() {
        let vip = SocketAddr::from((vip, SIGNAL));
        let listener = sctp(outside, vip)?;
        listener.bind(&vip.into())?;
        listener.listen(8)?;
        let (what, sandbox) = (vip.to_string(), &*scene.client);
        let (socket, increases) = count_during(&scene.node, &SERVICE_REASONS, || {
            let socket = sctp(sandbox, vip)?;
            connect_within(&socket, vip, RESPONSE_TIMEOUT).context(what.clone())?;
            Ok(socket)
        })?;
        ensure_eq(&what, increases, vec![0; SERVICE_REASONS.len()])?;
        ensure_eq(&what, socket.peer_addr()?.as_socket(), Some(vip))?;
        let (accepted, _peer) = listener.accept()?;
        ensure_eq(&what, accepted.local_addr()?.as_socket(), Some(vip))?;
    }
    scene.expect_served(WEB, "backend")
}

#[test]
fn a_dummy_link_with_a_default_route_is_guarded_until_it_is_deleted() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Dummy])? {
        return Ok(());
    }
    for (address, gateway) in [
        ("203.0.113.2/24", "203.0.113.1"),
        ("2001:db8:203::2/64", "2001:db8:203::1"),
    ] {
        guard_a_dummy(address, gateway).context(address)?;
    }
    Ok(())
}

fn guard_a_dummy(address: &str, gateway: &str) -> Result<()> {
    let node = steering_node(str::to_owned)?;
    node.start()?;
    let has = |name: &str| {
        network_status(&node).is_ok_and(|view| {
            let uplinks = view["uplinks"].as_array().cloned();
            uplinks.unwrap_or_default().iter().any(|it| it == name)
        })
    };
    let guards = || guards(&node);
    ensure_eq("guards at first", guards()?, 1)?;

    let host = node.host();
    run(host, "ip link add cloud type dummy")?;
    host.ip(&format!(
        "link set cloud up\naddr add {address} dev cloud\n"
    ))?;
    let route = format!("ip route add default via {gateway} dev cloud metric 5");
    run(host, &route)?;

    wait::until(FOLLOW_TIMEOUT, || has("cloud"))
        .context("the dummy interface does not become an uplink")?;
    ensure_eq("guards with the dummy", guards()?, 2)?;
    if !feature::is_supported(Feature::Tcx)? {
        let filters = run(host, "tc filter show dev cloud ingress")?;
        ensure!(filters.contains("guard direct-action"), "{filters}");
    }

    run(host, "ip link del cloud")?;
    wait::until(FOLLOW_TIMEOUT, || !has("cloud"))
        .context("the removed dummy interface is still an uplink")?;
    wait::until(FOLLOW_TIMEOUT, || guards().is_ok_and(|guards| guards == 1)).with_context(
        || {
            format!(
                "the guard of the removed interface is still pinned: {:?}",
                network_status(&node)
            )
        },
    )?;
    ensure!(has("uplink"), "{}", network_status(&node)?);
    Ok(())
}

/// kube-proxy in IPVS mode leaves its virtual services behind, as well as an interface that has the
/// ClusterIPs. Connections that Culvert translates at the socket never reach IPVS.
#[test]
fn ipvs_for_the_same_cluster_ip_gets_no_connection_of_host_or_pods() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::IpVs])? {
        return Ok(());
    }
    let scene = start_web_with_sctp()?;
    let node = &scene.node;
    let decoy = node.pod("decoy")?;
    let _decoy_server = serve(&decoy)?;
    let host = node.host();
    WEB.add_to(host, "lo")?;
    let table = Ipvs::open(host)?;
    let foreign = node.network().share_namespace(host, "foreign", None)?;

    for (dialer, own) in [Dialer::V4, Dialer::V6].into_iter().zip(HOST.ips()) {
        let vip = dialer.address(WEB, HTTP);
        table.add(vip, (decoy.address(dialer.family()), HTTP_TARGET).into())?;

        // IPVS works: it forwards a connection from a process outside the instance's cgroup.
        let socket = dialer.tcp_socket(&foreign)?;
        socket.bind(&SocketAddr::from((own, 0)).into())?;
        connect_within(&socket, vip, RESPONSE_TIMEOUT).context("by IPVS")?;
        ensure_eq("by IPVS", http_server_name(socket.into())?, "decoy")?;
        let before = ipvs::connections(host)?;
        ensure!(before > 0, "IPVS lists no connection");

        let held = dialer.connect(host, WEB, HTTP)?;
        scene.expect_served(WEB, "backend")?;
        ensure_eq("connections", ipvs::connections(host)?, before)?;

        table.remove(vip)?;
        scene.expect_served(WEB, "backend")?;
        ensure_eq("held", http_server_name(held)?, "backend")?;
    }
    Ok(())
}
