//! Connects that rules of kube-proxy's shape translate: in a pod with a network namespace of its
//! own, whose rules stand where those of a node are for the connects of the node itself, in nat
//! OUTPUT.

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

/// What is loaded.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Kind {
    Nft,
    Iptables,
}

/// A client whose connects go by so many Services in rules. The ones that it uses are spread over
/// all, so with iptables they are in the middle of the chain on average.
pub(super) fn by_rules(
    topology: &Topology,
    kind: Kind,
    services: u32,
    endpoints: &[SocketAddr],
) -> Result<Variant> {
    let name = format!("{kind:?}-{services}").to_lowercase();
    let pod = topology.pod(&name)?;
    // A Service's address leads nowhere in a pod; the packet must set out to meet the rules.
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
        .with_context(|| format!("{name}: the rules lead to no endpoint"))?;
    Ok(Variant {
        name: format!("{services}, {program}"),
        client: topology.beside(&pod, &format!("outside/{name}"), None)?,
        first,
        count: services.min(USED),
        apart: (services / USED).max(1),
        instance: None,
    })
}

/// Gives the backend further addresses, and says all that Services lead to.
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

/// The last parts of the backend's further addresses.
const FURTHER: [u8; 3] = [241, 242, 243];
