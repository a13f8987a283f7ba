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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_target_is_written_with_its_node_and_what_was_dialled() {
        let target = |address: &str| Target {
            node: "edge-7".into(),
            address: address.parse().expect("an address"),
            port: 10250,
            loopback: false,
        };

        assert_eq!(target("10.1.2.3").to_string(), "edge-7 (10.1.2.3:10250)");
        assert_eq!(target("fd00::3").to_string(), "edge-7 ([fd00::3]:10250)");
    }
}
