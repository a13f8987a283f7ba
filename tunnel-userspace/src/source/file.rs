//! Reads and watches a folder of Kubernetes manifests, or one file.

mod documents;
mod folder;
mod merge;
mod parse;
mod state;
mod watch;

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use folder::{Job, Listing, Noticed, Target};
use parse::Cache;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use state::State;
use tokio::{
    sync::watch as latest,
    task::spawn_blocking,
    time::{Instant, MissedTickBehavior, interval_at},
};
use watch::{Changes, Watch};

use super::{
    Overlay, Problem, Report, Store,
    fingerprint::{Place, fingerprint},
    journal::Journal,
    store::Phase,
};
use crate::{clock::monotonic, drain, latest::put, model::Update};

/// The settings of a source of files.
#[derive(Clone, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Settings {
    /// The folder or file.
    pub path: PathBuf,
    /// The maximum size of a file, in bytes; larger files are refused.
    pub max_file_bytes: u64,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            path: "/etc/culvert/manifests".into(),
            max_file_bytes: 64 << 20,
        }
    }
}

impl Settings {
    /// Creates the settings for a folder or file, with the other values at their defaults.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            ..Self::default()
        }
    }

    fn cannot_read(&self) -> impl FnOnce(io::Error) -> Error + use<> {
        let path = self.path.clone();
        |source| Error::Read { path, source }
    }
}

/// The interval of polls for changes that cause no event.
const POLL: Duration = Duration::from_secs(1);

/// The maximum number of times that the first read waits for a file that is being written. An object that
/// is missing from the first complete list counts as deleted.
const FIRST_POLLS: u32 = 100;
/// The wait between two attempts of the first read.
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// The error of starting a source of files.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder or file is missing or can't be read.
    #[error("cannot read manifests in {path}")]
    Read {
        /// The folder or file.
        path: PathBuf,
        /// The cause.
        #[source]
        source: io::Error,
    },
    /// The folder can't be watched.
    #[error("cannot watch manifests in {path}")]
    Watch {
        /// The folder.
        path: PathBuf,
        /// The cause.
        #[source]
        source: notify::Error,
    },
}

/// Reads a folder or file once. Returns errors in the content as [`Problem`]s.
///
/// # Errors
///
/// The folder or file is missing or can't be read.
pub fn read(path: &Path) -> Result<(Update, Vec<Problem>), Error> {
    let mut store = Store::default();
    let settings = Settings::new(path);
    let target = Target::new(path, settings.max_file_bytes);
    let opened = target.and_then(|target| open(&target, &store.overlay()));
    let (_, state) = opened.map_err(settings.cannot_read())?;
    let problems = state.problems();
    Ok((store.take_update().unwrap_or_default(), problems))
}

/// Parses two versions of a file. Returns true if the cache of the first does not change the result of
/// the second.
pub(crate) fn reads_alike(first: &str, second: &str) -> bool {
    let (_, cache) = parse::yaml(first, &Cache::default());
    let beside = parse::yaml(second, &cache).0;
    parse::json(second);
    beside == parse::yaml(second, &Cache::default()).0
}

/// Reads the folder for the first time.
fn open(target: &Target, overlay: &Overlay) -> io::Result<(Place, State)> {
    let at = monotonic();
    let place = target.place()?;
    let mut state = State::default();
    let nothing = BTreeSet::new();
    for poll in 0..FIRST_POLLS {
        let jobs = state.compare(&target.list()?, &nothing);
        if jobs.is_empty() {
            break;
        }
        let readings = target.read_all(place, jobs).unwrap_or_default();
        state.take_all(readings, &nothing, &mut overlay.edit(at));
        if state.is_unsettled() {
            pause();
        } else if poll > 0 {
            break;
        }
    }
    overlay.edit(at).set_phase(state.phase());
    Ok((place, state))
}

/// Waits for a writer to finish.
#[expect(
    clippy::disallowed_methods,
    reason = "only a blocking thread waits, before any object is used"
)]
fn pause() {
    std::thread::sleep(FIRST_PAUSE);
}

/// Starts to watch a folder or file, and reads it. [`FileSource::run`] then applies changes.
///
/// # Errors
///
/// The folder or file is missing, or can't be read or watched.
pub async fn start(settings: Settings, overlay: Overlay) -> Result<FileSource, Error> {
    let cannot_read = settings.cannot_read();
    let read = move || {
        let target = Target::new(&settings.path, settings.max_file_bytes);
        let target = target.map_err(settings.cannot_read())?;
        // The watch starts before the read, so that no change in between is missed.
        let watch = Watch::new(&target).map_err(|source| Error::Watch {
            path: target.folder.clone(),
            source,
        })?;
        let (place, state) = open(&target, &overlay).map_err(settings.cannot_read())?;
        let mut source = FileSource {
            target,
            place: Some(place),
            watch,
            state,
            overlay,
            report: latest::Sender::new(Arc::default()),
            journal: Journal::default(),
        };
        source.publish();
        Ok(source)
    };
    blocking(read).await.map_err(cannot_read).flatten()
}

/// A source of files that has read them once.
#[derive(Debug)]
pub struct FileSource {
    target: Target,
    /// The identity of the watched folder; `None` while it is missing.
    place: Option<Place>,
    watch: Watch,
    state: State,
    overlay: Overlay,
    report: latest::Sender<Arc<Report>>,
    journal: Journal,
}

impl FileSource {
    /// Returns a receiver of the report.
    #[must_use]
    pub fn report(&self) -> latest::Receiver<Arc<Report>> {
        self.report.subscribe()
    }

    /// Watches the files and writes changes to the overlay, until the drain begins.
    pub async fn run(mut self, mut draining: latest::Receiver<bool>) {
        let mut poll = interval_at(Instant::now() + POLL, POLL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                () = self.watch.changed() => self.catch_up().await,
                _ = poll.tick() => self.poll().await,
            }
        }
    }

    /// Handles the events since the last call.
    async fn catch_up(&mut self) {
        let changes = self.watch.take();
        let Some(at) = changes.since else {
            return;
        };
        if changes.is_lost {
            self.watch_again(at).await;
        } else if self.place.is_some() {
            self.apply(changes, at).await;
        }
        self.publish();
    }

    async fn apply(&mut self, changes: Changes, at: Duration) {
        let Changes {
            done,
            unsure,
            renamed,
            is_near,
            is_unclear,
            ..
        } = changes;
        self.state.rename(&renamed, &mut self.overlay.edit(at));
        if is_unclear || self.state.trouble.is_some() {
            self.scan(at).await;
        } else if is_near {
            let found = fingerprints(self.state.links()).await;
            let jobs = self.state.swapped(&found);
            self.read(jobs, at).await;
        }
        let writing = self.watch.writing();
        let touched = unsure
            .iter()
            .filter(|path| !done.contains_key(*path) && !writing.contains(*path));
        let mut jobs: Vec<Job> = touched
            .map(|path| self.state.job(path, Noticed::Touched))
            .collect();
        for (path, is_there) in done {
            if writing.contains(&path) {
                self.state.unsettle(path);
            } else if is_there {
                jobs.push(self.state.job(&path, Noticed::Complete));
            } else {
                jobs.push(self.state.job(&path, Noticed::Gone));
            }
        }
        self.read(jobs, at).await;
    }

    /// Polls for changes that cause no event.
    async fn poll(&mut self) {
        let at = monotonic();
        let target = self.target.clone();
        match blocking(move || target.place()).await.flatten() {
            Ok(place) if self.place != Some(place) => self.watch_again(at).await,
            Ok(_) if self.state.trouble.is_some() => self.scan(at).await,
            Ok(_) => self.poll_files(at).await,
            Err(error) => self.lose(&error),
        }
        self.publish();
    }

    async fn poll_files(&mut self, at: Duration) {
        let found = fingerprints(self.state.polled()).await;
        let jobs = self.state.poll(found, self.watch.writing());
        self.watch.settle(&jobs);
        self.read(jobs, at).await;
    }

    /// Watches the folder that is now at the path, and scans it.
    async fn watch_again(&mut self, at: Duration) {
        let target = self.target.clone();
        let watched = blocking(move || {
            let watch = Watch::new(&target).map_err(io::Error::other)?;
            target.place().map(|place| (watch, place))
        });
        match watched.await.flatten() {
            Ok((watch, place)) => {
                self.watch = watch;
                self.place = Some(place);
                self.trouble("was replaced by another folder");
                self.scan(at).await;
            }
            Err(error) => self.lose(&error),
        }
    }

    /// Lists the folder, and reads the files that have changed since their last read.
    async fn scan(&mut self, at: Duration) {
        let target = self.target.clone();
        let listing = match blocking(move || target.list()).await.flatten() {
            Ok(listing) => listing,
            Err(error) => return self.trouble(&format!("can't be read: {error}")),
        };
        let writing = self.watch.writing();
        if self.state.trouble.is_some() {
            // A file that is being written may contain the missing objects.
            if listing.keys().any(|path| writing.contains(path)) {
                return;
            }
            // If the new folder is empty, it probably isn't filled or mounted yet.
            if listing.is_empty() && !self.state.is_empty() {
                return self.trouble("was replaced by a folder without manifests");
            }
        }
        self.state.trouble = None;
        let renamed = self.state.renamed(&listing);
        self.state.rename(&renamed, &mut self.overlay.edit(at));
        let jobs = self.state.compare(&listing, writing);
        self.read(jobs, at).await;
    }

    async fn read(&mut self, jobs: Vec<Job>, at: Duration) {
        let Some(place) = self.place.filter(|_| !jobs.is_empty()) else {
            return;
        };
        let target = self.target.clone();
        match blocking(move || target.read_all(place, jobs)).await {
            Ok(Some(readings)) => {
                let mut edit = self.overlay.edit(at);
                self.state
                    .take_all(readings, self.watch.writing(), &mut edit);
            }
            Ok(None) => self.lose(&io::Error::from(io::ErrorKind::NotFound)),
            Err(error) => self.trouble(&format!("can't be read: {error}")),
        }
    }

    fn lose(&mut self, error: &io::Error) {
        self.place = None;
        self.trouble(&format!("can't be reached: {error}"));
    }

    fn trouble(&mut self, what: &str) {
        let reason = format!("{what}; the objects that were read before stay in use");
        self.state.trouble = Some(Problem::of_file(&self.target.folder, reason));
    }

    /// Publishes the report, and logs its changes.
    fn publish(&mut self) {
        let phase = if self.watch.is_quiet() {
            self.state.phase()
        } else {
            Phase::Partial
        };
        self.overlay.edit(monotonic()).set_phase(phase);
        let mut report = self.state.report(self.overlay.counts());
        self.journal.tell(&mut report);
        put(&self.report, Arc::new(report));
    }
}

async fn fingerprints(paths: BTreeSet<Arc<Path>>) -> Listing {
    if paths.is_empty() {
        return Listing::new();
    }
    let ask = |path: Arc<Path>| {
        let fingerprint = fingerprint(&path);
        (path, fingerprint)
    };
    blocking(move || paths.into_iter().map(ask).collect())
        .await
        .unwrap_or_default()
}

/// Runs a function on a thread for blocking calls.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    spawn_blocking(work).await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
