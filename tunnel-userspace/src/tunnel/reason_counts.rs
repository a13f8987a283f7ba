//! Counters of reasons.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tunnel_common::reason::Reason;

/// Counters of reasons.
#[derive(Debug, Default)]
pub(super) struct ReasonCounts(Mutex<BTreeMap<Reason, u64>>);

impl ReasonCounts {
    pub(super) fn increment(&self, reason: Reason) {
        *self.0.lock().entry(reason).or_default() += 1;
    }

    /// Returns the reasons that occurred, with their counts.
    pub(super) fn all(&self) -> BTreeMap<Reason, u64> {
        self.0.lock().clone()
    }
}
