use std::time::Duration;

/// How a set of objects stands with those who are told of it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Standing {
    /// When the oldest change that wasn't told was noticed.
    since: Option<Duration>,
    /// Whether the first whole set is here.
    pub(super) synced: bool,
    /// Whether the set holds everything that was told to it.
    pub(super) whole: bool,
    /// Whether the set is of an earlier process, in place of a source that wasn't heard of yet.
    pub(super) stale: bool,
}

impl Standing {
    /// Takes note of a change that was noticed at that time.
    pub(super) fn changed(&mut self, at: Duration) {
        self.since = Some(self.since.map_or(at, |since| since.min(at)));
    }

    /// Says that the first whole set is here.
    pub(super) fn set_synced(&mut self, at: Duration) {
        if !self.synced {
            self.synced = true;
            self.changed(at);
        }
    }

    /// Says whether this is everything. Once it is, that is told.
    pub(super) fn set_whole(&mut self, whole: bool, at: Duration) {
        if whole && !self.whole {
            self.changed(at);
        }
        self.whole = whole;
    }

    /// Says whether this is what an earlier process knew. Once it isn't, that is told.
    pub(super) fn set_stale(&mut self, stale: bool, at: Duration) {
        if self.stale && !stale {
            self.changed(at);
        }
        self.stale = stale;
    }

    /// Whether there is something to tell.
    pub(super) const fn is_changed(&self) -> bool {
        self.since.is_some()
    }

    /// Since when there is something to tell, which counts as told from here on.
    pub(super) const fn told(&mut self) -> Option<Duration> {
        self.since.take()
    }
}
