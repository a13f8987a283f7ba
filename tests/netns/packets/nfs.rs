//! NFS mounts of this host, whose sockets belong to the kernel.

use std::{
    fs,
    net::{Ipv4Addr, Ipv6Addr},
};

use anyhow::{Context as _, Result};
use tunnel_tests::{
    feature::{self, Feature},
    manifest::{Protocol, Service},
    nfs::{Mount, PORT, Server},
    test_name, wait,
};

use super::{CLIENT, ENABLED, REMOTE, errors, host::route_to, pod_elsewhere};
use crate::{
    fixture::WEB,
    service_addresses::configured,
    support::{CHANGE_TIMEOUT, HOST, Vip, ensure_eq},
};

/// The addresses of the servers.
const SERVERS: [Vip; 3] = [
    REMOTE,
    errors::CLIENT,
    Vip {
        v4: Ipv4Addr::new(203, 0, 113, 34),
        v6: Ipv6Addr::new(0x2001, 0xdb8, 0x113, 2, 0, 0, 0, 2),
    },
];

/// Returns the Service, which is excluded from sockets, with one server.
fn nfs(server: Vip) -> Service {
    Service::new("nfs", WEB.ips())
        .port(Protocol::TCP, PORT, PORT)
        .annotated("culvert.dev/socket-translation", "disabled")
        .backends(server.ips())
}

#[test]
fn a_mount_of_a_cluster_ip_survives_its_backend() -> Result<()> {
    if feature::lacks(test_name!(), &[Feature::Nfs])? {
        return Ok(());
    }
    let scene = configured(ENABLED)?;
    let exported = Mount::in_memory()?;
    fs::write(exported.path().join("before"), "before")?;
    let mut servers = Vec::new();
    for (number, address) in SERVERS.into_iter().enumerate() {
        let sandbox = pod_elsewhere(&scene, &format!("server{number}"), address)?;
        let server = Server::start(&sandbox, &exported, &HOST.ips())?;
        servers.push((sandbox, Some(server)));
    }
    scene.node.start()?;
    route_to(&scene, CLIENT)?;
    scene.program(nfs(SERVERS[0]))?;

    // Each mount leaves the server that it began with for the next one.
    for (number, vip) in WEB.ips().into_iter().enumerate() {
        let mounted = Mount::of_server(scene.node.host(), vip)?;
        let file = |name| mounted.path().join(format!("{name}-{number}"));
        let before = fs::read_to_string(mounted.path().join("before"))?;
        ensure_eq("a file", before.as_str(), "before")?;

        let next = SERVERS[number + 1];
        scene.node.apply(nfs(next))?;
        let services = || scene.node.services().unwrap_or_default().to_string();
        wait::until(CHANGE_TIMEOUT, || services().contains(&next.v4.to_string()))?;
        // The connection stays with its backend until that closes it.
        fs::write(file("during"), "during")?;
        drop(servers[number].1.take());
        fs::write(file("after"), "after").context("with the next server")?;
        for name in ["during", "after"] {
            let stored = exported.path().join(format!("{name}-{number}"));
            ensure_eq("a stored file", fs::read_to_string(stored)?.as_str(), name)?;
        }
    }
    Ok(())
}
