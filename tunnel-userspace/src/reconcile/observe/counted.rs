use tunnel_common::{select, service::Tally};

use super::shown::ShownPort;
use crate::{plan::PortName, reconcile::access::Counts};

/// What was counted of some service ports.
#[derive(Clone, Debug, Default, Eq, PartialEq)]
pub struct Counted {
    /// The first service ports by their names.
    pub ports: Vec<PortCounts>,
    /// How many more there are.
    pub left_out: usize,
}

/// What was counted of a service port.
#[derive(Clone, Debug, Eq, PartialEq)]
pub struct PortCounts {
    /// Whose counts these are.
    pub name: PortName,
    /// Connections and UDP flows that were sent to a backend.
    pub sent: u64,
    /// Connections and datagrams that were refused.
    pub refused: u64,
    /// Open sockets that remember one of its backends that serve.
    pub open: u64,
}

impl PortCounts {
    /// The counts of a port. Those that can't be read are 0.
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

/// The programs' counts of a port; 0 where they can't be read, or it is not programmed.
pub(super) fn tally(port: &ShownPort, counts: &impl Counts) -> Tally {
    let tally = port.id.and_then(|id| counts.tally(id).ok());
    tally.unwrap_or_default()
}
