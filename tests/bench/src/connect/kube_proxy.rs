//! Variants in which nftables or iptables rules like kube-proxy's translate a pod's connections. The rules
//! hook into nat OUTPUT, as they do on a node for the node's own connections.

use std::net::SocketAddr;

use anyhow::{Context as _, Result};
use socket2::{Domain, Type};
use tunnel_tests::{
    kube_proxy_rules::{ServiceSet, iptables, nft},
    node_network::NodeNetwork,
    pod::Pod,
    sandbox::{RESPONSE_TIMEOUT, connect_within},
};

use super::{PORT, TARGET_PORT, USED_SERVICES, Variant};
use crate::services::FIRST_CLUSTER_IP;

/// The kind of rules to load.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Rules {
    Nft,
    Iptables,
}

/// Creates a client pod with rules for the given number of Services. The client connects to evenly spaced
/// Services, so in the iptables chain, their rules are on average in the middle.
pub(super) fn through_rules(
    network: &NodeNetwork,
    kind: Rules,
    services: u32,
    endpoints: &[SocketAddr],
) -> Result<Variant> {
    let name = format!("{kind:?}-{services}").to_lowercase();
    let pod = network.pod(&name)?;
    // Without a route, a connection would fail before its first packet reached nat OUTPUT.
    pod.ip("route add 10.97.0.0/16 via 169.254.1.1 dev eth0\n")?;
    let service_set = ServiceSet {
        services,
        port: PORT,
        endpoints: endpoints.to_vec(),
    };
    let (program, loader, text) = match kind {
        Rules::Nft => ("nft", nft::loader(&pod), nft::full_sync(&service_set)),
        Rules::Iptables => {
            let (program, loader) = iptables::loader(&pod)?;
            (program, loader, iptables::full_sync(&service_set))
        }
    };
    loader.load(network.lab().directory(), &name, &text)?;
    let first = SocketAddr::new(FIRST_CLUSTER_IP, PORT);
    let socket = pod.socket(Domain::for_address(first), Type::STREAM)?;
    connect_within(&socket, first, RESPONSE_TIMEOUT)
        .with_context(|| format!("{name}: a connect through the rules reaches no endpoint"))?;
    Ok(Variant {
        name: format!("{services}, {program}"),
        client: network.share_namespace(&pod, &format!("outside/{name}"), None)?,
        first,
        count: services.min(USED_SERVICES),
        apart: (services / USED_SERVICES).max(1),
        instance: None,
    })
}

/// Gives the backend more addresses. Returns the endpoints at all of its addresses, which all Services share.
pub(super) fn endpoints(network: &NodeNetwork, backend: &Pod) -> Result<Vec<SocketAddr>> {
    let (host, own) = (network.host(), backend.v4());
    let mut endpoints = vec![backend.addr_v4(TARGET_PORT)];
    for last in MORE_ADDRESSES {
        host.ip(&format!("route add 10.1.0.{last}/32 via {own}\n"))?;
        backend.ip(&format!("addr add 10.1.0.{last}/32 dev eth0\n"))?;
        endpoints.push(SocketAddr::from(([10, 1, 0, last], TARGET_PORT)));
    }
    Ok(endpoints)
}

/// The last octets of the backend's additional addresses.
const MORE_ADDRESSES: [u8; 3] = [241, 242, 243];
