//! Variants in which nftables or iptables rules like kube-proxy's translate the connects of a pod. The rules
//! hook into nat OUTPUT, as they do on a node for the node's own connects.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use socket2::{Domain, Type};
use tunnel_tests::{
    place::{ANSWER, connect_within},
    pod::Pod,
    topology::Topology,
};

use super::{PORT, TARGET, USED, Variant};
use crate::{
    rules::{Shape, iptables, nft},
    services::FIRST,
};

/// The kind of rules to load.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Nft,
    Iptables,
}

/// Creates a client pod with rules for this many Services. It connects to evenly spaced Services, so with
/// iptables their rules are in the middle of the chain on average.
pub(super) fn by_rules(
    topology: &Topology,
    kind: Kind,
    services: u32,
    endpoints: &[SocketAddr],
) -> Result<Variant> {
    let name = format!("{kind:?}-{services}").to_lowercase();
    let pod = topology.pod(&name)?;
    // Without a route, a connect would fail before its packet reaches nat OUTPUT.
    pod.ip("route add 10.97.0.0/16 via 169.254.1.1 dev eth0\n")?;
    let shape = Shape {
        services,
        port: PORT,
        endpoints: endpoints.to_vec(),
    };
    let (program, loader, text) = match kind {
        Kind::Nft => ("nft", nft::loader(&pod), nft::whole(&shape)),
        Kind::Iptables => {
            let (program, loader) = iptables::loader(&pod)?;
            (program, loader, iptables::whole(&shape))
        }
    };
    loader.load(topology.lab().folder(), &name, &text)?;
    let first = SocketAddr::new(FIRST, PORT);
    let socket = pod.socket(Domain::for_address(first), Type::STREAM)?;
    connect_within(&socket, first, ANSWER)
        .with_context(|| format!("{name}: a connect through the rules reaches no endpoint"))?;
    Ok(Variant {
        name: format!("{services}, {program}"),
        client: topology.beside(&pod, &format!("outside/{name}"), None)?,
        first,
        count: services.min(USED),
        apart: (services / USED).max(1),
        instance: None,
    })
}

/// Adds addresses to the backend; returns the endpoints that all Services share.
pub(super) fn endpoints(topology: &Topology, backend: &Pod) -> Result<Vec<SocketAddr>> {
    let (host, own) = (topology.host(), backend.v4());
    let mut endpoints = vec![backend.at4(TARGET)];
    for last in FURTHER {
        host.ip(&format!("route add 10.1.0.{last}/32 via {own}\n"))?;
        backend.ip(&format!("addr add 10.1.0.{last}/32 dev eth0\n"))?;
        endpoints.push(SocketAddr::from(([10, 1, 0, last], TARGET)));
    }
    Ok(endpoints)
}

/// The last octets of the backend's additional addresses.
const FURTHER: [u8; 3] = [241, 242, 243];
