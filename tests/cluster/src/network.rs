//! The nodes' network: their hosts, and a router between them that represents the internet.

use std::{fs, net::IpAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use tunnel_tests::{lab::Lab, place::Place};

use super::kit::Kit;

/// The names of the nodes, and of their control groups: the cloud's, the edge's, and a second one
/// of the cloud in a cluster of three.
pub const NODES: [(&str, &str); 3] = [("node-a", "a"), ("node-b", "b"), ("node-c", "c")];

/// The indices of the cloud node, which has the control plane, and of the edge node.
pub(super) const CLOUD: usize = 0;
pub(super) const EDGE: usize = 1;

/// The number of nodes.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Size {
    /// A cloud node and an edge node.
    Two,
    /// A second cloud node, too: specs about zones need three nodes.
    Three,
}

impl Size {
    /// Returns the names of the nodes, and of their control groups.
    pub(super) fn nodes(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Two => &NODES[..2],
            Self::Three => &NODES,
        }
    }
}

const FORWARDING: [(&str, &str); 3] = [
    ("net.ipv4.ip_forward", "1"),
    ("net.ipv6.conf.all.forwarding", "1"),
    ("net.ipv4.conf.all.rp_filter", "0"),
];

/// The nftables rules of an ordinary uplink with NAT: only connections that the edge opens pass, with
/// the router's address as source. The edge is behind `to1`.
const OUTBOUND_ONLY: &str = "table inet edge {
  chain forward {
    type filter hook forward priority 0; policy accept
    ct state established,related accept
    iifname != \"to1\" oifname \"to1\" counter drop
  }
  chain post {
    type nat hook postrouting priority 100
    iifname \"to1\" oifname != \"to1\" counter masquerade
  }
}
";

/// The hosts and the router.
#[derive(Debug)]
pub struct Network {
    /// The hosts of the nodes.
    pub hosts: Vec<Place>,
    /// The router of all packets between nodes.
    pub(super) router: Place,
    kit: Kit,
    folder: PathBuf,
}

/// Returns the addresses of a node's host.
#[must_use]
pub fn addresses(number: usize) -> [String; 2] {
    [format!("172.30.{number}.1"), format!("fd00:30:{number}::1")]
}

/// Returns the ranges of a node's pods.
#[must_use]
pub fn pods(number: usize) -> [String; 2] {
    [
        format!("10.244.{number}.0/24"),
        format!("fd00:244:{number}::/64"),
    ]
}

/// Returns the addresses of a node's host, parsed.
pub(super) fn ips(number: usize) -> Result<Vec<IpAddr>> {
    let parse = |text: String| text.parse().context("no address");
    addresses(number).into_iter().map(parse).collect()
}

impl Network {
    pub(super) fn new(lab: &Lab, kit: &Kit, size: Size) -> Result<Self> {
        let wire = Place::with_network(lab.cgroup().join("wire"), None, &FORWARDING)?;
        wire.ip("link set lo up")?;
        let mut hosts = Vec::new();
        for (number, (_, group)) in size.nodes().iter().enumerate() {
            // Each node has its own BPF file system at the usual path, and so its own mount namespace.
            let bpffs = PathBuf::from("/sys/fs/bpf");
            let cgroup = lab.cgroup().join(group).join("node");
            let host = Place::with_network(cgroup, Some(bpffs), &FORWARDING)?;
            join(&host, &wire, number)?;
            hosts.push(host);
        }
        wire.ip("route add unreachable 0.0.0.0/0\nroute add unreachable ::/0")?;
        Ok(Self {
            hosts,
            router: wire,
            kit: kit.clone(),
            folder: lab.folder().to_owned(),
        })
    }

    /// Returns the host with the control plane.
    pub(super) fn cloud(&self) -> &Place {
        &self.hosts[CLOUD]
    }

    /// Restricts the edge to outgoing connections, or removes the restriction.
    pub fn set_outbound_only(&self, is_so: bool) -> Result<()> {
        let path = self.folder.join("edge.nft");
        fs::write(&path, OUTBOUND_ONLY)?;
        let path = path.display().to_string();
        let words: &[&str] = if is_so {
            &["nft", "-f", &path]
        } else {
            &["nft", "delete", "table", "inet", "edge"]
        };
        self.router.run(&self.kit.command(words)).map(drop)
    }
}

/// Connects a host to the router.
fn join(host: &Place, wire: &Place, number: usize) -> Result<()> {
    let [own4, own6] = addresses(number);
    let [pods4, pods6] = pods(number);
    let (router4, router6) = (
        format!("172.30.{number}.254"),
        format!("fd00:30:{number}::fe"),
    );
    // A default route is needed: a packet to a ClusterIP must pass the route lookup.
    host.ip(&format!(
        "link set lo up\n\
         link add up0 type veth peer name to{number} netns {wire}\n\
         link set up0 up\n\
         addr add {own4}/24 dev up0\n\
         addr add {own6}/64 dev up0 nodad",
        wire = wire.pid(),
    ))?;
    wire.ip(&format!(
        "link set to{number} up\n\
         addr add {router4}/24 dev to{number}\n\
         addr add {router6}/64 dev to{number} nodad\n\
         route add {pods4} via {own4}\n\
         route add {pods6} via {own6}"
    ))?;
    host.ip(&format!(
        "route add default via {router4}\nroute add default via {router6}"
    ))
}
