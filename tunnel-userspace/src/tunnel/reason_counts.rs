//! Counters of how often each reason has occurred.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tunnel_common::reason::Reason;

/// Counters of how often each reason has occurred.
#[derive(Debug, Default)]
pub(super) struct ReasonCounts(Mutex<BTreeMap<Reason, u64>>);

impl ReasonCounts {
    pub(super) fn increment(&self, reason: Reason) {
        *self.0.lock().entry(reason).or_default() += 1;
    }

    /// Returns all reasons that have occurred, with their counts.
    pub(super) fn all(&self) -> BTreeMap<Reason, u64> {
        self.0.lock().clone()
    }
}
