//! Reads and watches a directory of Kubernetes manifests, or a single manifest file.

mod background_reads;
mod directory;
mod directory_state;
mod directory_watch;
mod documents;
mod merge;
mod parse;
mod replaced_directory;

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use background_reads::{BackgroundReads, FinishedRead};
use directory::{Listing, ManifestPath, ReadCause, ReadJob, ReadLimits, ReadResult};
use directory_state::DirectoryState;
use directory_watch::{DirectoryChanges, DirectoryWatch};
use parse::ParseCache;
use replaced_directory::ReplacedDirectory;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch as latest,
    task::spawn_blocking,
    time::{Instant, MissedTickBehavior, interval_at},
};

use super::{
    Overlay, Problem, SourceReport, Store,
    fingerprint::{FileId, fingerprint},
    problem_log::ProblemLog,
    store::SyncPhase,
};
use crate::{clock::monotonic, drain, duration, model::ClusterUpdate, publish::publish_if_changed};

/// The settings for the `file` source.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct FileSettings {
    /// The directory of manifests, or a single manifest file.
    pub path: PathBuf,
    /// The maximum size of a file, in bytes. Larger files are not read.
    pub max_file_bytes: u64,
    /// The maximum number of documents in a file. Files with more documents are not read.
    pub max_documents: u32,
    /// The time for which a directory that has replaced the manifest directory must stay unchanged before the
    /// objects that it lacks count as deleted.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub replacement_delay: Duration,
}

impl Default for FileSettings {
    fn default() -> Self {
        Self {
            path: "/etc/culvert/manifests".into(),
            max_file_bytes: 64 << 20,
            max_documents: 500_000,
            replacement_delay: Duration::from_secs(5),
        }
    }
}

impl FileSettings {
    /// Creates settings for a directory or file, with defaults for everything else.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            ..Self::default()
        }
    }

    fn read_error(&self) -> impl FnOnce(io::Error) -> FileSourceError + use<> {
        let path = self.path.clone();
        |source| FileSourceError::Read { path, source }
    }
}

/// Larger files are read in the background, so that they don't delay changes of other files. If many files are written
/// at once, those beyond the sum are read in the background, too.
const WRITTEN_FILES: ReadLimits = ReadLimits {
    file_bytes: 1 << 20,
    sum_bytes: 16 << 20,
};
/// If the directory or links are replaced, all but large files change in one step, so that no moved object is missing.
const REPLACED_FILES: ReadLimits = ReadLimits {
    sum_bytes: u64::MAX,
    ..WRITTEN_FILES
};

/// The interval between polls for changes that inotify does not report.
const POLL_INTERVAL: Duration = Duration::from_secs(1);

/// The maximum number of attempts to read all files for the first time while some are being written. The
/// source waits for the writers because an object that is missing from the first complete list counts as
/// deleted.
const FIRST_READ_ATTEMPTS: u32 = 100;
/// The delay between these attempts.
const FIRST_READ_WAIT: Duration = Duration::from_millis(20);

/// An error that prevents the `file` source from starting.
#[derive(Debug, thiserror::Error)]
pub enum FileSourceError {
    /// The directory or file is missing or can't be read.
    #[error("cannot read manifests in {path}")]
    Read {
        /// The path of the directory or file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The directory can't be watched.
    #[error("cannot watch manifests in {path}")]
    Watch {
        /// The path of the directory.
        path: PathBuf,
        /// The cause.
        #[source]
        source: notify::Error,
    },
}

/// Reads a directory or file once. Errors in the content are returned as [`Problem`]s.
///
/// # Errors
///
/// Returns an error if the directory or file is missing or can't be read.
pub fn read(path: &Path) -> Result<(ClusterUpdate, Vec<Problem>), FileSourceError> {
    let mut store = Store::default();
    let settings = FileSettings::new(path);
    let target = ManifestPath::new(path, &settings);
    let opened = target.and_then(|target| first_read(&target, &store.overlay()));
    let (_, state) = opened.map_err(settings.read_error())?;
    let problems = state.problems();
    Ok((store.take_update().unwrap_or_default(), problems))
}

/// Parses two versions of a file. Returns true if parsing the second version with the cache from the first
/// gives the same result as parsing it without a cache.
pub(crate) fn cache_changes_nothing(first: &str, second: &str) -> bool {
    let (_, cache) = parse::parse_yaml(first, &ParseCache::default());
    let cached = parse::parse_yaml(second, &cache).0;
    parse::parse_json(second);
    cached == parse::parse_yaml(second, &ParseCache::default()).0
}

/// Reads the directory for the first time.
fn first_read(target: &ManifestPath, overlay: &Overlay) -> io::Result<(FileId, DirectoryState)> {
    let at = monotonic();
    let directory_id = target.directory_id()?;
    let mut state = DirectoryState::default();
    let nothing = BTreeSet::new();
    for poll in 0..FIRST_READ_ATTEMPTS {
        let jobs = state.changed_files(&target.list()?, &nothing);
        if jobs.is_empty() {
            break;
        }
        let results = target.read_all(directory_id, jobs, ReadLimits::NONE);
        let results = results.unwrap_or_default();
        state.record_all(results, &nothing, &mut overlay.edit(at));
        if state.has_unsettled() {
            wait_for_writer();
        } else if poll > 0 {
            break;
        }
    }
    overlay.edit(at).set_phase(state.phase());
    Ok((directory_id, state))
}

/// Waits briefly for a writer to finish writing a file.
#[expect(
    clippy::disallowed_methods,
    reason = "only a blocking thread waits, before any object is used"
)]
fn wait_for_writer() {
    std::thread::sleep(FIRST_READ_WAIT);
}

/// Starts watching a directory or file, and reads it. Call [`FileSource::run`] to apply later changes.
///
/// # Errors
///
/// Returns an error if the directory or file is missing, or if it can't be read or watched.
pub async fn start(
    settings: FileSettings,
    overlay: Overlay,
) -> Result<FileSource, FileSourceError> {
    let read_error = settings.read_error();
    let replaced = ReplacedDirectory::new(settings.replacement_delay);
    let read = move || {
        let target = ManifestPath::new(&settings.path, &settings);
        let target = target.map_err(settings.read_error())?;
        // Watching starts before reading, so that no change in between is missed.
        let watch = DirectoryWatch::new(&target).map_err(|source| FileSourceError::Watch {
            path: target.directory.clone(),
            source,
        })?;
        let (directory_id, state) = first_read(&target, &overlay).map_err(settings.read_error())?;
        let mut source = FileSource {
            target,
            directory_id: Some(directory_id),
            watch,
            state,
            background: BackgroundReads::default(),
            replaced,
            overlay,
            report: latest::Sender::new(Arc::default()),
            problem_log: ProblemLog::default(),
        };
        source.publish_report();
        Ok(source)
    };
    blocking(read).await.map_err(read_error).flatten()
}

/// A `file` source that has read all of its files once.
#[derive(Debug)]
pub struct FileSource {
    target: ManifestPath,
    /// The identity of the watched directory; `None` while the directory can't be reached.
    directory_id: Option<FileId>,
    watch: DirectoryWatch,
    state: DirectoryState,
    background: BackgroundReads,
    replaced: ReplacedDirectory,
    overlay: Overlay,
    report: latest::Sender<Arc<SourceReport>>,
    problem_log: ProblemLog,
}

impl FileSource {
    /// Returns a receiver for the source's report.
    #[must_use]
    pub fn report(&self) -> latest::Receiver<Arc<SourceReport>> {
        self.report.subscribe()
    }

    /// Watches the files and writes changes to the overlay until draining begins.
    pub async fn run(mut self, mut draining: latest::Receiver<bool>) {
        let mut poll = interval_at(Instant::now() + POLL_INTERVAL, POLL_INTERVAL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                () = self.watch.changed() => self.handle_events().await,
                Some(read) = self.background.next() => self.finish_background_read(read).await,
                _ = poll.tick() => self.poll().await,
            }
        }
    }

    /// Handles the events that have arrived since the last call.
    async fn handle_events(&mut self) {
        let changes = self.watch.take();
        let Some(at) = changes.noticed_at else {
            return;
        };
        if changes.directory_lost {
            self.restart_watch(at).await;
        } else if self.directory_id.is_some() {
            self.apply(changes, at).await;
        }
        self.publish_report();
    }

    async fn apply(&mut self, changes: DirectoryChanges, at: Duration) {
        let DirectoryChanges {
            settled,
            touched,
            renamed,
            other_entry_changed,
            events_lost,
            ..
        } = changes;
        self.background
            .discard(renamed.iter().map(|(from, _)| from));
        self.state.rename(&renamed, &mut self.overlay.edit(at));
        // After the directory has been replaced, the events suffice for the files that it has. The next poll
        // determines whether files are missing.
        if events_lost {
            self.scan(at).await;
        } else if other_entry_changed {
            let found = fingerprints(self.state.links()).await;
            let jobs = self.state.swapped_links(&found);
            self.read(jobs, REPLACED_FILES, at).await;
        }
        let writing = self.watch.writing();
        let touched = touched
            .iter()
            .filter(|path| !settled.contains_key(*path) && !writing.contains(*path));
        let mut jobs: Vec<ReadJob> = touched
            .map(|path| self.state.job(path, ReadCause::Touched))
            .collect();
        for (path, exists) in settled {
            if writing.contains(&path) {
                self.state.mark_unsettled(path);
            } else if exists {
                jobs.push(self.state.job(&path, ReadCause::Complete));
            } else {
                jobs.push(self.state.job(&path, ReadCause::Removed));
            }
        }
        self.read(jobs, WRITTEN_FILES, at).await;
    }

    /// Polls for changes that inotify does not report.
    async fn poll(&mut self) {
        let at = monotonic();
        let target = self.target.clone();
        match blocking(move || target.directory_id()).await.flatten() {
            Ok(directory_id) if self.directory_id != Some(directory_id) => {
                self.restart_watch(at).await
            }
            Ok(_) if self.state.directory_problem.is_some() => self.scan(at).await,
            Ok(_) => self.poll_files(at).await,
            Err(error) => self.lose_directory(&error),
        }
        self.publish_report();
    }

    async fn poll_files(&mut self, at: Duration) {
        let found = fingerprints(self.state.files_to_poll()).await;
        let jobs = self.state.poll(found, self.watch.writing());
        self.watch.mark_closed(&jobs);
        self.read(jobs, WRITTEN_FILES, at).await;
    }

    /// Starts watching whatever directory is now at the path, and scans it.
    async fn restart_watch(&mut self, at: Duration) {
        let target = self.target.clone();
        let watched = blocking(move || {
            let watch = DirectoryWatch::new(&target).map_err(io::Error::other)?;
            target
                .directory_id()
                .map(|directory_id| (watch, directory_id))
        });
        match watched.await.flatten() {
            Ok((watch, directory_id)) => {
                self.background.discard_all();
                self.watch = watch;
                self.directory_id = Some(directory_id);
                self.replaced.reset();
                self.set_directory_problem("was replaced by another directory");
                self.scan(at).await;
            }
            Err(error) => self.lose_directory(&error),
        }
    }

    /// Lists the directory, and reads the files that have changed since they were last read.
    async fn scan(&mut self, at: Duration) {
        let target = self.target.clone();
        let listing = match blocking(move || target.list()).await.flatten() {
            Ok(listing) => listing,
            Err(error) => return self.set_directory_problem(&format!("can't be read: {error}")),
        };
        // If the new directory is empty, it has probably not been filled or mounted yet.
        if self.state.directory_problem.is_some() && listing.is_empty() && !self.state.is_empty() {
            self.replaced.reset();
            return self.set_directory_problem("was replaced by a directory without manifests");
        }
        let renamed = self.state.renamed(&listing);
        self.background
            .discard(renamed.iter().map(|(from, _)| from));
        self.state.rename(&renamed, &mut self.overlay.edit(at));
        let mut jobs = self.state.changed_files(&listing, self.watch.writing());
        if self.is_filled(&listing) {
            self.state.directory_problem = None;
        } else {
            // The missing files may still be created.
            jobs.retain(|job| listing.contains_key(&job.path));
        }
        self.read(jobs, REPLACED_FILES, at).await;
    }

    /// Returns true if files that are missing from a listing count as deleted. If the directory was replaced,
    /// they do once the new one has stayed unchanged for some time.
    fn is_filled(&mut self, listing: &Listing) -> bool {
        let is_replaced = self.state.directory_problem.is_some();
        if !is_replaced || !self.state.has_missing(listing) {
            self.replaced.reset();
            return true;
        }
        let is_being_written = !self.watch.is_idle();
        let is_filled = self
            .replaced
            .is_filled(listing, is_being_written, monotonic());
        if !is_filled {
            self.set_directory_problem(
                "was replaced by another directory, which lacks some of the files",
            );
        }
        is_filled
    }

    async fn read(&mut self, jobs: Vec<ReadJob>, limits: ReadLimits, at: Duration) {
        let Some(directory_id) = self.directory_id.filter(|_| !jobs.is_empty()) else {
            return;
        };
        let target = self.target.clone();
        let read = move || target.read_all(directory_id, jobs, limits);
        match blocking(read).await {
            Ok(Some(mut results)) => {
                let is_large =
                    |(_, result): &mut (_, ReadResult)| matches!(result, ReadResult::Large(_));
                for (path, result) in results.extract_if(.., is_large) {
                    if let ReadResult::Large(cause) = result {
                        let job = self.state.job(&path, cause);
                        self.background.start(&self.target, directory_id, job, at);
                    }
                }
                self.background
                    .discard(results.iter().map(|(path, _)| path));
                let mut edit = self.overlay.edit(at);
                self.state
                    .record_all(results, self.watch.writing(), &mut edit);
            }
            Ok(None) => self.lose_directory(&io::Error::from(io::ErrorKind::NotFound)),
            Err(error) => self.set_directory_problem(&format!("can't be read: {error}")),
        }
    }

    /// Records the result of a read in the background. Reads the file again if it has changed meanwhile.
    async fn finish_background_read(&mut self, read: FinishedRead) {
        let FinishedRead {
            path,
            result,
            at,
            is_outdated,
        } = read;
        if let Some(result) = result {
            let mut edit = self.overlay.edit(at);
            let writing = self.watch.writing();
            self.state
                .record_all(vec![(Arc::clone(&path), result)], writing, &mut edit);
        }
        if is_outdated {
            let job = self.state.job(&path, ReadCause::Removed);
            self.read(vec![job], WRITTEN_FILES, monotonic()).await;
        }
        // Meanwhile, each poll publishes the report, which takes time in proportion to the number of files.
        if self.background.is_idle() {
            self.publish_report();
        }
    }

    fn lose_directory(&mut self, error: &io::Error) {
        self.directory_id = None;
        self.replaced.reset();
        self.set_directory_problem(&format!("can't be reached: {error}"));
    }

    fn set_directory_problem(&mut self, description: &str) {
        let reason = format!("{description}; the objects that were read before stay in use");
        self.state.directory_problem = Some(Problem::in_file(&self.target.directory, reason));
    }

    /// Publishes the report, and logs what changed in it.
    fn publish_report(&mut self) {
        let phase = if self.watch.is_idle() && self.background.is_idle() {
            self.state.phase()
        } else {
            SyncPhase::Partial
        };
        self.overlay.edit(monotonic()).set_phase(phase);
        let mut report = self.state.report(self.overlay.counts());
        self.problem_log.log_changes(&mut report);
        publish_if_changed(&self.report, Arc::new(report));
    }
}

async fn fingerprints(paths: BTreeSet<Arc<Path>>) -> Listing {
    if paths.is_empty() {
        return Listing::new();
    }
    let read = |path: Arc<Path>| {
        let fingerprint = fingerprint(&path);
        (path, fingerprint)
    };
    blocking(move || paths.into_iter().map(read).collect())
        .await
        .unwrap_or_default()
}

/// Runs `work` on tokio's blocking thread pool.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    spawn_blocking(work).await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
