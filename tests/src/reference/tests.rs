//! The tables of the contract, read row by row. `Given` is a small cluster to start from.

mod conflicts;
mod destinations;
mod endpoints;
mod health;
mod node_ports;
mod objects;
mod policies;
mod pools;
mod random;
mod source_ranges;

use std::net::{IpAddr, SocketAddr};

use k8s_openapi::{
    api::{core::v1, discovery::v1::EndpointSlice},
    serde::de::DeserializeOwned,
};
use serde_json::{Value, json};

use super::{
    Cluster, ExternalIps, Front, Here, Key, NodePortAddresses, Protocol, Source, TopologyKeys,
    Verdict, fronts, verdict,
};

/// A pod of this node, a client outside.
const POD: Source = Source::PodSocket(IpAddr::V4(std::net::Ipv4Addr::new(10, 244, 0, 99)));
const CLIENT: Source = Source::Outside(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 7)));

/// A cluster of the nodes `here` (192.168.0.1, fd00::1, zone a) and `there` (192.168.0.2, fd00::2,
/// zone b), and the settings of `here`.
struct Given {
    cluster: Cluster,
    here: Here,
}

impl Given {
    fn new(services: &[Value], slices: &[Value]) -> Self {
        let nodes = [("there", 2, "b"), ("here", 1, "a")].map(|(name, host, zone)| {
            object(json!({
                "metadata": {"name": name, "labels": {"topology.kubernetes.io/zone": zone}},
                "status": {"addresses": [
                    {"type": "Hostname", "address": name},
                    {"type": "ExternalIP", "address": format!("198.18.0.{host}")},
                    {"type": "InternalIP", "address": format!("192.168.0.{host}")},
                    {"type": "InternalIP", "address": format!("192.168.9.{host}")},
                    {"type": "InternalIP", "address": format!("fd00::{host}")},
                ]},
            }))
        });
        let own = [
            "172.17.0.1",
            "192.168.0.1",
            "192.168.9.1",
            "fd00::1",
            "fd17::1",
        ];
        let loopback = ["127.0.0.1", "::1"].map(|address| (true, ip(address)));
        Self {
            cluster: Cluster {
                services: services.iter().cloned().map(object).collect(),
                slices: slices.iter().cloned().map(object).collect(),
                nodes: nodes.into(),
            },
            here: Here {
                node: "here".to_owned(),
                addresses: [&loopback[..], &own.map(|address| (false, ip(address)))].concat(),
                node_port_addresses: NodePortAddresses::Absent,
                external_ips: ExternalIps::Any,
                topology_keys: TopologyKeys::Ignore,
            },
        }
    }

    /// All fronts, as texts.
    fn keys(&self) -> Vec<String> {
        let mut keys: Vec<String> = fronts(&self.cluster, &self.here).keys().map(text).collect();
        keys.sort();
        keys
    }

    fn try_front(&self, at: &str) -> Option<Front> {
        let fronts = fronts(&self.cluster, &self.here);
        let mut found = fronts.into_iter().filter(|(key, _)| text(key) == at);
        found.next().map(|(_, front)| front)
    }

    #[track_caller]
    fn front(&self, at: &str) -> Front {
        let Some(front) = self.try_front(at) else {
            panic!("no front {at} in {:?}", self.keys());
        };
        front
    }

    /// What a source meets at a front: the backends, or the word for it.
    #[track_caller]
    fn meets(&self, source: &Source, at: &str) -> String {
        match verdict(&self.front(at), source, &self.here) {
            Verdict::To(set) => texts(&set),
            Verdict::Refused => "refused".to_owned(),
            Verdict::Dropped => "dropped".to_owned(),
            Verdict::Untouched => "untouched".to_owned(),
        }
    }

    /// What the node, a pod and a client meet.
    #[track_caller]
    fn all_meet(&self, at: &str) -> [String; 3] {
        [Source::NodeSocket, POD, CLIENT].map(|source| self.meets(&source, at))
    }

    fn node(&mut self, name: &str) -> &mut v1::Node {
        let mut nodes = self.cluster.nodes.iter_mut();
        nodes
            .find(|node| node.metadata.name.as_deref() == Some(name))
            .unwrap()
    }

    fn slice(&mut self, number: usize) -> &mut EndpointSlice {
        &mut self.cluster.slices[number]
    }
}

/// `address:port/protocol`, the protocol left out for TCP.
fn text((address, port, protocol): &Key) -> String {
    let at = SocketAddr::new(*address, *port);
    match protocol {
        Protocol::Tcp => at.to_string(),
        Protocol::Udp => format!("{at}/udp"),
        Protocol::Sctp => format!("{at}/sctp"),
    }
}

fn texts(set: &super::Set) -> String {
    let texts: Vec<String> = set.iter().map(ToString::to_string).collect();
    texts.join(" ")
}

fn object<T: DeserializeOwned>(value: Value) -> T {
    serde_json::from_value(value).unwrap()
}

fn ip(text: &str) -> IpAddr {
    text.parse().unwrap()
}

/// The Service `ns/web`, 10.96.0.1:80, with more or other fields of its spec.
fn web(spec: Value) -> Value {
    named("web", "10.96.0.1", spec)
}

fn named(name: &str, cluster_ip: &str, spec: Value) -> Value {
    let mut service = json!({
        "metadata": {"namespace": "ns", "name": name},
        "spec": {
            "type": "ClusterIP",
            "clusterIP": cluster_ip,
            "ports": [{"port": 80, "protocol": "TCP"}],
        },
    });
    merge(&mut service["spec"], spec);
    service
}

/// `web` as a load balancer with these entries in its status.
fn balanced(ingress: Value, mut spec: Value) -> Value {
    merge(&mut spec, json!({"type": "LoadBalancer"}));
    with_ingress(web(spec), ingress)
}

fn with_ingress(mut service: Value, ingress: Value) -> Value {
    service["status"] = json!({"loadBalancer": {"ingress": ingress}});
    service
}

/// A Service with more or other metadata.
fn with_metadata(mut service: Value, metadata: Value) -> Value {
    merge(&mut service["metadata"], metadata);
    service
}

/// A slice of `web` with the port 8080.
fn slice(endpoints: &[Value]) -> Value {
    slice_of("web", endpoints)
}

fn slice_of(service: &str, endpoints: &[Value]) -> Value {
    json!({
        "metadata": {
            "namespace": "ns",
            "name": format!("{service}-1"),
            "labels": {"kubernetes.io/service-name": service},
        },
        "addressType": "IPv4",
        "ports": [{"name": "", "port": 8080, "protocol": "TCP"}],
        "endpoints": endpoints,
    })
}

/// A ready endpoint on a node.
fn endpoint(address: &str, node: &str) -> Value {
    json!({"addresses": [address], "nodeName": node, "conditions": {"ready": true}})
}

/// An endpoint with other fields.
fn endpoint_with(address: &str, node: &str, fields: Value) -> Value {
    let mut endpoint = endpoint(address, node);
    merge(&mut endpoint, fields);
    endpoint
}

/// Conditions of an endpoint that ends, and still serves.
fn draining() -> Value {
    json!({"conditions": {"ready": false, "serving": true, "terminating": true}})
}

fn not_ready() -> Value {
    json!({"conditions": {"ready": false, "serving": false, "terminating": false}})
}

fn merge(into: &mut Value, fields: Value) {
    let Value::Object(fields) = fields else {
        panic!("no object: {fields}");
    };
    for (name, value) in fields {
        into[name] = value;
    }
}
