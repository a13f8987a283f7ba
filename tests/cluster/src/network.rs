//! The nodes' hosts, and a router between them that represents the internet.

use std::{fs, net::IpAddr, path::PathBuf};

use anyhow::{Context as _, Result};
use tunnel_tests::{lab::Lab, sandbox::Sandbox};

use super::components::Components;

/// Each node's name and the name of its cgroup: first the cloud node, then the edge node and, in a cluster of
/// three nodes, a second cloud node.
pub const NODES: [(&str, &str); 3] = [("node-a", "a"), ("node-b", "b"), ("node-c", "c")];

/// The index of the cloud node that runs the control plane.
pub(super) const CLOUD: usize = 0;
/// The index of the edge node.
pub(super) const EDGE: usize = 1;

/// The number of nodes in a cluster.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Size {
    /// A cloud node and an edge node.
    Two,
    /// Two cloud nodes and an edge node, which tests about zones need.
    Three,
}

impl Size {
    /// Returns each node's name and the name of its cgroup.
    pub(super) fn nodes(self) -> &'static [(&'static str, &'static str)] {
        match self {
            Self::Two => &NODES[..2],
            Self::Three => &NODES,
        }
    }
}

/// The sysctls for a network namespace that forwards packets.
const FORWARDING: [(&str, &str); 3] = [
    ("net.ipv4.ip_forward", "1"),
    ("net.ipv6.conf.all.forwarding", "1"),
    ("net.ipv4.conf.all.rp_filter", "0"),
];

/// nftables rules that imitate an ordinary uplink with NAT: only connections opened by the edge node pass,
/// with the router's address as their source. The edge node is behind the interface `to1`.
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

/// nftables rules that imitate those of a firewall on a node: they let replies pass, so the kernel tracks connections.
const STATEFUL: &str = "table inet firewall {
  chain input {
    type filter hook input priority 0; policy accept
    ct state established,related accept
  }
  chain forward {
    type filter hook forward priority 0; policy accept
    ct state established,related accept
  }
  chain output {
    type filter hook output priority 0; policy accept
    ct state established,related accept
  }
}
";

/// The nodes' hosts, and the router that connects them.
#[derive(Debug)]
pub struct Network {
    /// The nodes' hosts, in the order of [`NODES`].
    pub hosts: Vec<Sandbox>,
    /// The router, which all packets between nodes pass through.
    pub router: Sandbox,
    components: Components,
    directory: PathBuf,
}

/// Returns a node's IPv4 and IPv6 addresses.
#[must_use]
pub fn addresses(number: usize) -> [String; 2] {
    [format!("172.30.{number}.1"), format!("fd00:30:{number}::1")]
}

/// Returns the IPv4 and IPv6 ranges of a node's pods.
#[must_use]
pub fn pod_ranges(number: usize) -> [String; 2] {
    [
        format!("10.244.{number}.0/24"),
        format!("fd00:244:{number}::/64"),
    ]
}

/// Returns a node's IPv4 and IPv6 addresses, parsed.
pub(super) fn ip_addresses(number: usize) -> Result<Vec<IpAddr>> {
    let parse = |text: String| {
        text.parse()
            .with_context(|| format!("{text} is not an address"))
    };
    addresses(number).into_iter().map(parse).collect()
}

impl Network {
    pub(super) fn new(lab: &Lab, components: &Components, size: Size) -> Result<Self> {
        let router = Sandbox::with_new_network(lab.cgroup().join("router"), None, &FORWARDING)?;
        router.ip("link set lo up")?;
        let mut hosts = Vec::new();
        for (number, (_, group)) in size.nodes().iter().enumerate() {
            // Each node has its own BPF file system, mounted at the usual path in the node's own mount
            // namespace.
            let bpffs = PathBuf::from("/sys/fs/bpf");
            let cgroup = lab.cgroup().join(group).join("node");
            let host = Sandbox::with_new_network(cgroup, Some(bpffs), &FORWARDING)?;
            connect(&host, &router, number)?;
            hosts.push(host);
        }
        router.ip("route add unreachable 0.0.0.0/0\nroute add unreachable ::/0")?;
        let network = Self {
            hosts,
            router,
            components: components.clone(),
            directory: lab.directory().to_owned(),
        };
        let rules = network.write_rules("firewall.nft", STATEFUL)?;
        for host in &network.hosts {
            host.run(&components.command(&["nft", "-f", &rules]))?;
        }
        Ok(network)
    }

    /// Writes nftables rules to a file. Returns its path.
    fn write_rules(&self, name: &str, rules: &str) -> Result<String> {
        let path = self.directory.join(name);
        fs::write(&path, rules)?;
        Ok(path.display().to_string())
    }

    /// Returns the host that runs the control plane.
    pub(super) fn cloud(&self) -> &Sandbox {
        &self.hosts[CLOUD]
    }

    /// Restricts the edge node to outgoing connections, or removes the restriction.
    pub fn set_outbound_only(&self, enabled: bool) -> Result<()> {
        let path = self.write_rules("edge.nft", OUTBOUND_ONLY)?;
        let command: &[&str] = if enabled {
            &["nft", "-f", &path]
        } else {
            &["nft", "delete", "table", "inet", "edge"]
        };
        self.router.run(&self.components.command(command)).map(drop)
    }
}

/// Connects a host to the router.
fn connect(host: &Sandbox, router: &Sandbox, number: usize) -> Result<()> {
    let [own4, own6] = addresses(number);
    let [pods4, pods6] = pod_ranges(number);
    let (router4, router6) = (
        format!("172.30.{number}.254"),
        format!("fd00:30:{number}::fe"),
    );
    // The default route is needed because the kernel looks up a route even for packets to ClusterIPs.
    host.ip(&format!(
        "link set lo up\n\
         link add up0 type veth peer name to{number} netns {pid}\n\
         link set up0 up\n\
         addr add {own4}/24 dev up0\n\
         addr add {own6}/64 dev up0 nodad",
        pid = router.pid(),
    ))?;
    router.ip(&format!(
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
