//! Reads large files in the background.

use std::{
    collections::{BTreeMap, HashMap},
    future, io,
    path::Path,
    sync::Arc,
    time::Duration,
};

use tokio::{
    sync::Semaphore,
    task::{Id, JoinSet, spawn_blocking},
};

use super::directory::{ManifestPath, ReadJob, ReadLimits, ReadResult};
use crate::source::fingerprint::FileId;

/// The maximum number of files that are read in the background at a time, because each may take much memory.
const MAX_READS: usize = 2;

/// The files that are being read in the background. A file is read by at most one thread at a time.
#[derive(Debug)]
pub(super) struct BackgroundReads {
    permits: Arc<Semaphore>,
    running: JoinSet<Option<ReadResult>>,
    paths: HashMap<Id, Arc<Path>>,
    reads: BTreeMap<Arc<Path>, RunningRead>,
}

/// The state of a read that has not finished yet.
#[derive(Clone, Copy, Debug)]
struct RunningRead {
    /// The monotonic time of the change that caused the read.
    at: Duration,
    /// True if the file has changed since the read was started, and must be read again.
    is_outdated: bool,
    /// True if the result belongs to another file, and must not be recorded.
    is_discarded: bool,
}

/// A read that has finished.
#[derive(Debug)]
pub(super) struct FinishedRead {
    pub(super) path: Arc<Path>,
    /// The result; `None` if it must not be recorded.
    pub(super) result: Option<ReadResult>,
    pub(super) at: Duration,
    /// True if the file must be read again.
    pub(super) is_outdated: bool,
}

impl Default for BackgroundReads {
    fn default() -> Self {
        Self {
            permits: Arc::new(Semaphore::new(MAX_READS)),
            running: JoinSet::new(),
            paths: HashMap::new(),
            reads: BTreeMap::new(),
        }
    }
}

impl BackgroundReads {
    /// Starts to read a file. If the file is already being read, it is read again afterwards.
    pub(super) fn start(
        &mut self,
        target: &ManifestPath,
        directory_id: FileId,
        job: ReadJob,
        at: Duration,
    ) {
        if let Some(running) = self.reads.get_mut(&job.path) {
            running.is_outdated = true;
            return;
        }
        let read = RunningRead {
            at,
            is_outdated: false,
            is_discarded: false,
        };
        self.reads.insert(Arc::clone(&job.path), read);
        let (target, path) = (target.clone(), Arc::clone(&job.path));
        let permits = Arc::clone(&self.permits);
        let read = move || {
            let results = target.read_all(directory_id, vec![job], ReadLimits::NONE);
            results?.pop().map(|(_, result)| result)
        };
        let task = self.running.spawn(async move {
            // The semaphore is never closed.
            let _permit = permits.acquire_owned().await.ok()?;
            spawn_blocking(read).await.ok()?
        });
        self.paths.insert(task.id(), path);
    }

    /// Discards the results for files that have been renamed, removed or read meanwhile.
    pub(super) fn discard<P: AsRef<Path>>(&mut self, paths: impl Iterator<Item = P>) {
        for path in paths {
            if let Some(running) = self.reads.get_mut(path.as_ref()) {
                running.is_discarded = true;
            }
        }
    }

    /// Discards the results for all files, because another directory is now at the path.
    pub(super) fn discard_all(&mut self) {
        for running in self.reads.values_mut() {
            running.is_discarded = true;
        }
    }

    /// Returns true if no file is being read.
    pub(super) fn is_idle(&self) -> bool {
        self.reads.is_empty()
    }

    /// Waits for the next read to finish. Waits forever if no file is being read.
    pub(super) async fn next(&mut self) -> Option<FinishedRead> {
        let Some(finished) = self.running.join_next_with_id().await else {
            return future::pending().await;
        };
        let (id, result) = finished.unwrap_or_else(|error| {
            let id = error.id();
            let reason = format!("can't be read: {}", io::Error::other(error));
            let fingerprint = None;
            (
                id,
                Some(ReadResult::Unreadable {
                    fingerprint,
                    reason,
                }),
            )
        });
        let path = self.paths.remove(&id)?;
        let running = self.reads.remove(&path)?;
        Some(FinishedRead {
            path,
            result: result.filter(|_| !running.is_discarded),
            at: running.at,
            is_outdated: running.is_outdated || running.is_discarded,
        })
    }
}
