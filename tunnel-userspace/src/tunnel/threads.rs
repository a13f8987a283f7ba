//! Threads for sessions, each with a runtime of its own. All streams of a session run on one thread, so
//! that bytes pass between tasks without waking another thread.

use std::{io, num::NonZero, sync::Arc, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};
use tracing::warn;

/// The threads that run sessions.
///
/// A thread ends once this and all handles of its sessions are dropped.
#[derive(Debug)]
pub(super) struct Threads {
    seats: Vec<Seat>,
}

/// A handle of the thread that runs a session; keeps the thread running.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    runtime: Handle,
    /// Ends the thread when its last handle is dropped; none for a runtime that is not one of ours.
    end: Arc<Option<oneshot::Sender<()>>>,
}

impl Threads {
    /// Starts `most` threads, but no more than there are CPUs.
    pub(super) fn start(most: usize) -> Self {
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        let mut seats = Vec::new();
        for _ in 0..most.min(cpus) {
            match start() {
                Ok(seat) => seats.push(seat),
                Err(error) => {
                    warn!(%error, threads = seats.len(), "cannot start another session thread");
                    break;
                }
            }
        }
        Self { seats }
    }

    /// Returns a handle of the thread with the fewest handles; of the caller's runtime if no thread
    /// could be started.
    pub(super) fn seat(&self) -> Seat {
        let taken = |seat: &&Seat| Arc::strong_count(&seat.end);
        let freest = self.seats.iter().min_by_key(taken).cloned();
        freest.unwrap_or_else(|| Seat {
            runtime: Handle::current(),
            end: Arc::default(),
        })
    }
}

impl Seat {
    /// Returns the runtime of the thread.
    pub(super) const fn runtime(&self) -> &Handle {
        &self.runtime
    }
}

fn start() -> io::Result<Seat> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let handle = runtime.handle().clone();
    let (end, ended) = oneshot::channel::<()>();
    let run = move || {
        // Returns when the sender is dropped; nothing is ever sent.
        drop(runtime.block_on(ended));
        // Does not wait for blocking threads, where a DNS lookup may hang.
        runtime.shutdown_background();
    };
    thread::Builder::new()
        .name("session".to_owned())
        .spawn(run)?;
    Ok(Seat {
        runtime: handle,
        end: Arc::new(Some(end)),
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    async fn thread_of(seat: &Seat) -> thread::ThreadId {
        let whose = seat.runtime().spawn(async { thread::current().id() });
        whose.await.expect("it runs")
    }

    #[tokio::test]
    async fn seats_are_spread_over_the_threads_and_a_free_one_is_taken_again() {
        let threads = Threads {
            seats: (0..2).map(|_| start().expect("a thread")).collect(),
        };
        let seat = || threads.seat();
        let (one, two) = (seat(), seat());
        let first = thread_of(&one).await;

        assert_ne!(thread_of(&two).await, first);
        assert_ne!(thread::current().id(), first, "a thread of its own");
        drop(one);
        assert_eq!(thread_of(&seat()).await, first);
    }

    #[tokio::test]
    async fn a_thread_outlives_the_threads_for_who_has_a_seat_and_no_longer() {
        let threads = Threads::start(1);
        let seat = threads.seat();
        let (held, let_go) = oneshot::channel::<()>();
        drop(threads);
        seat.runtime().spawn(async move {
            std::future::pending::<()>().await;
            drop(held);
        });
        thread_of(&seat).await;

        drop(seat);

        let let_go = tokio::time::timeout(Duration::from_secs(5), let_go);
        let_go.await.expect("its tasks are dropped").unwrap_err();
    }
}
