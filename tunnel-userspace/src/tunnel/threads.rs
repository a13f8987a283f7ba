//! Threads for sessions: each runs complete sessions with all their streams. A byte is then processed on
//! one CPU, and passes between tasks without waking another thread.

use std::{io, num::NonZero, sync::Arc, thread};

use tokio::{
    runtime::{Builder, Handle},
    sync::oneshot,
};
use tracing::warn;

/// The threads that run sessions.
#[derive(Debug)]
pub(super) struct Threads {
    seats: Vec<Seat>,
}

/// A session's seat on one of the threads, or on the current runtime.
#[derive(Clone, Debug)]
pub(super) struct Seat {
    runtime: Handle,
    /// Ends the thread once the last seat on it is dropped.
    end: Arc<Option<oneshot::Sender<()>>>,
}

impl Threads {
    /// Starts at most `most` threads, and no more than there are CPUs.
    pub(super) fn start(most: usize) -> Self {
        let cpus = thread::available_parallelism().map_or(1, NonZero::get);
        let mut seats = Vec::new();
        for _ in 0..most.min(cpus) {
            match start() {
                Ok(seat) => seats.push(seat),
                Err(error) => {
                    warn!(%error, have = seats.len(), "no more threads for sessions");
                    break;
                }
            }
        }
        Self { seats }
    }

    /// Returns a seat on the thread with the fewest seats taken. If no thread could be started, sessions
    /// run on the caller's runtime.
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
        // Nothing is ever sent: the drop of the sender ends the thread.
        drop(runtime.block_on(ended));
        // A hanging DNS lookup on a blocking thread must not delay the end.
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
