//! Machines outside this node whose connections to edge nodes this node forwards to the ingress.

use std::{fmt, net::SocketAddr, sync::Arc};

use tunnel_common::{addr::Address, steering::Prefix};

/// A connection that has arrived at the ingress over a link that leads outside.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct ForwardedConnection {
    /// The client, as the ingress sees it.
    pub client: SocketAddr,
    /// The steering address and the port of the ingress.
    pub ingress: SocketAddr,
    /// The edge node's address and port that the steering address represents.
    pub dialled: SocketAddr,
}

/// Returns true if the kernel programs have forwarded a connection to the ingress.
pub type IsForwarded = Arc<dyn Fn(&ForwardedConnection) -> bool + Send + Sync>;

/// The clients outside this node that may use the ingress (`tunnel.steering.forwarded`).
#[derive(Clone)]
pub struct ForwardedClients {
    ranges: Vec<Prefix>,
    is_forwarded: IsForwarded,
}

impl ForwardedClients {
    /// Creates the set of the clients with addresses in these ranges.
    #[must_use]
    pub const fn new(ranges: Vec<Prefix>, is_forwarded: IsForwarded) -> Self {
        Self {
            ranges,
            is_forwarded,
        }
    }

    /// Creates an empty set.
    #[must_use]
    pub fn none() -> Self {
        Self::new(Vec::new(), Arc::new(|_| false))
    }

    /// Returns true if the client may use the ingress, and dialled the edge node, not the ingress.
    pub(super) fn include(&self, connection: &ForwardedConnection) -> bool {
        let client = Address::from_ip(connection.client.ip());
        let mut ranges = self.ranges.iter();
        ranges.any(|range| range.contains(&client)) && (self.is_forwarded)(connection)
    }
}

impl fmt::Debug for ForwardedClients {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(&self.ranges).finish()
    }
}
