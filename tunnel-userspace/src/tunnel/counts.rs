//! How often each reason came up.

use std::{
    collections::BTreeMap,
    sync::{Mutex, PoisonError},
};

use tunnel_common::reason::Reason;

/// How often each reason came up.
#[derive(Debug, Default)]
pub(super) struct Counts(Mutex<BTreeMap<Reason, u64>>);

impl Counts {
    pub(super) fn count(&self, reason: Reason) {
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        *counts.entry(reason).or_default() += 1;
    }

    /// Those that came up.
    pub(super) fn all(&self) -> BTreeMap<Reason, u64> {
        let counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        counts.clone()
    }
}
