//! Keeps track of the files that have been read, and decides which ones to read again. Does no I/O.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use super::{
    directory::{Listing, ReadCause, ReadJob, ReadResult},
    merge::MergedObjects,
    parse::ParseCache,
};
use crate::{
    model::Kind,
    source::{
        Problem, SourceReport,
        fingerprint::{FileId, Fingerprint},
        store::{OverlayEdit, SyncPhase},
    },
};

/// The state of the directory: the files that have been read, and their objects.
#[derive(Debug, Default)]
pub(super) struct DirectoryState {
    merged: MergedObjects,
    files: BTreeMap<Arc<Path>, LastRead>,
    /// Files that are being polled because they may still be incomplete.
    unsettled: BTreeMap<Arc<Path>, PollState>,
    /// A problem with the directory itself. As long as there is one, missing files do not count as deleted.
    pub(super) directory_problem: Option<Problem>,
}

/// The number of consecutive polls that must find a file unchanged before it counts as complete.
const EQUAL_POLLS: u32 = 2;
/// Like `EQUAL_POLLS`, but for a file that had more write events after it was closed. Either it is being
/// written again, or only its timestamps were set; inotify reports the same events in both cases.
const EQUAL_POLLS_WITH_WRITER: u32 = 10;

/// The file's fingerprint at the last poll, and how many polls in a row have found this fingerprint.
#[derive(Clone, Copy, Debug, Default)]
struct PollState {
    fingerprint: Option<Fingerprint>,
    equal_polls: u32,
}

/// The outcome of the last read of a file.
#[derive(Debug, Default)]
struct LastRead {
    /// The fingerprint; `None` if the file can't be reached or must be read again.
    fingerprint: Option<Fingerprint>,
    is_link: bool,
    cache: Arc<ParseCache>,
}

impl DirectoryState {
    /// Compares a listing with the files as they were last read, and returns jobs for the files to read,
    /// including those that are now missing. Skips files that are being written.
    pub(super) fn changed_files(
        &self,
        listing: &Listing,
        writing: &BTreeSet<Arc<Path>>,
    ) -> Vec<ReadJob> {
        let known = self.files.keys().chain(self.unsettled.keys());
        let missing = known.filter(|path| !listing.contains_key(*path));
        let missing = missing.map(|path| self.job(path, ReadCause::Removed));
        let has_changed = |(path, fingerprint): &(&Arc<Path>, &Option<Fingerprint>)| {
            let last_read = self.files.get(*path);
            last_read.is_none_or(|last_read| last_read.fingerprint != **fingerprint)
                && !writing.contains(*path)
        };
        let changed = listing.iter().filter(has_changed);
        let changed = changed.map(|(path, _)| self.job(path, ReadCause::Complete));
        changed.chain(missing).collect()
    }

    /// Returns the old and new paths of each renamed file. A renamed file is recognised by its inode.
    pub(super) fn renamed(&self, listing: &Listing) -> Vec<(Arc<Path>, Arc<Path>)> {
        let new = listing
            .iter()
            .filter(|(path, _)| !self.files.contains_key(*path));
        let new: BTreeMap<FileId, (&Arc<Path>, Fingerprint)> = new
            .filter_map(|(path, found)| Some(((*found)?.id, (path, (*found)?))))
            .collect();
        let missing = self
            .files
            .iter()
            .filter(|(path, _)| !listing.contains_key(*path));
        let renamed = |(path, last_read): (&Arc<Path>, &LastRead)| {
            let last = last_read.fingerprint?;
            let (to, found) = *new.get(&last.id)?;
            // The kernel may have given the inode of a deleted file to a new one.
            found
                .has_same_content(&last)
                .then(|| (Arc::clone(path), Arc::clone(to)))
        };
        missing.filter_map(renamed).collect()
    }

    /// Moves the objects of renamed files to their new paths, so that an object that turns out to be invalid
    /// at the new path keeps its last valid version.
    pub(super) fn rename(
        &mut self,
        renamed: &[(Arc<Path>, Arc<Path>)],
        edit: &mut OverlayEdit<'_>,
    ) {
        for (from, to) in renamed {
            self.merged.rename(from, to, edit);
            self.unsettled.remove(from);
            if let Some(last_read) = self.files.remove(from) {
                self.files.insert(Arc::clone(to), last_read);
            }
        }
    }

    /// Returns true if a known file is missing from a listing.
    pub(super) fn has_missing(&self, listing: &Listing) -> bool {
        let mut known = self.files.keys();
        known.any(|path| !listing.contains_key(path))
    }

    /// Returns true if no files are known.
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Returns true if any file is being polled because it may still be incomplete.
    pub(super) fn has_unsettled(&self) -> bool {
        !self.unsettled.is_empty()
    }

    /// Creates a job to read a file.
    pub(super) fn job(&self, path: &Arc<Path>, noticed: ReadCause) -> ReadJob {
        let cache = self
            .files
            .get(path)
            .map(|last_read| Arc::clone(&last_read.cache));
        ReadJob {
            path: Arc::clone(path),
            cache: cache.unwrap_or_default(),
            cause: noticed,
        }
    }

    /// Records the results of reading files. If a file is now being written, what was read may be incomplete,
    /// so the result is discarded and the file is polled.
    pub(super) fn record_all(
        &mut self,
        results: Vec<(Arc<Path>, ReadResult)>,
        writing: &BTreeSet<Arc<Path>>,
        edit: &mut OverlayEdit<'_>,
    ) {
        for (path, result) in results {
            if writing.contains(&path) {
                self.mark_unsettled(path);
            } else {
                self.record(path, result, edit);
            }
        }
    }

    /// Records the result of reading a file.
    fn record(&mut self, path: Arc<Path>, result: ReadResult, edit: &mut OverlayEdit<'_>) {
        self.unsettled.remove(&path);
        match result {
            ReadResult::Gone => {
                self.files.remove(&path);
                self.merged.remove(&path, edit);
            }
            ReadResult::Unsettled | ReadResult::Large(_) => self.mark_unsettled(path),
            ReadResult::Unreadable {
                fingerprint,
                reason,
            } => {
                self.merged
                    .record_unreadable(&path, Problem::in_file(&path, reason));
                let last_read = self.files.entry(path).or_default();
                last_read.fingerprint = fingerprint;
            }
            ReadResult::Parsed {
                fingerprint,
                is_link,
                parsed,
                cache,
            } => {
                self.merged.replace(&path, parsed, edit);
                let last_read = LastRead {
                    fingerprint: Some(fingerprint),
                    is_link,
                    cache: Arc::new(cache),
                };
                self.files.insert(path, last_read);
            }
        }
    }

    /// Starts polling a file until it stops changing.
    pub(super) fn mark_unsettled(&mut self, path: Arc<Path>) {
        self.unsettled.insert(path, PollState::default());
    }

    /// Returns the files that are links or can't be reached.
    pub(super) fn links(&self) -> BTreeSet<Arc<Path>> {
        let is_link = |last_read: &LastRead| last_read.is_link || last_read.fingerprint.is_none();
        let links = self
            .files
            .iter()
            .filter(|(_, last_read)| is_link(last_read));
        links.map(|(path, _)| Arc::clone(path)).collect()
    }

    /// Returns jobs for the links that now lead to a different file, given the current fingerprints of the
    /// links. The new file is assumed to be complete, since tools such as the kubelet swap links to publish
    /// files atomically.
    pub(super) fn swapped_links(&self, found: &Listing) -> Vec<ReadJob> {
        let file_id = |found: Option<Fingerprint>| found.map(|fingerprint| fingerprint.id);
        let is_swapped = |(path, found): &(&Arc<Path>, &Option<Fingerprint>)| {
            let read = self
                .files
                .get(*path)
                .and_then(|last_read| last_read.fingerprint);
            file_id(read) != file_id(**found)
        };
        let swapped = found.iter().filter(is_swapped);
        let jobs = swapped.map(|(path, _)| self.job(path, ReadCause::Complete));
        jobs.collect()
    }

    /// Returns the files that must be polled because they may change without an event.
    pub(super) fn files_to_poll(&self) -> BTreeSet<Arc<Path>> {
        let unsettled = self.unsettled.keys().map(Arc::clone);
        self.links().into_iter().chain(unsettled).collect()
    }

    /// Records the fingerprints of polled files. Returns jobs for the files that have changed and have since
    /// stayed the same for several polls.
    pub(super) fn poll(&mut self, found: Listing, writing: &BTreeSet<Arc<Path>>) -> Vec<ReadJob> {
        let mut settled = Vec::new();
        for (path, fingerprint) in found {
            let last_read = self.files.get(&path);
            if last_read.is_some_and(|last_read| last_read.fingerprint == fingerprint) {
                self.unsettled.remove(&path);
                continue;
            }
            let last = self.unsettled.get(&path).copied().unwrap_or_default();
            let is_same = last.equal_polls > 0 && last.fingerprint == fingerprint;
            let quiet = if is_same { last.equal_polls + 1 } else { 1 };
            let is_writing = writing.contains(&path);
            if quiet
                >= if is_writing {
                    EQUAL_POLLS_WITH_WRITER
                } else {
                    EQUAL_POLLS
                }
            {
                settled.push(self.job(&path, ReadCause::Removed));
            }
            self.unsettled.insert(
                path,
                PollState {
                    fingerprint,
                    equal_polls: quiet,
                },
            );
        }
        settled
    }

    /// Returns the phase, which is `Complete` if no object was rejected and no file remains to be read.
    pub(super) fn phase(&self) -> SyncPhase {
        let mut problems = self.problems().into_iter();
        if self.unsettled.is_empty() && problems.all(|problem| problem.ignored) {
            SyncPhase::Complete
        } else {
            SyncPhase::Partial
        }
    }

    /// Returns all current problems.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self
            .directory_problem
            .iter()
            .cloned()
            .chain(self.merged.problems())
            .collect();
        problems.sort();
        problems
    }

    /// Returns the source's report for the daemon's status.
    pub(super) fn report(&self, objects: BTreeMap<Kind, usize>) -> SourceReport {
        SourceReport {
            objects,
            problems: self.problems(),
            unknown_kinds: self.merged.unknown().collect(),
            synced: true,
            ..SourceReport::default()
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs, time::Duration};

    use super::*;
    use crate::source::{
        Store,
        file::{
            FileSettings,
            directory::{ManifestPath, ReadLimits},
        },
        fingerprint::fingerprint,
    };

    /// Returns how many polls it takes until the file is read. The file is changed before each of the polls
    /// listed in `changes`.
    fn polls_until_read(is_writing: bool, changes: &[usize]) -> usize {
        let directory = tempfile::tempdir().expect("a directory");
        let path: Arc<Path> = Arc::from(directory.path().join("a.yaml"));
        let writing: BTreeSet<_> = is_writing.then(|| Arc::clone(&path)).into_iter().collect();
        let mut state = DirectoryState::default();
        state.mark_unsettled(Arc::clone(&path));
        for poll in 1..100 {
            if poll == 1 || changes.contains(&poll) {
                fs::write(&path, "x".repeat(poll)).expect("written");
            }
            let found = Listing::from([(Arc::clone(&path), fingerprint(&path))]);
            if !state.poll(found, &writing).is_empty() {
                return poll;
            }
        }
        panic!("never read");
    }

    #[test]
    fn a_file_is_read_after_two_equal_polls() {
        assert_eq!(polls_until_read(false, &[]), 2);
        assert_eq!(polls_until_read(false, &[2, 3]), 4);
    }

    #[test]
    fn a_file_with_writes_after_its_close_is_read_after_ten_equal_polls() {
        assert_eq!(polls_until_read(true, &[]), 10);
        assert_eq!(polls_until_read(true, &[9]), 18);
    }

    #[test]
    fn a_file_that_is_being_written_is_not_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let path: Arc<Path> = Arc::from(directory.path().join("a.yaml"));
        fs::write(&path, "").expect("written");
        let listing = Listing::from([(Arc::clone(&path), fingerprint(&path))]);
        let state = DirectoryState::default();

        let writing = BTreeSet::from([Arc::clone(&path)]);
        assert!(state.changed_files(&listing, &writing).is_empty());
        let jobs = state.changed_files(&listing, &BTreeSet::new());
        assert_eq!(
            jobs.iter().map(|job| &job.path).collect::<Vec<_>>(),
            [&path]
        );
    }

    #[test]
    fn a_rename_without_an_event_is_detected_by_the_inode() {
        let directory = tempfile::tempdir().expect("a directory");
        let target =
            ManifestPath::new(directory.path(), &FileSettings::default()).expect("a directory");
        let [from, to]: [Arc<Path>; 2] =
            ["a.yaml", "z.yaml"].map(|name| Arc::from(directory.path().join(name)));
        fs::write(&from, "").expect("written");
        let overlay = Store::default().overlay();
        let mut state = DirectoryState::default();
        let jobs = state.changed_files(&target.list().expect("listed"), &BTreeSet::new());
        let directory_id = target.directory_id().expect("a directory");
        let results = target.read_all(directory_id, jobs, ReadLimits::NONE);
        let mut edit = overlay.edit(Duration::ZERO);
        state.record_all(results.expect("read"), &BTreeSet::new(), &mut edit);

        fs::rename(&from, &to).expect("renamed");

        let listing = target.list().expect("listed");
        assert_eq!(state.renamed(&listing), [(from, Arc::clone(&to))]);
        fs::write(&to, "another that got its inode").expect("written");
        let listing = target.list().expect("listed");
        assert!(state.renamed(&listing).is_empty());
    }
}
