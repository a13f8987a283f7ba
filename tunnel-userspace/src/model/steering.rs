use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

/// The destination behind a steering address: a port of an edge node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Target {
    /// The name of the Node.
    pub node: Arc<str>,
    /// The address, as dialled.
    pub address: IpAddr,
    /// The port, as dialled.
    pub port: u16,
    /// True if the agent is to dial loopback instead of the address (`localhost-proxy-ports`).
    pub loopback: bool,
}

impl fmt::Display for Target {
    /// Writes `edge-7 (10.1.2.3:10250)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = std::net::SocketAddr::new(self.address, self.port);
        write!(f, "{} ({address})", self.node)
    }
}

/// Every target, by the index of its steering address.
pub type Targets = BTreeMap<u32, Target>;
