//! A folder of plain Kubernetes manifests, or one file, watched.

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

/// A folder or file of manifests.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Settings {
    /// The folder or file.
    pub path: PathBuf,
    /// The size up to which a file is read, in bytes.
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
    /// Returns the settings for a folder or a file, with all other values at their defaults.
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

/// The interval of polls for changes without an event.
const POLL: Duration = Duration::from_secs(1);

/// The number of polls, during the first read of the folder, for a file that is being written. An object
/// missing from the first complete set counts as deleted, so the wait is worthwhile.
const FIRST_POLLS: u32 = 100;
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// The error of a source of files that can't start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder or file isn't there, or can't be read.
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

/// Reads a folder or a file once.
///
/// # Errors
///
/// The folder or file does not exist or can't be read. Errors in its content are returned as
/// [`Problem`]s.
pub fn read(path: &Path) -> Result<(Update, Vec<Problem>), Error> {
    let mut store = Store::default();
    let settings = Settings::new(path);
    let target = Target::new(path, settings.max_file_bytes);
    let opened = target.and_then(|target| open(&target, &store.overlay()));
    let (_, state) = opened.map_err(settings.cannot_read())?;
    let problems = state.problems();
    Ok((store.take_update().unwrap_or_default(), problems))
}

/// Reads two versions of a file. Returns true if the second, read with the cache of the first, equals
/// the second read alone.
pub(crate) fn reads_alike(first: &str, second: &str) -> bool {
    let (_, cache) = parse::yaml(first, &Cache::default());
    let beside = parse::yaml(second, &cache).0;
    parse::json(second);
    beside == parse::yaml(second, &Cache::default()).0
}

/// Reads a folder for the first time.
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

/// Gives a writer time to finish.
#[expect(
    clippy::disallowed_methods,
    reason = "a blocking thread waits, before anything is served"
)]
fn pause() {
    std::thread::sleep(FIRST_PAUSE);
}

/// Starts to watch a folder or a file, and reads it. [`FileSource::run`] continues from there.
///
/// # Errors
///
/// The folder or file does not exist, or can't be read or watched.
pub async fn start(settings: Settings, overlay: Overlay) -> Result<FileSource, Error> {
    let cannot_read = settings.cannot_read();
    let read = move || {
        let target = Target::new(&settings.path, settings.max_file_bytes);
        let target = target.map_err(settings.cannot_read())?;
        // The watch exists before the folder is read, so that no change between the two is lost.
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

/// A source of files, after its first read.
#[derive(Debug)]
pub struct FileSource {
    target: Target,
    /// The watched folder; `None` while it is missing.
    place: Option<Place>,
    watch: Watch,
    state: State,
    overlay: Overlay,
    report: latest::Sender<Arc<Report>>,
    journal: Journal,
}

impl FileSource {
    /// Follows the report.
    #[must_use]
    pub fn report(&self) -> latest::Receiver<Arc<Report>> {
        self.report.subscribe()
    }

    /// Writes changes to the overlay until the drain begins.
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

    /// Reads the files that events name.
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

    /// Polls for changes without an event.
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

    /// Watches the folder that is now at the path, and reads it.
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
                self.trouble("is another folder now");
                self.scan(at).await;
            }
            Err(error) => self.lose(&error),
        }
    }

    /// Lists the folder, and reads the files that differ from their last read.
    async fn scan(&mut self, at: Duration) {
        let target = self.target.clone();
        let listing = match blocking(move || target.list()).await.flatten() {
            Ok(listing) => listing,
            Err(error) => return self.trouble(&format!("can't be read: {error}")),
        };
        let writing = self.watch.writing();
        if self.state.trouble.is_some() {
            // A file that is being written may hold the missing objects.
            if listing.keys().any(|path| writing.contains(path)) {
                return;
            }
            // An empty folder is more likely not filled or mounted yet than emptied.
            if listing.is_empty() && !self.state.is_empty() {
                return self.trouble("was replaced by one without manifests");
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
        let reason = format!("{what}; what was read before stays");
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

/// Runs a blocking function.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    spawn_blocking(work).await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
