//! An unprivileged user listens on a Service's address that is assigned to the node, and a Service claims an
//! address of the node at which a process of the node listens.

use std::{io, net::SocketAddr};

use anyhow::{Result, ensure};
use socket2::{Domain, Type};
use tunnel_tests::{culvert_instance, manifest::NodeObject};

use crate::{
    fixture::Scene,
    local_listeners::{
        CACHED, NAME, NodeLocalCache, TestListeners, expect_backend, prepared, until_listener,
    },
    service_addresses::{BALANCER, EXTERNAL, NODE_HTTP, configured, expect_all_answer, service},
    support::{DNS, Dialer, HOST, HTTP, ensure_eq, ports, until_eq},
};

/// A user without privileges.
const USER: u32 = 1000;

/// A port that the node's own services use, and no Service.
const SSH: u16 = 22;

/// Waits until the status names the user whose listener is ignored, for every frontend or for none of them.
fn until_ignored(scene: &Scene, user: Option<u32>) -> Result<()> {
    until_eq("users of ignored listeners", vec![user; 4], || {
        let ports = ports(&scene.node.services()?, NAME);
        let frontends = ports.iter().filter_map(|port| port["frontends"].as_array());
        let users = frontends.flatten().map(|frontend| {
            let user = frontend["ignoredListenerUser"].as_u64()?;
            u32::try_from(user).ok()
        });
        Ok(users.collect::<Vec<_>>())
    })
}

#[test]
fn a_listener_of_an_unprivileged_user_takes_no_service_over() -> Result<()> {
    let scene = prepared("")?;
    let host = scene.node.host();
    scene.node.start()?;
    expect_backend(&scene)?;

    let attacker = NodeLocalCache::of_user(host, USER)?;
    until_ignored(&scene, Some(USER))?;
    expect_backend(&scene)?;
    until_listener(&scene, false)?;
    let shown = scene.node.culvert(&["services", NAME])?.stdout;
    ensure!(
        shown.contains("; local listener of user 1000 ignored"),
        "{shown}"
    );
    ensure_eq("counted", scene.node.reason_count("listener_ignored")?, 4)?;
    let logged = scene.node.logs();
    ensure_eq(
        "logged",
        logged.matches("local listener ignored").count(),
        4,
    )?;
    ensure!(logged.contains("user=1000"), "{logged}");

    // The same listener is ignored from the first write after a restart.
    scene.node.stop()?;
    scene.node.start()?;
    expect_backend(&scene)?;
    until_ignored(&scene, Some(USER))?;

    // Root's listener takes the Service over.
    drop(attacker);
    until_ignored(&scene, None)?;
    let cache = NodeLocalCache::on(host)?;
    until_listener(&scene, true)?;
    cache.expect_all_traffic(&scene)
}

#[test]
fn a_listener_of_a_configured_user_takes_the_service_over() -> Result<()> {
    let scene = prepared("localListeners: [1000]")?;
    let host = scene.node.host();
    scene.node.start()?;

    let roots = NodeLocalCache::on(host)?;
    until_ignored(&scene, Some(0))?;
    expect_backend(&scene)?;
    drop(roots);

    let cache = NodeLocalCache::of_user(host, USER)?;
    until_listener(&scene, true)?;
    cache.expect_all_traffic(&scene)
}

/// Returns how many of the Service's frontends have a local listener, and how many have one that is ignored.
fn count_listeners(scene: &Scene) -> Result<[usize; 2]> {
    let ports = ports(&scene.node.services()?, NAME);
    let frontends = ports.iter().filter_map(|port| port["frontends"].as_array());
    let frontends: Vec<_> = frontends.flatten().collect();
    let count = |is_counted: fn(&serde_json::Value) -> bool| {
        frontends.iter().filter(|it| is_counted(it)).count()
    };
    Ok([
        count(|it| it["localListener"] == true),
        count(|it| it["ignoredListenerUser"] == USER),
    ])
}

#[test]
fn a_socket_that_shares_the_address_of_roots_listener_gets_no_datagrams() -> Result<()> {
    let scene = prepared("")?;
    let host = scene.node.host();
    scene.node.start()?;
    let bind = |user| {
        CACHED.ips().map(|ip| {
            let domain = Domain::for_address((ip, DNS).into());
            let socket = host.socket_of_user(domain, Type::DGRAM, user)?;
            socket.set_reuse_address(true)?;
            socket.bind(&SocketAddr::from((ip, DNS)).into())?;
            io::Result::Ok(socket)
        })
    };
    let _roots = bind(0);
    until_eq("listeners of root", [2, 0], || count_listeners(&scene))?;

    let users = bind(USER);
    until_eq("listeners", [0, 2], || count_listeners(&scene))?;
    expect_backend(&scene)?;
    drop(users);
    until_eq("listeners of root", [2, 0], || count_listeners(&scene))
}

/// Returns the addresses of a Service's frontends, without those of node ports.
fn frontends(scene: &Scene) -> Result<Vec<String>> {
    let ports = ports(&scene.node.services()?, "web");
    let frontends = ports.iter().filter_map(|port| port["frontends"].as_array());
    let is_node_port = |frontend: &serde_json::Value| frontend["type"] == "NodePort";
    let frontends = frontends.flatten().filter(|it| !is_node_port(it));
    let text = frontends.map(|it| it["frontend"].as_str().unwrap_or_default().to_owned());
    Ok(text.collect())
}

#[test]
fn a_service_takes_over_no_address_of_the_node() -> Result<()> {
    let scene = configured("")?;
    let host = scene.node.host();
    // The tenant's Service claims the addresses of the node, and one that the node has for itself.
    let claimed = service()
        .spec(&format!(
            "externalIPs: [{}, {}, 127.0.0.1, \"fe80::1\"]",
            EXTERNAL.yaml_list(),
            HOST.yaml_list()
        ))
        .load_balancer(&BALANCER.yaml_ingress())
        .backends(scene.all_addresses());
    let ssh = TestListeners::at(host, HOST.ips(), [HTTP, DNS])?;
    scene.start([claimed])?;

    scene.for_each_client(&Dialer::TCP, |sandbox, dialer| {
        let stream = dialer.connect(sandbox, HOST, HTTP)?;
        let from = ssh.accept(dialer)?;
        ensure_eq("port", from.port(), stream.local_addr()?.port())
    })?;
    for (_, sandbox) in scene.sandboxes() {
        for vip in [BALANCER, EXTERNAL] {
            expect_all_answer(sandbox, vip, [HTTP, DNS])?;
        }
        for dialer in Dialer::TCP {
            dialer.expect_served(sandbox, HOST, NODE_HTTP, "backend")?;
        }
    }
    let shown = scene.node.culvert(&["services", "web"])?.stdout;
    let reason = format!("(service.nodeAddresses): {}", HOST.v4);
    ensure!(shown.contains(&reason), "{shown}");
    let logs = scene.node.logs();
    let ignored = "field=\"spec.externalIPs[4]\" reason=\"127.0.0.1 is a loopback address";
    ensure!(logs.contains(ignored), "{logs}");

    // The node gets other external IPs while the daemon is running, and loses them again.
    let before = frontends(&scene)?;
    EXTERNAL.add_to(host, "lo")?;
    let own = TestListeners::at(host, EXTERNAL.ips(), [HTTP, DNS])?;
    until_eq("frontends at the external IPs", 0, || {
        let external = EXTERNAL.ips().map(|ip| ip.to_string());
        let frontends = frontends(&scene)?.into_iter();
        let is_at = |it: &String| external.iter().any(|ip| it.contains(ip));
        Ok(frontends.filter(is_at).count())
    })?;
    // Pods have no route to these addresses.
    for dialer in Dialer::TCP {
        let stream = dialer.connect(host, EXTERNAL, HTTP)?;
        ensure_eq(
            "port",
            own.accept(dialer)?.port(),
            stream.local_addr()?.port(),
        )?;
    }
    EXTERNAL.delete_from(host, "lo")?;
    until_eq("frontends", before, || frontends(&scene))
}

#[test]
fn an_address_that_a_load_balancer_gives_to_the_node_is_served_at_the_service_ports_only()
-> Result<()> {
    let scene = configured("")?;
    let host = scene.node.host();
    scene
        .node
        .apply(NodeObject::new(culvert_instance::NODE_NAME, HOST.ips()))?;
    // The status of the Service also contains the addresses in the Node object.
    let ingress = format!("{}, {}", BALANCER.yaml_ingress(), HOST.yaml_ingress());
    BALANCER.add_to(host, "lo")?;
    let ssh = TestListeners::at(host, BALANCER.ips(), [SSH, SSH])?;
    let kubelet = TestListeners::at(host, HOST.ips(), [HTTP, DNS])?;
    let balanced = service().load_balancer(&ingress);
    scene.start([balanced.backends(scene.all_addresses())])?;

    for (_, sandbox) in scene.sandboxes() {
        expect_all_answer(sandbox, BALANCER, [HTTP, DNS])?;
    }
    for dialer in Dialer::TCP {
        for (at, port, own) in [(BALANCER, SSH, &ssh), (HOST, HTTP, &kubelet)] {
            let stream = dialer.connect(host, at, port)?;
            let from = own.accept(dialer)?;
            ensure_eq("port", from.port(), stream.local_addr()?.port())?;
        }
    }
    let shown = scene.node.culvert(&["services", "web"])?.stdout;
    let reason = format!("(service.nodeAddresses): {}\n", HOST.v4);
    ensure!(shown.contains(&reason), "{shown}");
    Ok(())
}
