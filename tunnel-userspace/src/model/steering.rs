use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

/// What connects to a steering address are for: a port of an edge node.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct Target {
    /// The name of the Node.
    pub node: Arc<str>,
    /// Its address, as it was dialled.
    pub address: IpAddr,
    /// The port, as it was dialled.
    pub port: u16,
    /// Whether the agent is to dial loopback in the place of the address
    /// (`localhost-proxy-ports`).
    pub loopback: bool,
}

impl fmt::Display for Target {
    /// `edge-7 (10.1.2.3:10250)`
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = std::net::SocketAddr::new(self.address, self.port);
        write!(f, "{} ({address})", self.node)
    }
}

/// Every target, by the index of its steering address.
pub type Targets = BTreeMap<u32, Target>;
