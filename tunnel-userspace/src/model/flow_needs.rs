//! The needs of the flows of packets.

/// The needs of the flows of packets, as of the last time that they were counted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct FlowNeeds {
    /// True if packets of some flows are translated on links that lead to pods.
    pub pod_links: bool,
    /// True if the client of some flows is this host, whose replies come from the addresses of Services.
    pub replies_to_host: bool,
}

impl Default for FlowNeeds {
    /// Returns the needs of flows that have not been counted yet.
    fn default() -> Self {
        Self {
            pod_links: true,
            replies_to_host: false,
        }
    }
}
