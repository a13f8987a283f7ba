//! A pass over what changed, and what follows from writes that were refused.

use std::time::Duration;

use jiff::Timestamp;
use tunnel_common::reason::Reason;

use super::{
    Actual, AdoptError, Grace, MapReader, MapWriter, Reconciler, Retired, SyncStats, WriteError,
    make_usable,
};
use crate::model::ObjectName;

impl<M: MapReader + MapWriter> Reconciler<M> {
    /// Writes what changed. What can't be written stays dirty. Gives what was taken out of reach,
    /// to be given back to [`Self::free`] after a grace period.
    pub fn pass(&mut self) -> Retired {
        if !self.synced || self.in_doubt {
            return Retired::default();
        }
        if !self.seeded {
            self.seed();
        }
        let before = self.actual.usage();
        let dirty = std::mem::take(&mut self.dirty);
        let mut leftovers = Vec::new();
        if self.is_first {
            // Everything is written then, with few calls.
            self.maps.hold();
            let (actual, services) = (&mut self.actual, dirty.len());
            actual.fronts.reserve(services);
            actual.sets.reserve(services);
            actual.ports.reserve(services);
            actual.ids.reserve(services);
        }
        for service in &dirty {
            self.write_service(service, &mut leftovers);
        }
        // Orphans come after the Services that may take one over.
        if self.whole {
            for orphan in std::mem::take(&mut self.orphans) {
                self.write_service(&orphan, &mut leftovers);
            }
        }
        if let Err(error) = self.maps.flush() {
            self.doubt(&error);
            return Retired::default();
        }
        self.is_first = false;
        // Deletions come last, so that an address that moves from one Service to another is never
        // without an owner.
        for (name, diff) in leftovers {
            self.finish(&name, &diff);
        }
        self.has_shrunk |= before.exceeds(&self.actual.usage());
        let retired = std::mem::take(&mut self.retired);
        self.waiting |= !retired.is_empty();
        retired
    }

    /// Whether it is not known what the maps hold, since some writes of the first pass were refused.
    /// Nothing is written before [`Self::begin_anew`].
    #[must_use]
    pub const fn is_in_doubt(&self) -> bool {
        self.in_doubt
    }

    fn doubt(&mut self, error: &WriteError) {
        let error = error as &dyn std::error::Error;
        tracing::warn!(error, "cannot write everything at once, beginning anew");
        let count = self.counts.entry(Reason::WriteFailed).or_default();
        *count = count.saturating_add(1);
        self.in_doubt = true;
        // Something is to be written, whatever comes.
        self.dirty.extend(self.plans.keys().cloned());
    }

    /// Takes over what the maps hold, as a process that starts does, after a first pass of which some
    /// was refused. From then on each write is a call of its own, so that one that is refused again
    /// stops no other.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; nothing is written then, and the same can be tried again.
    pub fn begin_anew(&mut self, grace: &mut impl Grace) -> Result<(), AdoptError> {
        let (mut actual, stray) = Actual::read(&self.maps, self.actual.sizes)?;
        make_usable(&mut actual, &mut self.maps, &stray, grace)?;
        self.actual = actual;
        self.count_unused_anew()?;
        self.retired = Retired::default();
        self.orphans.clear();
        self.held.clear();
        self.starved.clear();
        self.seeded = false;
        self.is_first = false;
        self.in_doubt = false;
        Ok(())
    }

    /// Reads the maps again and compares them with what is known of them. Where they differ, they
    /// are taken over anew and everything is planned again. Gives the number of differences.
    ///
    /// # Errors
    ///
    /// As [`Self::adopt`]; what was known stays.
    pub fn audit(&mut self, grace: &mut impl Grace) -> Result<u64, AdoptError> {
        if self.waiting || !self.seeded || self.in_doubt {
            return Ok(0);
        }
        let (mut fresh, stray) = Actual::read(&self.maps, self.actual.sizes)?;
        let differences = fresh
            .differences(&self.actual)
            .saturating_add(stray.fronts.len())
            .saturating_add(stray.backends.len());
        if differences == 0 {
            return Ok(0);
        }
        make_usable(&mut fresh, &mut self.maps, &stray, grace)?;
        fresh.take_names(&mut self.actual);
        self.actual = fresh;
        self.measures.all_anew();
        self.dirty.extend(self.plans.keys().cloned());
        // Orphans wait until the sources are whole, as ever.
        let known = self.actual.ids.keys();
        let named = known.filter(|name| !self.orphans.contains(*name));
        self.dirty.extend(named.cloned());
        let differences = u64::try_from(differences).unwrap_or(u64::MAX);
        self.drift = self.drift.saturating_add(differences);
        Ok(differences)
    }
}

impl<M> Reconciler<M> {
    /// Measures a pass that has just ended.
    pub(super) fn measure(&mut self, stats: &mut SyncStats, took: Duration) {
        if self.synced {
            let (dirty, starved) = (&self.dirty, &self.starved);
            let is_open = |name: &ObjectName| dirty.contains(name) || starved.contains(name);
            self.measures.pass(stats, took, Timestamp::now(), is_open);
        }
    }
}
