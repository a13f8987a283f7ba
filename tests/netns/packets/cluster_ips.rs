//! Packets from outside to cluster IPs: other ports than those of the Service are refused, and addresses of a ServiceCIDR
//! that are allocated to no Service are silent, as with kube-proxy's nftables mode.

use std::{io, time::Duration};

use anyhow::{Context as _, Result, ensure};
use tokio::time::Instant;
use tunnel_tests::{load_scale::LoadScale, manifest::Manifest, wait};

use super::{ENABLED, REMOTE, refusals::error_of_datagram, remote_server, route_to_node, service};
use crate::{
    fixture::{EMPTY, Scene, WEB},
    service_addresses::configured,
    support::{CHANGE_TIMEOUT, Dialer, HOST, HTTP, Vip, ensure_eq},
};

/// A port that no Service has.
const UNUSED_PORT: u16 = 81;
/// An address that no Service has, and one of the node's own, in the ServiceCIDR.
const UNALLOCATED: Vip = Vip::of(200);
const OWN: Vip = Vip::of(201);
const CIDR_FILE: &str = "cidr.yaml";

/// Returns a ServiceCIDR with the ranges of all cluster IPs.
fn service_cidr() -> Manifest {
    let text = "apiVersion: networking.k8s.io/v1\n\
                kind: ServiceCIDR\n\
                metadata: { name: kubernetes }\n\
                spec: { cidrs: [10.96.0.0/24, \"fd00:10:96::/112\"] }\n";
    Manifest::from((CIDR_FILE, text))
}

/// Starts a node with a Service, and routes all addresses of the ServiceCIDR from outside to it.
fn start() -> Result<Scene> {
    let scene = configured(ENABLED)?;
    route_to_node(&scene)?;
    let Vip { v4, v6 } = HOST;
    scene.node.outside().ip(&format!(
        "route add 10.96.0.0/24 via {v4}\nroute add fd00:10:96::/112 via {v6}\n"
    ))?;
    let Vip { v4, v6 } = OWN;
    let addresses = format!("addr add {v4}/32 dev lo\naddr add {v6}/128 dev lo\n");
    scene.node.host().ip(&addresses)?;
    Ok(scene)
}

/// Connects to an address and sends a datagram to it, and returns the kinds of the errors, and the time until then.
fn errors(scene: &Scene, dialer: Dialer, to: Vip) -> Result<([io::ErrorKind; 2], Duration)> {
    let client = scene.node.outside();
    let started = Instant::now();
    let tcp = dialer.tcp_socket(client)?;
    let address = dialer.address(to, UNUSED_PORT);
    let connected = tcp.connect_timeout(&address.into(), Duration::from_millis(300));
    let socket = dialer.udp_socket(client)?;
    socket.connect(address)?;
    socket.set_read_timeout(Some(Duration::from_millis(300)))?;
    let error = error_of_datagram(&socket)?;
    let connected = connected.expect_err("no listener").kind();
    Ok(([connected, error.kind()], started.elapsed()))
}

#[test]
fn unused_ports_of_cluster_ips_refuse_and_unallocated_addresses_are_silent() -> Result<()> {
    const REFUSED: [io::ErrorKind; 2] = [io::ErrorKind::ConnectionRefused; 2];
    const SILENT: [io::ErrorKind; 2] = [io::ErrorKind::TimedOut, io::ErrorKind::WouldBlock];
    let scene = start()?;
    let (_remote, _server) = remote_server(&scene, "backend")?;
    let node = &scene.node;
    let limit = LoadScale::from_environment().timeout(Duration::from_millis(100));
    node.apply(service_cidr())?;
    node.start()?;
    scene.program(service("Cluster").backends(REMOTE.ips()))?;
    let expect = |when: &str| -> Result<()> {
        for dialer in [Dialer::V4, Dialer::V6] {
            let what = || format!("{when}, {dialer:?}");
            let (found, took) = errors(&scene, dialer, WEB).with_context(what)?;
            ensure_eq("an unused port", found, REFUSED).with_context(what)?;
            ensure!(took < limit, "{took:?}");
            let (found, _) = errors(&scene, dialer, UNALLOCATED).with_context(what)?;
            ensure_eq("an unallocated address", found, SILENT).with_context(what)?;
            // The host itself refuses.
            let (found, _) = errors(&scene, dialer, OWN).with_context(what)?;
            ensure_eq("an address of the node", found, REFUSED).with_context(what)?;
            dialer.expect_served(node.outside(), WEB, HTTP, "backend")?;
        }
        Ok(())
    };
    expect("at first")?;
    ensure_eq("refused", node.reason_count("cluster_port_unused")?, 4)?;
    ensure!(node.reason_count("cluster_ip_unallocated")? >= 4);

    node.kill9()?;
    expect("with the daemon dead")?;
    node.start()?;
    expect("with another daemon")?;

    // The deleted Service's address is unallocated.
    node.delete(&Manifest::from(service("Cluster")).file)?;
    let is_silent = || errors(&scene, Dialer::V4, WEB).is_ok_and(|(found, _)| found == SILENT);
    wait::until(CHANGE_TIMEOUT, is_silent).context("the address of a deleted Service")?;

    // Without the ServiceCIDR, the packets are left alone.
    node.delete(CIDR_FILE)?;
    let dropped = || {
        node.reason_count("cluster_ip_unallocated")
            .unwrap_or_default()
    };
    let is_left_alone = || {
        let before = dropped();
        errors(&scene, Dialer::V6, EMPTY).is_ok() && dropped() == before
    };
    wait::until(CHANGE_TIMEOUT, is_left_alone).context("without the ServiceCIDR")
}
