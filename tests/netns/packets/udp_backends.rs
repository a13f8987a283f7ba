//! A UDP client outside leaves a backend that is replaced, scaled to zero or deleted with its next datagram.

use std::{io, net::UdpSocket};

use anyhow::{Context as _, Result, ensure};
use tunnel_tests::wait;

use super::{ENABLED, REMOTE, remote_server, route_to_node, serve_in, service};
use crate::{
    fixture::Scene,
    service_addresses::{NODE_DNS, configured},
    support::{CHANGE_TIMEOUT, Dialer, HOST, ensure_eq, ports, query, until_backends, until_gone},
};

/// Waits until the Service has exactly the given backends.
fn until_only(scene: &Scene, ips: &[std::net::IpAddr]) -> Result<()> {
    wait::until(CHANGE_TIMEOUT, || {
        let services = scene.node.services().unwrap_or_default();
        let text = serde_json::to_string(&ports(&services, "web")).unwrap_or_default();
        let has = |ip: &std::net::IpAddr| {
            text.contains(&format!("\"{ip}\""))
                || text.contains(&format!("{ip}:"))
                || text.contains(&format!("[{ip}]"))
        };
        ips.iter().all(has) && !REMOTE.ips().iter().any(has)
    })
    .context("the backend is not replaced")
}

#[test]
#[ignore = "independent of the kernel: a decision, of which `reachability` runs every part"]
fn a_client_leaves_a_backend_that_is_gone_with_its_next_datagram() -> Result<()> {
    let scene = configured(ENABLED)?;
    let node = &scene.node;
    route_to_node(&scene)?;
    let _remote = remote_server(&scene, "first")?;
    let pod = node.pod("second")?;
    let _second = serve_in(&scene, &pod, "second")?;
    node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    let clients =
        || [Dialer::V4, Dialer::V6].map(|it| it.connect_udp(node.outside(), HOST, NODE_DNS));
    let clients: Vec<UdpSocket> = clients().into_iter().collect::<io::Result<_>>()?;
    let expect = |server: &str| -> Result<()> {
        for client in &clients {
            ensure_eq("server", &*query(client)?, server)?;
        }
        Ok(())
    };
    let expect_refused = |when: &str| -> Result<()> {
        for client in &clients {
            client.send(b"who?")?;
            let error = client.recv(&mut [0; 16]).err();
            let error = error.with_context(|| format!("an answer, {when}"))?.kind();
            ensure_eq(when, error, io::ErrorKind::ConnectionRefused)?;
        }
        Ok(())
    };
    expect("first")?;

    let ips = [pod.v4(), pod.v6()];
    node.apply(service("Cluster").backends(ips))?;
    until_only(&scene, &ips)?;
    expect("second").context("after the backend was replaced")?;
    for (family, reason) in [
        ("IPv4", "datagrams_moved_v4"),
        ("IPv6", "datagrams_moved_v6"),
    ] {
        ensure_eq(family, node.reason_count(reason)?, 1)?;
    }

    node.apply(service("Cluster"))?;
    until_backends(node, "web", 0)?;
    expect_refused("without endpoints")?;

    node.apply(service("Cluster").backends(ips))?;
    until_backends(node, "web", 1)?;
    expect("second").context("with endpoints again")?;

    node.delete("web.yaml")?;
    until_gone(node, "web")?;
    expect_refused("without a Service")?;
    ensure!(node.reason_count("no_backend")? >= 2, "not counted");
    Ok(())
}
