//! Decides when a directory that has replaced the manifest directory counts as filled. Does no I/O.

use std::time::Duration;

use super::directory::Listing;

/// The longest time to wait for the directory to stay unchanged, as a multiple of the delay.
const MAX_DELAYS: u32 = 12;

/// A directory that may still be filled, since tools and users may do so file by file.
#[derive(Debug)]
pub(super) struct ReplacedDirectory {
    /// The time for which the directory must stay unchanged.
    delay: Duration,
    last: Option<LastListing>,
}

/// The last listing of the directory.
#[derive(Debug)]
struct LastListing {
    listing: Listing,
    first_found_at: Duration,
    unchanged_since: Duration,
}

impl ReplacedDirectory {
    pub(super) const fn new(delay: Duration) -> Self {
        Self { delay, last: None }
    }

    /// Forgets the last listing, because no file is missing.
    pub(super) fn reset(&mut self) {
        self.last = None;
    }

    /// Returns true if the directory has stayed unchanged for the delay, or has been changing for very long.
    pub(super) fn is_filled(
        &mut self,
        listing: &Listing,
        is_being_written: bool,
        now: Duration,
    ) -> bool {
        let last = self.last.take();
        let first_found_at = last.as_ref().map_or(now, |last| last.first_found_at);
        let unchanged = last.filter(|last| last.listing == *listing && !is_being_written);
        let unchanged_since = unchanged.map_or(now, |last| last.unchanged_since);
        let is_filled = now.saturating_sub(unchanged_since) >= self.delay
            || now.saturating_sub(first_found_at) >= self.delay * MAX_DELAYS;
        if !is_filled {
            self.last = Some(LastListing {
                listing: listing.clone(),
                first_found_at,
                unchanged_since,
            });
        }
        is_filled
    }
}

#[cfg(test)]
mod tests {
    use std::{path::Path, sync::Arc};

    use super::*;

    fn listing(files: u64) -> Listing {
        let path = |number| Arc::from(Path::new(&format!("{number}.yaml")));
        (0..files).map(|number| (path(number), None)).collect()
    }

    const fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_directory_is_filled_once_it_has_stayed_unchanged() {
        let mut replaced = ReplacedDirectory::new(seconds(5));
        for (files, is_being_written, now, is_filled) in [
            (1, false, 0, false),
            (1, false, 4, false),
            (2, false, 5, false),
            (2, true, 9, false),
            (2, false, 13, false),
            (2, false, 14, true),
        ] {
            let found = replaced.is_filled(&listing(files), is_being_written, seconds(now));
            assert_eq!(found, is_filled, "after {now} s");
        }
    }

    #[test]
    fn a_directory_that_changes_all_the_time_is_filled_eventually() {
        let mut replaced = ReplacedDirectory::new(seconds(5));
        for now in 0..60 {
            assert!(!replaced.is_filled(&listing(now), false, seconds(now)));
        }
        assert!(replaced.is_filled(&listing(60), false, seconds(60)));
    }

    #[test]
    fn without_a_delay_a_directory_is_filled_at_once() {
        let mut replaced = ReplacedDirectory::new(Duration::ZERO);
        assert!(replaced.is_filled(&listing(1), true, seconds(1)));
    }
}
