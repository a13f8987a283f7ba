//! How often each reason came up.

use std::collections::BTreeMap;

use parking_lot::Mutex;
use tunnel_common::reason::Reason;

/// How often each reason came up.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<BTreeMap<Reason, u64>>);

impl Counts {
    pub(super) fn count(&self, reason: Reason) {
        *self.0.lock().entry(reason).or_default() += 1;
    }

    /// Those that came up.
    pub(super) fn all(&self) -> BTreeMap<Reason, u64> {
        self.0.lock().clone()
    }
}
