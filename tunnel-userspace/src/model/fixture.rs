//! Builds objects for tests.

use std::{collections::BTreeMap, net::IpAddr, sync::Arc};

use tunnel_common::addr::Protocol;

use super::{Endpoint, EndpointPort, EndpointSlice, Family, Node, ObjectName, ServicePort};

pub(crate) fn ip(text: &str) -> IpAddr {
    text.parse().expect("an address")
}

pub(crate) fn ips(texts: &[&str]) -> Vec<IpAddr> {
    texts.iter().map(|text| ip(text)).collect()
}

/// Returns a Node with the given name and defaults for all other fields.
pub(crate) fn node(name: &str) -> Node {
    Node {
        name: ObjectName::new("", name),
        labels: BTreeMap::new(),
        internal_ips: Vec::new(),
        other_ips: Vec::new(),
        pod_cidrs: Vec::new(),
        eligible: true,
    }
}

/// Returns the update entry that inserts or replaces a Node.
pub(crate) fn node_update(node: Node) -> (ObjectName, Option<Arc<Node>>) {
    (node.name.clone(), Some(Arc::new(node)))
}

/// Returns a Service port named `http` with the protocol TCP.
pub(crate) fn http(port: u16) -> ServicePort {
    ServicePort {
        name: "http".into(),
        port,
        node_port: None,
        protocol: Protocol::TCP,
    }
}

/// Returns a ready endpoint with the given address.
pub(crate) const fn endpoint(address: IpAddr) -> Endpoint {
    Endpoint {
        address,
        ready: true,
        serving: true,
        terminating: false,
        node: None,
        name: None,
        zone: None,
        hints: None,
    }
}

/// Returns an EndpointSlice for a Service, with the given TCP ports.
pub(crate) fn slice(
    name: &str,
    service: &ObjectName,
    family: Family,
    ports: &[(&str, u16)],
    endpoints: Vec<Endpoint>,
) -> EndpointSlice {
    let port = |(name, port): &(&str, u16)| EndpointPort {
        name: (*name).into(),
        port: *port,
        protocol: Protocol::TCP,
    };
    EndpointSlice {
        name: ObjectName::new(&*service.namespace, name),
        service: service.clone(),
        family,
        ports: ports.iter().map(port).collect(),
        endpoints,
        triggered: None,
    }
}
