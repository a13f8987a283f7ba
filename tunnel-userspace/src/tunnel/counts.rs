//! How often each reason came up.

use std::{
    collections::BTreeMap,
    sync::atomic::{AtomicU64, Ordering},
};

use tunnel_common::reason::Reason;

/// How often each reason came up.
#[derive(Debug)]
pub(super) struct Counts([AtomicU64; Reason::ALL.len()]);

impl Default for Counts {
    fn default() -> Self {
        Self(std::array::from_fn(|_| AtomicU64::new(0)))
    }
}

impl Counts {
    pub(super) fn count(&self, reason: Reason) {
        let place = Reason::ALL.iter().zip(&self.0).find(|(r, _)| **r == reason);
        if let Some((_, count)) = place {
            count.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Those that came up.
    pub(super) fn all(&self) -> BTreeMap<Reason, u64> {
        let counts = Reason::ALL.into_iter().zip(&self.0);
        counts
            .map(|(reason, count)| (reason, count.load(Ordering::Relaxed)))
            .filter(|(_, count)| *count > 0)
            .collect()
    }
}
