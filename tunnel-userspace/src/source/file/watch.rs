//! What the kernel says of the folder, gathered until someone takes it.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use notify::{
    Config, Event, EventKind, RecommendedWatcher, RecursiveMode, Watcher as _,
    event::{AccessKind, AccessMode, ModifyKind, RenameMode},
};
use tokio::{sync::mpsc, time::timeout};

use super::folder::{Job, Target};
use crate::clock::monotonic;

/// How long a file that was renamed is taken to be on its way to its new name. Both are told in
/// one go, unless it left the folder.
const HOLD: Duration = Duration::from_millis(20);

/// How many events wait to be gathered. What doesn't fit waits in the kernel, which says so if it loses
/// some.
const WAITING: usize = 1024;

/// A watch over the folder, until it is dropped.
#[derive(Debug)]
pub(super) struct Watch {
    _watcher: RecommendedWatcher,
    /// Each with the time when it was noticed.
    events: mpsc::Receiver<(Duration, notify::Result<Event>)>,
    target: Target,
    /// The folder as the watcher names it.
    watched: PathBuf,
    changes: Changes,
    /// Files that are being written: changed, and not closed since. They stay until they are.
    writing: BTreeSet<Arc<Path>>,
    /// Files that lost their names by a rename, by its number, and when. They are held back until
    /// it is known where they went.
    moved: BTreeMap<usize, (Arc<Path>, Duration)>,
}

/// What happened in the folder.
#[derive(Debug, Default)]
pub(super) struct Changes {
    /// Files that were closed after writing, put in place, or removed; each with whether it was there
    /// then.
    pub(super) done: BTreeMap<Arc<Path>, bool>,
    /// Files that came up or were touched, and may still be written.
    pub(super) unsure: BTreeSet<Arc<Path>>,
    /// The old and the new name of each file that was renamed, in their order.
    pub(super) renamed: Vec<(Arc<Path>, Arc<Path>)>,
    /// Something else changed, that files may be reached through.
    pub(super) is_near: bool,
    /// Events were lost.
    pub(super) is_unclear: bool,
    /// The folder itself is gone from its path.
    pub(super) is_lost: bool,
    /// When the first of these was noticed.
    pub(super) since: Option<Duration>,
}

impl Changes {
    /// Takes note that a file was gone from its name at that time.
    fn leave(&mut self, path: Arc<Path>, at: Duration) {
        self.done.insert(path, false);
        self.since = Some(self.since.map_or(at, |since| since.min(at)));
    }
}

impl Watch {
    /// Watches a folder, and nothing beneath its folders.
    pub(super) fn new(target: &Target) -> notify::Result<Self> {
        let (sender, events) = mpsc::channel(WAITING);
        let handler = move |event: notify::Result<Event>| {
            if event.as_ref().map_or(true, is_wanted) {
                // Nobody takes it once the watch is dropped.
                drop(sender.blocking_send((monotonic(), event)));
            }
        };
        let mut watcher = RecommendedWatcher::new(handler, Config::default())?;
        watcher.watch(&target.folder, RecursiveMode::NonRecursive)?;
        Ok(Self {
            _watcher: watcher,
            events,
            target: target.clone(),
            watched: std::path::absolute(&target.folder)?,
            changes: Changes::default(),
            writing: BTreeSet::new(),
            moved: BTreeMap::new(),
        })
    }

    /// Waits until something happened, or a file need not be held back any longer.
    pub(super) async fn changed(&mut self) {
        while self.changes.since.is_none() {
            let event = self.events.recv();
            let event = match self.moved.values().map(|(_, at)| *at + HOLD).min() {
                None => event.await,
                // Overdue, there is no time left to wait.
                Some(due) => match timeout(due.saturating_sub(monotonic()), event).await {
                    Ok(event) => event,
                    Err(_) => return,
                },
            };
            match event {
                Some((at, event)) => self.note(at, event),
                None => std::future::pending().await,
            }
        }
    }

    /// Takes what happened since the last time.
    pub(super) fn take(&mut self) -> Changes {
        self.gather();
        let now = monotonic();
        let is_left = |_: &usize, (_, at): &mut (_, Duration)| now >= *at + HOLD;
        for (_, (path, at)) in self.moved.extract_if(.., is_left) {
            self.changes.leave(path, at);
        }
        std::mem::take(&mut self.changes)
    }

    /// Whether no file is being written or held back.
    pub(super) fn is_quiet(&mut self) -> bool {
        self.gather();
        self.writing.is_empty() && self.moved.is_empty()
    }

    /// The files that are being written.
    pub(super) fn writing(&mut self) -> &BTreeSet<Arc<Path>> {
        self.gather();
        &self.writing
    }

    /// Takes files that are about to be read to have no writer.
    pub(super) fn settle(&mut self, jobs: &[Job]) {
        for job in jobs {
            self.writing.remove(&job.path);
        }
    }

    /// Takes note of the events that wait.
    fn gather(&mut self) {
        while let Ok((at, event)) = self.events.try_recv() {
            self.note(at, event);
        }
    }

    fn note(&mut self, at: Duration, event: notify::Result<Event>) {
        let mut is_news = false;
        match event {
            Ok(event) if !event.need_rescan() => {
                for path in &event.paths {
                    is_news |= self.note_path(at, &event, path);
                }
            }
            Ok(_) | Err(_) => {
                self.writing.clear();
                self.moved.clear();
                self.changes.is_unclear = true;
                is_news = true;
            }
        }
        if is_news {
            self.changes.since.get_or_insert(at);
        }
    }

    /// Takes note of an event; says whether there is something to do about it.
    fn note_path(&mut self, at: Duration, event: &Event, path: &Path) -> bool {
        let (kind, changes) = (event.kind, &mut self.changes);
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
        // The name that the file had before.
        let left = event
            .tracker()
            .and_then(|cookie| self.moved.remove(&cookie));
        if let Some((from, at)) = &left {
            changes.leave(Arc::clone(from), *at);
        }
        let is_write = matches!(kind, EventKind::Modify(ModifyKind::Data(_)));
        if !self.target.counts(name) {
            changes.is_near |= !is_write;
            return !is_write;
        }
        let path: Arc<Path> = Arc::from(self.target.folder.join(name));
        if is_write {
            self.writing.insert(path);
            return false;
        }
        if is_kind(event, RenameMode::From)
            && let Some(cookie) = event.tracker()
        {
            self.writing.remove(&path);
            self.moved.insert(cookie, (path, at));
            return false;
        }
        if let Some((from, _)) = left {
            changes.renamed.push((from, Arc::clone(&path)));
        }
        if matches!(
            kind,
            EventKind::Create(_) | EventKind::Modify(ModifyKind::Metadata(_))
        ) {
            changes.unsure.insert(path);
        } else {
            self.writing.remove(&path);
            let is_there = !matches!(kind, EventKind::Remove(_));
            changes.done.insert(path, is_there);
        }
        true
    }
}

/// Whether an event tells something: that a file is read tells nothing, and both names of a rename were
/// told one by one.
fn is_wanted(event: &Event) -> bool {
    let is_closed = event.kind == EventKind::Access(AccessKind::Close(AccessMode::Write));
    (is_closed || !event.kind.is_access()) && !is_kind(event, RenameMode::Both)
}

fn is_kind(event: &Event, mode: RenameMode) -> bool {
    event.kind == EventKind::Modify(ModifyKind::Name(mode))
}
