//! The counters of service ports, for metrics.

use tunnel_common::{select, service::Tally};

use super::shown::ShownPort;
use crate::{plan::PortName, reconcile::access::Counts};

/// The counters of the first service ports.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Counted {
    /// The counters, sorted by the name of the service port.
    pub ports: Vec<PortCounts>,
    /// The number of service ports that are left out.
    pub left_out: usize,
}

/// The counters of a service port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortCounts {
    /// The service port.
    pub name: PortName,
    /// The number of connections and UDP flows that were sent to a backend.
    pub sent: u64,
    /// The number of connections and datagrams that were refused.
    pub refused: u64,
    /// The number of open connections to its serving backends.
    pub open: u64,
}

impl PortCounts {
    /// Reads the counters of a port. A counter that can't be read is 0.
    pub(super) fn of(port: &ShownPort, counts: &impl Counts) -> Self {
        let tally = tally(port, counts);
        let backends = port.backends.iter();
        let open = backends.filter_map(|backend| counts.open_at(backend.index).ok());
        Self {
            name: port.name.clone(),
            sent: tally.sent,
            refused: tally.refused,
            open: open.map(select::at_least_none).sum(),
        }
    }
}

/// Reads the counters that the programs maintain for a port; 0 if they can't be read, or the port is not in
/// the maps.
pub(super) fn tally(port: &ShownPort, counts: &impl Counts) -> Tally {
    let tally = port.id.and_then(|id| counts.tally(id).ok());
    tally.unwrap_or_default()
}
