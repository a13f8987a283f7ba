//! Connects that rules of kube-proxy's shape translate: in a pod with a network namespace of its
//! own, whose rules stand where those of a node are for the connects of the node itself, in nat
//! OUTPUT.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use tunnel_tests::{
    place::{ANSWER, connect_within},
    pod::Pod,
    topology::Topology,
};

use super::{PORT, TARGET, USED, Variant};
use crate::{
    rules::{self, Shape, iptables, nft},
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
    let word = match kind {
        Kind::Nft => "nft",
        Kind::Iptables => "iptables",
    };
    let name = format!("{word}-{services}");
    let pod = topology.pod(&name)?;
    // A Service's address leads nowhere in a pod; the packet must set out to meet the rules.
    pod.ip("route add 10.97.0.0/16 via 169.254.1.1 dev eth0\n")?;
    let shape = Shape {
        services,
        port: PORT,
        endpoints: endpoints.to_vec(),
    };
    let folder = topology.lab().folder();
    let kind = match kind {
        Kind::Nft => {
            let file = rules::write(folder, &name, &nft::whole(&shape))?;
            nft::loader(&pod).load(&file)?;
            "nft".to_owned()
        }
        Kind::Iptables => {
            let (kind, loader) = iptables::loader(&pod)?;
            let file = rules::write(folder, &name, &iptables::whole(&shape))?;
            loader.load(&file)?;
            format!("iptables-{kind}")
        }
    };
    try_out(&pod)?;
    Ok(Variant {
        name: format!("{services}, {kind}"),
        client: topology.beside(&pod, &format!("outside/{name}"), None)?,
        first: SocketAddr::new(FIRST, PORT),
        count: services.min(USED),
        apart: (services / USED).max(1),
        is_ours: false,
        _instance: None,
    })
}

/// Nothing but the rules leads to an endpoint.
fn try_out(pod: &Pod) -> Result<()> {
    let to = SocketAddr::new(FIRST, PORT);
    let socket = pod.socket(socket2::Domain::for_address(to), socket2::Type::STREAM)?;
    connect_within(&socket, to, ANSWER).context("the rules lead to no endpoint")
}

/// Gives the backend further addresses, and says all that Services lead to.
pub(super) fn endpoints(topology: &Topology, backend: &Pod) -> Result<Vec<SocketAddr>> {
    let own = backend.v4();
    let mut endpoints = vec![backend.at4(TARGET)];
    for last in FURTHER {
        topology
            .host()
            .ip(&format!("route add 10.1.0.{last}/32 via {own}\n"))?;
        backend.ip(&format!("addr add 10.1.0.{last}/32 dev eth0\n"))?;
        endpoints.push(SocketAddr::from(([10, 1, 0, last], TARGET)));
    }
    Ok(endpoints)
}

/// The last parts of the backend's further addresses.
const FURTHER: [u8; 3] = [241, 242, 243];
