//! A folder of plain Kubernetes manifests, or one file, watched.

mod claims;
mod documents;
mod folder;
mod statement;
mod view;
mod watch;

use std::{
    collections::BTreeSet,
    io,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use folder::{Fingerprint, Place, Target};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch as latest,
    task::spawn_blocking,
    time::{Instant, MissedTickBehavior, interval_at, sleep},
};
use view::View;
use watch::{Changes, Watch};

use super::{Overlay, Problem, Report, Store, journal::Journal, store::Phase};
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
    /// A folder or a file, with everything else at its default.
    pub fn new(path: impl Into<PathBuf>) -> Self {
        Self {
            path: path.into(),
            ..Self::default()
        }
    }
}

/// How often to look for what no event tells of.
const LOOK: Duration = Duration::from_secs(1);

/// How often a file is looked at that is being written while the folder is read for the first
/// time. What is missing from the first whole set counts as deleted, so it is worth waiting for.
const FIRST_LOOKS: u32 = 100;
const FIRST_PAUSE: Duration = Duration::from_millis(20);

/// Why a source of files can't start.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The folder or file isn't there, or can't be read.
    #[error("cannot read manifests in {path}")]
    Read {
        /// The folder or file.
        path: PathBuf,
        /// Why.
        #[source]
        source: io::Error,
    },
    /// The folder can't be watched.
    #[error("cannot watch manifests in {path}")]
    Watch {
        /// The folder.
        path: PathBuf,
        /// Why.
        #[source]
        source: notify::Error,
    },
}

/// Reads a folder or a file once.
///
/// # Errors
///
/// If the folder or file isn't there or can't be read. What is wrong inside is a [`Problem`].
pub fn read(path: &Path) -> Result<(Update, Vec<Problem>), Error> {
    let mut store = Store::default();
    let opened = open(&Settings::new(path), &store.overlay(), |_| Ok(()))?;
    let problems = opened.view.problems();
    Ok((store.take_update().unwrap_or_default(), problems))
}

/// Reads two versions of a file. Returns whether the second is understood beside the first as it is alone.
pub(crate) fn reads_alike(first: &str, second: &str) -> bool {
    let (_, memory) = statement::of_yaml(first, None);
    let beside = statement::of_yaml(second, Some(&memory)).0;
    statement::of_json(second);
    beside == statement::of_yaml(second, None).0
}

/// A folder that was read for the first time.
struct Opened<W> {
    target: Target,
    place: Place,
    view: View,
    watch: W,
}

/// Reads a folder for the first time. The watch is there before, so that nothing falls between.
fn open<W>(
    settings: &Settings,
    overlay: &Overlay,
    watch: impl FnOnce(&Target) -> Result<W, Error>,
) -> Result<Opened<W>, Error> {
    let cannot_read = |source| Error::Read {
        path: settings.path.clone(),
        source,
    };
    let at = monotonic();
    let target = Target::new(&settings.path, settings.max_file_bytes).map_err(cannot_read)?;
    let watch = watch(&target)?;
    let place = target.place().map_err(cannot_read)?;
    let mut view = View::default();
    for look in 0..FIRST_LOOKS {
        let listing = target.list().map_err(cannot_read)?;
        let jobs = view.compare(listing, &BTreeSet::new());
        if jobs.is_empty() {
            break;
        }
        let batch = target.read_all(place, &jobs).unwrap_or_default();
        let is_torn = batch.is_torn();
        view.take_all(batch, &BTreeSet::new(), &mut overlay.edit(at));
        if look > 0 && !is_torn && !view.is_unsettled() {
            break;
        }
        if view.is_unsettled() {
            pause();
        }
    }
    overlay.edit(at).set_phase(view.phase());
    Ok(Opened {
        target,
        place,
        view,
        watch,
    })
}

/// Waits for a writer to go on.
#[expect(
    clippy::disallowed_methods,
    reason = "a blocking thread waits, before anything is served"
)]
fn pause() {
    std::thread::sleep(FIRST_PAUSE);
}

/// Starts to watch a folder or a file, and reads it. [`FileSource::run`] goes on from there.
///
/// # Errors
///
/// If the folder or file isn't there, or can't be read or watched.
pub async fn start(settings: Settings, overlay: Overlay) -> Result<FileSource, Error> {
    let path = settings.path.clone();
    let watch = |target: &Target| {
        Watch::new(target).map_err(|source| Error::Watch {
            path: target.folder.clone(),
            source,
        })
    };
    let opened = blocking(move || open(&settings, &overlay, watch).map(|opened| (opened, overlay)))
        .await
        .map_err(|source| Error::Read { path, source })?;
    let (opened, overlay) = opened?;
    let Opened {
        target,
        place,
        view,
        watch,
    } = opened;
    let mut source = FileSource {
        target,
        place: Some(place),
        watch,
        view,
        overlay,
        report: latest::Sender::new(Arc::default()),
        journal: Journal::default(),
    };
    source.publish();
    Ok(source)
}

/// A source of files, which has read them once.
#[derive(Debug)]
pub struct FileSource {
    target: Target,
    /// The folder that is watched; nothing while it is gone.
    place: Option<Place>,
    watch: Watch,
    view: View,
    overlay: Overlay,
    report: latest::Sender<Arc<Report>>,
    journal: Journal,
}

impl FileSource {
    /// What has been read, as it stands at any time.
    #[must_use]
    pub fn report(&self) -> latest::Receiver<Arc<Report>> {
        self.report.subscribe()
    }

    /// Writes what changes to the overlay until told to stop.
    pub async fn run(mut self, mut draining: latest::Receiver<bool>) {
        let mut look = interval_at(Instant::now() + LOOK, LOOK);
        look.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            let held = self.watch.held();
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                () = self.watch.changed() => self.catch_up().await,
                () = sleep(held.unwrap_or_default()), if held.is_some() => self.catch_up().await,
                _ = look.tick() => self.look_around().await,
            }
        }
    }

    /// Reads what the kernel told of.
    async fn catch_up(&mut self) {
        let changes = self.watch.take();
        if changes.since.is_none() {
            return;
        }
        let at = changes.since.unwrap_or_else(monotonic);
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
            writing,
            is_near,
            is_unclear,
            is_lost: _,
            since: _,
            ..
        } = changes;
        if is_unclear || self.view.has_trouble() {
            self.scan(&writing, at).await;
        } else if is_near {
            let looks = self.fingerprints(self.view.links()).await;
            let jobs = self.view.swapped(looks);
            self.read(jobs, at).await;
        }
        let mut jobs = Vec::with_capacity(done.len());
        for path in unsure
            .difference(&done)
            .filter(|path| !writing.contains(*path))
        {
            jobs.push(self.view.job(Arc::clone(path), true));
        }
        for path in done {
            if writing.contains(&path) {
                self.view.unsettle(path);
            } else {
                jobs.push(self.view.job(path, false));
            }
        }
        self.read(jobs, at).await;
    }

    /// Looks for what no event tells of.
    async fn look_around(&mut self) {
        let at = monotonic();
        let target = self.target.clone();
        match blocking(move || target.place()).await.flatten() {
            Ok(place) if self.place != Some(place) => self.watch_again(at).await,
            Ok(_) if self.view.has_trouble() => {
                let writing = self.watch.writing();
                self.scan(&writing, at).await;
            }
            Ok(_) => self.look_at_files(at).await,
            Err(error) => self.lose(&error),
        }
        self.publish();
    }

    async fn look_at_files(&mut self, at: Duration) {
        let looks = self.fingerprints(self.view.to_look_at()).await;
        let jobs = self.view.look(looks, &self.watch.writing());
        self.watch.settle(&jobs);
        self.read(jobs, at).await;
    }

    async fn fingerprints(&self, paths: Vec<Arc<Path>>) -> Vec<(Arc<Path>, Option<Fingerprint>)> {
        if paths.is_empty() {
            return Vec::new();
        }
        let look = |path: Arc<Path>| {
            let fingerprint = folder::fingerprint(&path);
            (path, fingerprint)
        };
        blocking(move || paths.into_iter().map(look).collect())
            .await
            .unwrap_or_default()
    }

    /// Watches the folder that has the path now, and reads it.
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
                self.scan(&BTreeSet::new(), at).await;
            }
            Err(error) => self.lose(&error),
        }
    }

    /// Lists the folder, and reads what is not as it was read.
    async fn scan(&mut self, writing: &BTreeSet<Arc<Path>>, at: Duration) {
        let target = self.target.clone();
        match blocking(move || target.list()).await.flatten() {
            // What is being written may be what is missing.
            Ok(listing)
                if self.view.has_trouble()
                    && listing.iter().any(|(path, _)| writing.contains(path)) => {}
            // More likely the folder isn't filled or mounted yet than that all is to go.
            Ok(listing)
                if listing.is_empty() && self.view.has_trouble() && !self.view.is_empty() =>
            {
                self.trouble("was replaced by one without manifests");
            }
            Ok(listing) => {
                self.view.set_trouble(None);
                let jobs = self.view.compare(listing, writing);
                self.read(jobs, at).await;
            }
            Err(error) => self.trouble(&format!("can't be read: {error}")),
        }
    }

    async fn read(&mut self, jobs: Vec<folder::Job>, at: Duration) {
        let Some(place) = self.place.filter(|_| !jobs.is_empty()) else {
            return;
        };
        let target = self.target.clone();
        match blocking(move || target.read_all(place, &jobs)).await {
            Ok(Some(batch)) => {
                let mut edit = self.overlay.edit(at);
                self.view.take_all(batch, &self.watch.writing(), &mut edit);
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
        self.view
            .set_trouble(Some(Problem::of_file(&self.target.folder, reason)));
    }

    /// Tells the log and the readers of the report what is new.
    fn publish(&mut self) {
        let phase = if self.watch.is_quiet() {
            self.view.phase()
        } else {
            Phase::Partial
        };
        self.overlay.edit(monotonic()).set_phase(phase);
        let mut report = self.view.report(self.overlay.counts());
        self.journal.tell(&mut report);
        put(&self.report, Arc::new(report));
    }
}

/// Runs something that blocks.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> io::Result<T> {
    spawn_blocking(work).await.map_err(io::Error::other)
}

#[cfg(test)]
mod tests;
