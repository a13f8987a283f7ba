//! Tests the lab's edge node: it can dial the cloud, the cloud can't dial it, and its link can be cut.

use std::{io, net::SocketAddr, sync::Arc};

use anyhow::{Result, ensure};
use tunnel_tests::{
    edge_node::EdgeNode,
    environment,
    fake_kubelet::client::Client,
    node_network::{HOST_V4, HOST_V6, NodeNetwork},
    pki,
    sandbox::Sandbox,
    tunnel_testbed::TunnelTestbed,
};

use crate::sandboxes::expect_no_route;

const PORT: u16 = 10_250;

fn edge_node() -> Result<(NodeNetwork, EdgeNode)> {
    let network = NodeNetwork::new()?;
    let edge = EdgeNode::new(&network, environment::culvert_lab()?)?;
    Ok((network, edge))
}

fn check_dial(edge: &EdgeNode, host: &Sandbox, at: SocketAddr) -> Result<()> {
    let listener = host.listen(at)?;
    let stream = edge.sandbox().connect(at)?;
    let (_, peer) = listener.accept()?;
    let local = stream.local_addr()?;
    ensure!(local == peer, "the host sees {peer} instead of {local}");
    Ok(())
}

#[test]
fn the_edge_dials_the_cloud_and_the_cloud_cannot_dial_the_edge() -> Result<()> {
    let (network, edge) = edge_node()?;
    let pod = network.pod("pod")?;
    let _server = edge.serve_kubelet(&[PORT])?;

    check_dial(&edge, network.host(), (HOST_V4, 10_262).into())?;
    check_dial(&edge, network.host(), (HOST_V6, 10_262).into())?;

    for sandbox in [network.host(), &*pod, network.outside()] {
        expect_no_route(sandbox, TunnelTestbed::addr_v4(PORT));
        expect_no_route(sandbox, TunnelTestbed::addr_v6(PORT));
    }
    Ok(())
}

#[test]
fn the_kubelet_on_the_edge_proves_the_addresses_of_its_node() -> Result<()> {
    let (_network, edge) = edge_node()?;
    let server = edge.serve_kubelet(&[PORT])?;
    let tls = pki::client_config(&edge.kubelet_files().ca)?;

    for address in [TunnelTestbed::addr_v4(PORT), TunnelTestbed::addr_v6(PORT)] {
        let stream = edge.sandbox().connect(address)?;
        let mut client = Client::handshake(stream, address.ip(), Arc::clone(&tls))?;
        client.healthz()?;
        ensure!(client.subject().contains("system:node:edge-7"));
    }

    let exchanges = server.record()?.exchanges;
    ensure!(exchanges.len() == 2, "{exchanges:?}");
    ensure!(exchanges[0].steps[0] == "GET /healthz", "{exchanges:?}");
    Ok(())
}

#[test]
fn a_cut_link_drops_packets_silently_until_it_is_restored() -> Result<()> {
    let (network, edge) = edge_node()?;
    let at = SocketAddr::from((HOST_V4, 10_262));

    edge.cut_link()?;
    let error = check_dial(&edge, network.host(), at).expect_err("cut");
    let late = error.downcast_ref::<io::Error>().map(io::Error::kind);
    ensure!(late == Some(io::ErrorKind::TimedOut), "{error:#}");
    edge.restore_link()?;

    check_dial(&edge, network.host(), at)
}
