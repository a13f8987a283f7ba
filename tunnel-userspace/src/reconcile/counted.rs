//! What the programs counted, by service port.

use tunnel_common::{select, service::Tally};

use super::{MapReader, MapWriter, ReadError, Reconciler};
use crate::plan::{PortName, ServicePlan};

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

impl<M: MapReader> Reconciler<M> {
    /// What was counted of the first service ports by their names, at most so many.
    #[must_use]
    pub fn counted(&self, most: usize) -> Counted {
        let all: usize = self.plans.values().map(ServicePlan::len).sum();
        let names = self.plans.values().flat_map(ServicePlan::keys);
        Counted {
            ports: names.take(most).map(|name| self.counts(name)).collect(),
            left_out: all.saturating_sub(most),
        }
    }

    /// What was counted for an id. What can't be read, or is not programmed, counts as nothing.
    pub(super) fn tally(&self, id: Option<u32>) -> Tally {
        let tally = id.and_then(|id| self.maps.tally(id).ok());
        tally.unwrap_or_default()
    }

    fn counts(&self, name: &PortName) -> PortCounts {
        let id = self.actual.id(name);
        let tally = self.tally(id);
        let port = id.and_then(|id| self.actual.ports.get(&id));
        let backends = port.into_iter().flat_map(|port| port.backends.values());
        let open = backends.filter_map(|index| self.maps.open_at(*index).ok());
        let open = open.map(select::at_least_none);
        PortCounts {
            name: name.clone(),
            sent: tally.sent,
            refused: tally.refused,
            open: open.fold(0, u64::saturating_add),
        }
    }
}

impl<M: MapReader + MapWriter> Reconciler<M> {
    /// Lets what is counted for ids that no program uses any more begin anew.
    pub(super) fn count_anew(&mut self, ids: &[u32]) {
        for id in ids {
            if let Err(error) = self.maps.reset_tally(*id) {
                tracing::warn!(id, %error, "the counts of a service port that is gone stay");
            }
        }
    }

    /// As [`Self::count_anew`], for what an earlier process left.
    pub(super) fn count_unused_anew(&mut self) -> Result<(), ReadError> {
        let tallies = self.maps.tallies(self.actual.sizes.front_entries())?;
        let counted = (0_u32..).zip(tallies);
        let counted = counted.filter(|(_, tally)| *tally != Tally::default());
        let unused = counted.filter(|(id, _)| !self.actual.ports.contains_key(id));
        let unused: Vec<u32> = unused.map(|(id, _)| id).collect();
        self.count_anew(&unused);
        Ok(())
    }
}
