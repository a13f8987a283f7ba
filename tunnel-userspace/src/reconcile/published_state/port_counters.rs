//! The counters of service ports, for metrics.

use tunnel_common::{select, service::ServiceCounts};

use super::service_snapshot::PortSnapshot;
use crate::{plan::PortName, reconcile::map_access::CounterReader};

/// The counters of the first service ports.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PortCounterList {
    /// The counters, sorted by the name of the service port.
    pub ports: Vec<PortCounters>,
    /// The number of service ports that are left out.
    pub omitted: usize,
}

/// The counters of a service port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortCounters {
    /// The service port.
    pub name: PortName,
    /// The number of connections and UDP flows that were sent to a backend.
    pub sent: u64,
    /// The number of connections and datagrams that were refused.
    pub refused: u64,
    /// The number of open connections to its serving backends.
    pub open: u64,
}

impl PortCounters {
    /// Reads the counters of a port. A counter that can't be read is 0.
    pub(super) fn read(port: &PortSnapshot, reader: &impl CounterReader) -> Self {
        let counts = read_service_counts(port, reader);
        let backends = port.backends.iter();
        let open = backends.filter_map(|backend| reader.open_connections(backend.index).ok());
        Self {
            name: port.name.clone(),
            sent: counts.sent,
            refused: counts.refused,
            open: open.map(select::non_negative).sum(),
        }
    }
}

/// Reads the counters that the programs maintain for a port; 0 if they can't be read, or the port is not in
/// the maps.
pub(super) fn read_service_counts(
    port: &PortSnapshot,
    reader: &impl CounterReader,
) -> ServiceCounts {
    let counts = port.id.and_then(|id| reader.service_counts(id).ok());
    counts.unwrap_or_default()
}
