//! Clients whose connections to edge nodes reach the ingress as translated packets.

use std::{fmt, net::SocketAddr, sync::Arc};

use tunnel_common::{addr::Address, steering::Prefix};

/// Returns the edge node's address and port that a client has dialled, given the client and the address of the ingress at
/// both ends of the connection, or `None` if the connection's packets are not translated.
pub type FindDialled = Arc<dyn Fn(SocketAddr, SocketAddr) -> Option<SocketAddr> + Send + Sync>;

/// The clients whose connections reach the ingress as translated packets.
#[derive(Clone)]
pub struct ForwardedClients {
    /// The machines outside this node that may use the ingress (`tunnel.steering.forwarded`).
    ranges: Vec<Prefix>,
    find_dialled: FindDialled,
}

impl ForwardedClients {
    /// Creates the set of the clients with addresses in these ranges.
    #[must_use]
    pub const fn new(ranges: Vec<Prefix>, find_dialled: FindDialled) -> Self {
        Self {
            ranges,
            find_dialled,
        }
    }

    /// Creates an empty set.
    #[must_use]
    pub fn none() -> Self {
        Self::new(Vec::new(), Arc::new(|_, _| None))
    }

    /// Returns true if a client outside this node may use the ingress.
    pub(super) fn include(&self, client: SocketAddr) -> bool {
        let client = Address::from_ip(client.ip());
        let mut ranges = self.ranges.iter();
        ranges.any(|range| range.contains(&client))
    }

    /// Returns what a client has dialled, if the packets of its connection are translated.
    pub(super) fn dialled(&self, client: SocketAddr, ingress: SocketAddr) -> Option<SocketAddr> {
        (self.find_dialled)(client, ingress)
    }
}

impl fmt::Debug for ForwardedClients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.ranges).finish()
    }
}
