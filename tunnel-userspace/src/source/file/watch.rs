//! What the kernel says of the folder, gathered until someone takes it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use notify::{
    Config, Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode, ModifyKind, RenameMode},
};
use tokio::sync::Notify;

use super::folder::{Job, Target};
use crate::clock::monotonic;

/// How long a file that was renamed is taken to be on its way to its new name. Both are told in
/// one go, unless it left the folder.
const HOLD: Duration = Duration::from_millis(20);

/// A watch over the folder, until it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    _watcher: RecommendedWatcher,
    inbox: Arc<Inbox>,
}

#[derive(Debug, Default)]
struct Inbox {
    changes: Mutex<Changes>,
    notify: Notify,
}

/// What happened in the folder.
#[derive(Clone, Debug, Default)]
pub(super) struct Changes {
    /// Files that were closed after writing, put in place, or removed.
    pub(super) done: BTreeSet<Arc<Path>>,
    /// Files that came up or were touched, and may still be written.
    pub(super) unsure: BTreeSet<Arc<Path>>,
    /// Files that are being written: changed, and not closed since. They stay until they are.
    pub(super) writing: BTreeSet<Arc<Path>>,
    /// Files that lost their names by a rename, by its number, and when. They are held back until
    /// it is known where they went.
    moved: BTreeMap<usize, (Arc<Path>, Duration)>,
    /// Something else changed, that files may be reached through.
    pub(super) is_near: bool,
    /// Events were lost.
    pub(super) is_unclear: bool,
    /// The folder itself is gone from its path.
    pub(super) is_lost: bool,
    /// When the first of these was noticed.
    pub(super) since: Option<Duration>,
}

impl Watch {
    /// Watches a folder, and nothing beneath its folders.
    pub(super) fn new(target: &Target) -> notify::Result<Self> {
        let inbox = Arc::new(Inbox::default());
        let listener = Listener {
            target: target.clone(),
            watched: std::path::absolute(&target.folder)?,
            inbox: Arc::clone(&inbox),
        };
        let handler = move |event| listener.take(event);
        let mut watcher = RecommendedWatcher::new(handler, Config::default())?;
        watcher.watch(&target.folder, RecursiveMode::NonRecursive)?;
        Ok(Self {
            _watcher: watcher,
            inbox,
        })
    }

    /// Waits until something happened.
    pub(super) async fn changed(&self) {
        self.inbox.notify.notified().await;
    }

    /// Takes what happened since the last time.
    pub(super) fn take(&self) -> Changes {
        let mut changes = self.inbox.lock();
        let now = monotonic();
        let left: Vec<usize> = changes
            .moved
            .iter()
            .filter(|(_, (_, at))| now.saturating_sub(*at) >= HOLD)
            .map(|(cookie, _)| *cookie)
            .collect();
        for cookie in left {
            changes.release(cookie);
        }
        let kept = Changes {
            writing: changes.writing.clone(),
            moved: changes.moved.clone(),
            ..Changes::default()
        };
        std::mem::replace(&mut *changes, kept)
    }

    /// How long there is to wait at most for a file that is held back.
    pub(super) fn held(&self) -> Option<Duration> {
        let changes = self.inbox.lock();
        let first = changes.moved.values().map(|(_, at)| *at).min()?;
        Some((first + HOLD).saturating_sub(monotonic()))
    }

    /// Whether no file is being written or held back.
    pub(super) fn is_quiet(&self) -> bool {
        let changes = self.inbox.lock();
        changes.writing.is_empty() && changes.moved.is_empty()
    }

    /// The files that are being written.
    pub(super) fn writing(&self) -> BTreeSet<Arc<Path>> {
        self.inbox.lock().writing.clone()
    }

    /// Takes files that are about to be read to have no writer.
    pub(super) fn settle(&self, jobs: &[Job]) {
        let mut changes = self.inbox.lock();
        for job in jobs {
            changes.writing.remove(&job.path);
        }
    }
}

impl Changes {
    /// Holds a file back no more; says whether it was.
    fn release(&mut self, cookie: usize) -> bool {
        let Some((path, at)) = self.moved.remove(&cookie) else {
            return false;
        };
        self.done.insert(path);
        self.since = Some(self.since.map_or(at, |since| since.min(at)));
        true
    }
}

impl Inbox {
    fn lock(&self) -> MutexGuard<'_, Changes> {
        self.changes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Takes events on the watcher's own thread.
struct Listener {
    target: Target,
    /// The folder as the watcher names it.
    watched: PathBuf,
    inbox: Arc<Inbox>,
}

impl Listener {
    fn take(&self, event: notify::Result<Event>) {
        let mut changes = self.inbox.lock();
        let is_news = match event {
            Ok(event) if event.need_rescan() => {
                changes.writing.clear();
                changes.moved.clear();
                changes.is_unclear = true;
                true
            }
            Ok(event) if self.is_leaving(&event, &mut changes) => {
                drop(changes);
                self.inbox.notify.notify_one();
                return;
            }
            Ok(event) => {
                let cookie = event.tracker();
                let mut is_news = cookie.is_some_and(|cookie| changes.release(cookie));
                for path in &event.paths {
                    is_news |= self.take_path(event.kind, path, &mut changes);
                }
                is_news
            }
            Err(_) => {
                changes.is_unclear = true;
                true
            }
        };
        if is_news {
            changes.since.get_or_insert_with(monotonic);
            drop(changes);
            self.inbox.notify.notify_one();
        }
    }

    /// Takes note of a file that lost its name by a rename, if the event is about one.
    fn is_leaving(&self, event: &Event, changes: &mut Changes) -> bool {
        let is_from = event.kind == EventKind::Modify(ModifyKind::Name(RenameMode::From));
        let (Some(cookie), [path]) = (event.tracker().filter(|_| is_from), &*event.paths) else {
            return false;
        };
        let Some(name) = path.file_name().filter(|name| self.target.counts(name)) else {
            return false;
        };
        let path: Arc<Path> = Arc::from(self.target.folder.join(name));
        changes.writing.remove(&path);
        changes.moved.insert(cookie, (path, monotonic()));
        true
    }

    /// Takes note of an event; says whether there is something to do about it.
    fn take_path(&self, kind: EventKind, path: &Path, changes: &mut Changes) -> bool {
        let is_write = matches!(kind, EventKind::Modify(ModifyKind::Data(_)));
        let is_closed = kind == EventKind::Access(AccessKind::Close(AccessMode::Write));
        if matches!(kind, EventKind::Access(_)) && !is_closed {
            return false;
        }
        if path == self.watched {
            changes.is_lost |= matches!(
                kind,
                EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))
            );
            return changes.is_lost;
        }
        let Some(name) = path.file_name() else {
            return false;
        };
        if !self.target.counts(name) {
            changes.is_near |= !is_write;
            return !is_write;
        }
        let path: Arc<Path> = Arc::from(self.target.folder.join(name));
        if is_write {
            changes.writing.insert(path);
            return false;
        }
        if matches!(
            kind,
            EventKind::Create(_) | EventKind::Modify(ModifyKind::Metadata(_))
        ) {
            changes.unsure.insert(path);
        } else {
            changes.writing.remove(&path);
            changes.done.insert(path);
        }
        true
    }
}
