//! Threads that run sessions, each with its own runtime. All of a session's streams run on the same thread,
//! so that bytes pass between tasks without waking another thread.

use std::{io, num::NonZero, sync::Arc, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};
use tracing::warn;

/// The threads that run sessions.
///
/// A thread exits once this value and all handles to the thread have been dropped.
#[derive(Debug)]
pub(super) struct SessionThreads {
    handles: Vec<ThreadHandle>,
}

/// A handle to the thread that runs a session. It keeps the thread running.
#[derive(Clone, Debug)]
pub(super) struct ThreadHandle {
    runtime: Handle,
    /// Stops the thread when its last handle is dropped; `None` for the caller's own runtime.
    shutdown: Arc<Option<oneshot::Sender<()>>>,
}

impl SessionThreads {
    /// Starts up to `max` threads, but no more than there are CPUs.
    pub(super) fn start(max: usize) -> Self {
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        let mut handles = Vec::new();
        for _ in 0..max.min(cpus) {
            match start_thread() {
                Ok(handle) => handles.push(handle),
                Err(error) => {
                    warn!(%error, threads = handles.len(), "cannot start another session thread");
                    break;
                }
            }
        }
        Self { handles }
    }

    /// Returns a handle to the thread that has the fewest handles, or to the caller's runtime if no thread
    /// could be started.
    pub(super) fn least_loaded(&self) -> ThreadHandle {
        let count = |handle: &&ThreadHandle| Arc::strong_count(&handle.shutdown);
        let least_loaded = self.handles.iter().min_by_key(count).cloned();
        least_loaded.unwrap_or_else(|| ThreadHandle {
            runtime: Handle::current(),
            shutdown: Arc::default(),
        })
    }
}

impl ThreadHandle {
    /// Returns the thread's runtime.
    pub(super) const fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

fn start_thread() -> io::Result<ThreadHandle> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let (shutdown, dropped) = oneshot::channel::<()>();
    let run = move || {
        // This returns when the sender is dropped; nothing is ever sent.
        drop(runtime.block_on(dropped));
        // This does not wait for blocking threads, in which a DNS lookup may hang.
        runtime.shutdown_background();
    };
    thread::Builder::new()
        .name("session".to_owned())
        .spawn(run)?;
    Ok(ThreadHandle {
        runtime: handle,
        shutdown: Arc::new(Some(shutdown)),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn thread_of(handle: &ThreadHandle) -> thread::ThreadId {
        let id = handle.runtime().spawn(async { thread::current().id() });
        id.await.expect("it runs")
    }

    #[tokio::test]
    async fn sessions_are_spread_over_the_threads_and_a_free_thread_is_reused() {
        let threads = SessionThreads {
            handles: (0..2).map(|_| start_thread().expect("a thread")).collect(),
        };
        let handle = || threads.least_loaded();
        let (one, two) = (handle(), handle());
        let first = thread_of(&one).await;

        assert_ne!(thread_of(&two).await, first);
        assert_ne!(thread::current().id(), first, "a thread of its own");
        drop(one);
        assert_eq!(thread_of(&handle()).await, first);
    }

    #[tokio::test]
    async fn a_thread_runs_as_long_as_it_has_a_handle() {
        let threads = SessionThreads::start(1);
        let handle = threads.least_loaded();
        let (dropped_with_task, is_dropped) = oneshot::channel::<()>();
        drop(threads);
        handle.runtime().spawn(async move {
            std::future::pending::<()>().await;
            drop(dropped_with_task);
        });
        thread_of(&handle).await;

        drop(handle);

        let is_dropped = tokio::time::timeout(Duration::from_secs(5), is_dropped);
        is_dropped
            .await
            .expect("its tasks are dropped")
            .unwrap_err();
    }
}
