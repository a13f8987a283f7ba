//! Watches the directory with inotify, and collects the changes until the source takes them.

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

use super::directory::{ManifestPath, ReadJob};
use crate::clock::monotonic;

/// The time to wait for the new name of a renamed file. The kernel reports both names together, unless
/// the file was moved out of the directory.
const RENAME_WAIT: Duration = Duration::from_millis(20);

/// The capacity of the event channel. When it is full, events stay in the kernel's queue, and an overflow of
/// that queue is reported.
const EVENT_BUFFER: usize = 1024;

/// An inotify watch on the directory. Dropping this ends the watch.
#[derive(Debug)]
pub(super) struct DirectoryWatch {
    _watcher: RecommendedWatcher,
    /// The events, each with the time when it was received.
    events: mpsc::Receiver<(Duration, notify::Result<Event>)>,
    target: ManifestPath,
    /// The directory's path, as it appears in events.
    watched: PathBuf,
    changes: DirectoryChanges,
    /// Files that are being written: they have been changed, but not closed since.
    writing: BTreeSet<Arc<Path>>,
    /// Renamed files whose new names are not known yet: the old path and the time of the event, keyed by
    /// rename cookie.
    renaming: BTreeMap<usize, (Arc<Path>, Duration)>,
}

/// The changes in the directory since they were last taken.
#[derive(Debug, Default)]
pub(super) struct DirectoryChanges {
    /// The files that a writer closed, or that were renamed or removed. The value is true if the file existed
    /// afterwards.
    pub(super) settled: BTreeMap<Arc<Path>, bool>,
    /// The files that were created or touched, and may still be incomplete.
    pub(super) touched: BTreeSet<Arc<Path>>,
    /// The old and new paths of each renamed file, in chronological order.
    pub(super) renamed: Vec<(Arc<Path>, Arc<Path>)>,
    /// True if a directory entry other than a manifest changed. A manifest that is a symbolic link may lead
    /// through it.
    pub(super) other_entry_changed: bool,
    /// True if any events were lost.
    pub(super) events_lost: bool,
    /// True if the directory itself was removed or renamed.
    pub(super) directory_lost: bool,
    /// The monotonic time of the first change.
    pub(super) noticed_at: Option<Duration>,
}

impl DirectoryChanges {
    /// Records that a file was removed or renamed at the given time.
    fn record_removal(&mut self, path: Arc<Path>, at: Duration) {
        self.settled.insert(path, false);
        self.noticed_at = Some(self.noticed_at.map_or(at, |since| since.min(at)));
    }
}

impl DirectoryWatch {
    /// Starts watching the directory, but not its subdirectories.
    pub(super) fn new(target: &ManifestPath) -> notify::Result<Self> {
        let (sender, events) = mpsc::channel(EVENT_BUFFER);
        let handler = move |event: notify::Result<Event>| {
            if event.as_ref().map_or(true, is_wanted) {
                // Sending fails only after the watch has been dropped.
                drop(sender.blocking_send((monotonic(), event)));
            }
        };
        let mut watcher = RecommendedWatcher::new(handler, Config::default())?;
        watcher.watch(&target.directory, RecursiveMode::NonRecursive)?;
        Ok(Self {
            _watcher: watcher,
            events,
            target: target.clone(),
            watched: std::path::absolute(&target.directory)?,
            changes: DirectoryChanges::default(),
            writing: BTreeSet::new(),
            renaming: BTreeMap::new(),
        })
    }

    /// Waits until there is a change, or until it is too late to expect a renamed file's new name.
    pub(super) async fn changed(&mut self) {
        while self.changes.noticed_at.is_none() {
            let event = self.events.recv();
            let event = match self
                .renaming
                .values()
                .map(|(_, at)| *at + RENAME_WAIT)
                .min()
            {
                None => event.await,
                // If the wait is already over, the timeout is zero.
                Some(due) => match timeout(due.saturating_sub(monotonic()), event).await {
                    Ok(event) => event,
                    Err(_) => return,
                },
            };
            match event {
                Some((at, event)) => self.record_event(at, event),
                None => std::future::pending().await,
            }
        }
    }

    /// Takes the changes that have been collected since the last call.
    pub(super) fn take(&mut self) -> DirectoryChanges {
        self.record_pending();
        let now = monotonic();
        let is_overdue = |_: &usize, (_, at): &mut (_, Duration)| now >= *at + RENAME_WAIT;
        for (_, (path, at)) in self.renaming.extract_if(.., is_overdue) {
            self.changes.record_removal(path, at);
        }
        std::mem::take(&mut self.changes)
    }

    /// Returns true if no file is being written and no renamed file is waiting for its new name.
    pub(super) fn is_idle(&mut self) -> bool {
        self.record_pending();
        self.writing.is_empty() && self.renaming.is_empty()
    }

    /// Returns the files that are being written.
    pub(super) fn writing(&mut self) -> &BTreeSet<Arc<Path>> {
        self.record_pending();
        &self.writing
    }

    /// Marks files as closed because they are about to be read.
    pub(super) fn mark_closed(&mut self, jobs: &[ReadJob]) {
        for job in jobs {
            self.writing.remove(&job.path);
        }
    }

    /// Records all buffered events.
    fn record_pending(&mut self) {
        while let Ok((at, event)) = self.events.try_recv() {
            self.record_event(at, event);
        }
    }

    fn record_event(&mut self, at: Duration, event: notify::Result<Event>) {
        let mut has_change = false;
        match event {
            Ok(event) if !event.need_rescan() => {
                for path in &event.paths {
                    has_change |= self.record_path(at, &event, path);
                }
            }
            Ok(_) | Err(_) => {
                self.writing.clear();
                self.renaming.clear();
                self.changes.events_lost = true;
                has_change = true;
            }
        }
        if has_change {
            self.changes.noticed_at.get_or_insert(at);
        }
    }

    /// Records an event for one path. Returns true if files must be read because of it.
    fn record_path(&mut self, at: Duration, event: &Event, path: &Path) -> bool {
        let (kind, changes) = (event.kind, &mut self.changes);
        if path == self.watched {
            changes.directory_lost |= matches!(
                kind,
                EventKind::Remove(_) | EventKind::Modify(ModifyKind::Name(_))
            );
            return changes.directory_lost;
        }
        let Some(name) = path.file_name() else {
            return false;
        };
        // The file's old path, if this event reports its new one.
        let old = event
            .tracker()
            .and_then(|cookie| self.renaming.remove(&cookie));
        if let Some((from, at)) = &old {
            changes.record_removal(Arc::clone(from), *at);
        }
        let is_write = matches!(kind, EventKind::Modify(ModifyKind::Data(_)));
        if !self.target.is_manifest(name) {
            changes.other_entry_changed |= !is_write;
            return !is_write;
        }
        let path: Arc<Path> = Arc::from(self.target.directory.join(name));
        if is_write {
            self.writing.insert(path);
            return false;
        }
        if is_rename(event, RenameMode::From)
            && let Some(cookie) = event.tracker()
        {
            self.writing.remove(&path);
            self.renaming.insert(cookie, (path, at));
            return false;
        }
        if let Some((from, _)) = old {
            changes.renamed.push((from, Arc::clone(&path)));
        }
        if matches!(
            kind,
            EventKind::Create(_) | EventKind::Modify(ModifyKind::Metadata(_))
        ) {
            changes.touched.insert(path);
        } else {
            self.writing.remove(&path);
            let exists = !matches!(kind, EventKind::Remove(_));
            changes.settled.insert(path, exists);
        }
        true
    }
}

/// Returns true if an event is needed. Events for opening and reading files are not needed, nor is the event
/// with both names of a renamed file, since there is also an event for each name.
fn is_wanted(event: &Event) -> bool {
    let is_closed = event.kind == EventKind::Access(AccessKind::Close(AccessMode::Write));
    (is_closed || !event.kind.is_access()) && !is_rename(event, RenameMode::Both)
}

fn is_rename(event: &Event, mode: RenameMode) -> bool {
    event.kind == EventKind::Modify(ModifyKind::Name(mode))
}
