use std::{collections::BTreeMap, fmt, net::IpAddr, sync::Arc};

/// The destination that a steering address represents: an edge node's address and port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct SteeringTarget {
    /// The name of the Node.
    pub node: Arc<str>,
    /// The address that the client dialled.
    pub address: IpAddr,
    /// The port that the client dialled, in host byte order.
    pub port: u16,
    /// True if the agent must dial loopback instead of `address` (`localhost-proxy-ports`).
    pub loopback: bool,
    /// True if several edge nodes claim the address, and none of them gets it. Connections are then refused.
    pub is_disputed: bool,
}

impl fmt::Display for SteeringTarget {
    /// Formats the target in the form `edge-7 (10.1.2.3:10250)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let address = std::net::SocketAddr::new(self.address, self.port);
        write!(f, "{} ({address})", self.node)
    }
}

/// The steering targets, keyed by the index of their steering addresses.
pub type SteeringTargets = BTreeMap<u32, SteeringTarget>;
