//! The counters for service ports, published as metrics.

use tunnel_common::{select, service::ServiceCounts};

use super::service_snapshot::PortSnapshot;
use crate::{plan::PortName, reconcile::map_access::CounterReader};

/// The counters for the first service ports by name, up to a limit.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct PortCounterList {
    /// The counters, sorted by service port name.
    pub ports: Vec<PortCounters>,
    /// The number of service ports that were left out.
    pub omitted: usize,
}

/// The counters for a service port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortCounters {
    /// The service port's name.
    pub name: PortName,
    /// The number of connections and UDP flows that have been sent to a backend.
    pub sent: u64,
    /// The number of connections and datagrams that have been refused.
    pub refused: u64,
    /// The number of open connections to the port's serving backends.
    pub open: u64,
}

impl PortCounters {
    /// Reads a port's counters. A counter that can't be read is reported as 0.
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

/// Reads the counters that the BPF programs maintain for a port. Returns 0 for counters that can't be read,
/// or if the port is not in the maps.
pub(super) fn read_service_counts(
    port: &PortSnapshot,
    reader: &impl CounterReader,
) -> ServiceCounts {
    let counts = port.id.and_then(|id| reader.service_counts(id).ok());
    counts.unwrap_or_default()
}
