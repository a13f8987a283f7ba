//! What has been read of the folder, and what is to be read again. No I/O.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::Path,
    sync::Arc,
};

use super::{
    claims::Claims,
    folder::{Batch, Fingerprint, Job, Reading},
    statement::Memory,
};
use crate::{
    model::Kind,
    source::{
        Problem, Report,
        store::{Edit, Phase},
    },
};

/// What has been read.
#[derive(Debug, Default)]
pub(super) struct View {
    claims: Claims,
    files: BTreeMap<Arc<Path>, Seen>,
    /// Files that may still be written.
    unsettled: BTreeMap<Arc<Path>, Look>,
    /// What is wrong with the folder itself. While this holds, nothing is taken to be deleted.
    trouble: Option<Problem>,
}

/// After how many looks of the same a file is taken to be complete.
const QUIET: u32 = 2;
/// The same for a file that changed after it was closed: either it is being written again, or
/// only its time was set, which no event tells apart.
const QUIET_WRITER: u32 = 10;

/// What a file looked like at the last look, and for how many looks.
#[derive(Clone, Copy, Debug, Default)]
struct Look {
    fingerprint: Option<Fingerprint>,
    quiet: u32,
}

/// A file as it was read last.
#[derive(Debug, Default)]
struct Seen {
    /// Nothing if it couldn't be reached.
    fingerprint: Option<Fingerprint>,
    is_link: bool,
    memory: Option<Arc<Memory>>,
}

impl View {
    /// Compares the folder with what was read, and returns the files to read, those that seem to
    /// be gone among them. Files that are being written are left for later.
    pub(super) fn compare(
        &self,
        listing: Vec<(Arc<Path>, Option<Fingerprint>)>,
        writing: &BTreeSet<Arc<Path>>,
    ) -> Vec<Job> {
        let listed: BTreeSet<Arc<Path>> =
            listing.iter().map(|(path, _)| Arc::clone(path)).collect();
        let gone = self.files.keys().filter(|path| !listed.contains(*path));
        let is_stale = |path: &Arc<Path>, fingerprint: Option<Fingerprint>| {
            self.files
                .get(path)
                .is_none_or(|seen| seen.fingerprint != fingerprint)
        };
        listing
            .into_iter()
            .filter(|(path, fingerprint)| is_stale(path, *fingerprint) && !writing.contains(path))
            .map(|(path, _)| path)
            .chain(gone.map(Arc::clone))
            .map(|path| self.job(path, false))
            .collect()
    }

    /// Whether anything was ever read.
    pub(super) fn is_empty(&self) -> bool {
        self.files.is_empty()
    }

    /// Whether a file is there that could not be read because it is being written.
    pub(super) fn is_unsettled(&self) -> bool {
        !self.unsettled.is_empty()
    }

    /// A file, ready to be read.
    pub(super) fn job(&self, path: Arc<Path>, is_unsure: bool) -> Job {
        let seen = self.files.get(&path);
        Job {
            memory: seen.and_then(|seen| seen.memory.as_ref().map(Arc::clone)),
            seen: seen.and_then(|seen| seen.fingerprint),
            path,
            is_unsure,
        }
    }

    /// Takes what came of reading files. Those that a writer has begun to change meanwhile may
    /// have been read half written.
    pub(super) fn take_all(
        &mut self,
        batch: Batch,
        writing: &BTreeSet<Arc<Path>>,
        edit: &mut Edit<'_>,
    ) {
        for (from, to) in &batch.moved {
            self.claims.adopt(from, to, edit);
        }
        // What goes, goes last: another file may say the same by then.
        let (gone, rest): (Vec<_>, Vec<_>) = batch
            .readings
            .into_iter()
            .partition(|(_, reading)| matches!(reading, Reading::Gone));
        for (path, reading) in rest.into_iter().chain(gone) {
            if writing.contains(&path) {
                self.unsettle(path);
            } else {
                self.take(path, reading, edit);
            }
        }
    }

    /// Takes what came of reading a file.
    fn take(&mut self, path: Arc<Path>, reading: Reading, edit: &mut Edit<'_>) {
        self.unsettled.remove(&path);
        match reading {
            Reading::Gone => self.forget(&path, edit),
            Reading::Unsettled => self.unsettle(path),
            Reading::Unreadable {
                fingerprint,
                reason,
            } => {
                self.claims.keep(&path, Problem::of_file(&path, reason));
                let seen = self.files.entry(path).or_default();
                seen.fingerprint = fingerprint;
            }
            Reading::Said {
                fingerprint,
                is_link,
                statements,
                memory,
            } => {
                self.claims.replace(&path, statements, edit);
                let memory = Some(Arc::new(memory));
                self.files.insert(
                    path,
                    Seen {
                        fingerprint: Some(fingerprint),
                        is_link,
                        memory,
                    },
                );
            }
        }
    }

    /// Looks at a file again later, when it has stopped changing.
    pub(super) fn unsettle(&mut self, path: Arc<Path>) {
        self.unsettled.insert(path, Look::default());
    }

    fn forget(&mut self, path: &Arc<Path>, edit: &mut Edit<'_>) {
        self.files.remove(path);
        self.unsettled.remove(path);
        self.claims.remove(path, edit);
    }

    /// The files that are reached through a link, or can't be reached.
    pub(super) fn links(&self) -> Vec<Arc<Path>> {
        let is_link = |seen: &Seen| seen.is_link || seen.fingerprint.is_none();
        let links = self.files.iter().filter(|(_, seen)| is_link(seen));
        links.map(|(path, _)| Arc::clone(path)).collect()
    }

    /// The links to read, by what they look like: they lead to another file now, which is taken
    /// to be complete, as Kubernetes and others swap links to that end.
    pub(super) fn swapped(&self, looks: Vec<(Arc<Path>, Option<Fingerprint>)>) -> Vec<Job> {
        let place = |look: Option<Fingerprint>| look.map(|fingerprint| fingerprint.place);
        looks
            .into_iter()
            .filter(|(path, look)| {
                let read = self.files.get(path).and_then(|seen| seen.fingerprint);
                place(read) != place(*look)
            })
            .map(|(path, _)| self.job(path, false))
            .collect()
    }

    /// The files to look at from time to time, as no event may tell of their change.
    pub(super) fn to_look_at(&self) -> Vec<Arc<Path>> {
        let mut paths: BTreeSet<Arc<Path>> = self.links().into_iter().collect();
        paths.extend(self.unsettled.keys().map(Arc::clone));
        paths.into_iter().collect()
    }

    /// Takes what such files look like, and returns those to read: they changed, and have been
    /// the same for a while.
    pub(super) fn look(
        &mut self,
        looks: Vec<(Arc<Path>, Option<Fingerprint>)>,
        writing: &BTreeSet<Arc<Path>>,
    ) -> Vec<Job> {
        let mut settled = Vec::new();
        for (path, fingerprint) in looks {
            if self
                .files
                .get(&path)
                .is_some_and(|seen| seen.fingerprint == fingerprint)
            {
                self.unsettled.remove(&path);
                continue;
            }
            let last = self.unsettled.get(&path).copied().unwrap_or_default();
            let is_same = last.quiet > 0 && last.fingerprint == fingerprint;
            let quiet = if is_same { last.quiet + 1 } else { 1 };
            let enough = if writing.contains(&path) {
                QUIET_WRITER
            } else {
                QUIET
            };
            if quiet >= enough {
                settled.push(self.job(Arc::clone(&path), false));
            }
            self.unsettled.insert(path, Look { fingerprint, quiet });
        }
        settled
    }

    /// Takes note of what is wrong with the folder.
    pub(super) fn set_trouble(&mut self, trouble: Option<Problem>) {
        self.trouble = trouble;
    }

    /// Whether something is wrong with the folder.
    pub(super) const fn has_trouble(&self) -> bool {
        self.trouble.is_some()
    }

    /// Says whether all that the folder says is understood, and none of it waits to be read.
    pub(super) fn phase(&self) -> Phase {
        let mut problems = self.problems().into_iter();
        if self.unsettled.is_empty() && problems.all(|problem| problem.ignored) {
            Phase::Whole
        } else {
            Phase::Partial
        }
    }

    /// All that is wrong now.
    pub(super) fn problems(&self) -> Vec<Problem> {
        let mut problems: Vec<Problem> = self
            .trouble
            .iter()
            .cloned()
            .chain(self.claims.problems())
            .collect();
        problems.sort();
        problems
    }

    /// What has been read, for status.
    pub(super) fn report(&self, objects: BTreeMap<Kind, usize>) -> Report {
        Report {
            objects,
            problems: self.problems(),
            refused_total: 0,
            ignored_total: 0,
            unknown_kinds: self.claims.unknown().collect(),
            synced: true,
            server: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::source::file::folder::fingerprint;

    /// After how many looks a file is read, if it changes before some of them.
    fn looks_until_read(is_writing: bool, changes: &[usize]) -> usize {
        let dir = tempfile::tempdir().expect("a folder");
        let path: Arc<Path> = Arc::from(dir.path().join("a.yaml"));
        let writing: BTreeSet<_> = is_writing.then(|| Arc::clone(&path)).into_iter().collect();
        let mut view = View::default();
        view.unsettle(Arc::clone(&path));
        for look in 1..100 {
            if look == 1 || changes.contains(&look) {
                fs::write(&path, "x".repeat(look)).expect("written");
            }
            let looks = vec![(Arc::clone(&path), fingerprint(&path))];
            if !view.look(looks, &writing).is_empty() {
                return look;
            }
        }
        panic!("never read");
    }

    #[test]
    fn a_file_is_read_when_it_has_been_the_same_for_two_looks() {
        assert_eq!(looks_until_read(false, &[]), 2);
        assert_eq!(looks_until_read(false, &[2, 3]), 4);
    }

    #[test]
    fn a_file_that_was_changed_after_it_was_closed_is_read_in_the_end() {
        assert_eq!(looks_until_read(true, &[]), 10);
        assert_eq!(looks_until_read(true, &[9]), 18);
    }

    #[test]
    fn a_file_that_is_being_written_is_not_compared() {
        let dir = tempfile::tempdir().expect("a folder");
        let path: Arc<Path> = Arc::from(dir.path().join("a.yaml"));
        fs::write(&path, "").expect("written");
        let listing = || vec![(Arc::clone(&path), fingerprint(&path))];
        let view = View::default();

        let writing = BTreeSet::from([Arc::clone(&path)]);
        assert!(view.compare(listing(), &writing).is_empty());
        let jobs = view.compare(listing(), &BTreeSet::new());
        assert_eq!(
            jobs.iter().map(|job| &job.path).collect::<Vec<_>>(),
            [&path]
        );
    }
}
