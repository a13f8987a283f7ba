//! A parallel map over a slice.

use std::{
    io,
    panic::resume_unwind,
    thread::{self, Builder, ScopedJoinHandle, available_parallelism},
};

/// The maximum number of threads per call. It is low, since the node runs other workloads, too. Nested calls
/// (for files, and for the documents in each file) may each start this many.
const MAX_THREADS: usize = 4;

/// Calls `work` with the index and value of each item, and returns the results in the same order. Uses
/// several threads if there are at least `min_parallel` items.
pub(crate) fn map<T: Sync, R: Send>(
    items: &[T],
    min_parallel: usize,
    work: impl Fn(usize, &T) -> R + Sync,
) -> Vec<R> {
    let threads = available_parallelism().map_or(1, usize::from);
    let threads = threads.min(MAX_THREADS);
    if threads == 1 || items.len() < min_parallel {
        let numbered = items.iter().enumerate();
        return numbered.map(|(i, item)| work(i, item)).collect();
    }
    let share = items.len().div_ceil(threads);
    let work = &work;
    thread::scope(|scope| {
        let worker = |(number, items): (usize, &'_ [T])| -> Vec<R> {
            let first = number * share;
            let numbered = (first..).zip(items);
            numbered.map(|(i, item)| work(i, item)).collect()
        };
        let chunks = || items.chunks(share).enumerate();
        let workers: Vec<_> = chunks()
            .map(|chunk| Builder::new().spawn_scoped(scope, move || worker(chunk)))
            .collect();
        let done = |(thread, chunk): (io::Result<ScopedJoinHandle<'_, Vec<R>>>, _)| match thread {
            Ok(thread) => thread.join().unwrap_or_else(|panic| resume_unwind(panic)),
            // The thread could not be started, so this thread does its work.
            Err(_) => worker(chunk),
        };
        workers.into_iter().zip(chunks()).flat_map(done).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn results_are_in_the_order_of_the_items() {
        for count in [0, 1, 2, 3, 100, 101] {
            let items: Vec<usize> = (0..count).map(|number| number * 3).collect();

            let done = map(&items, 2, |i, item| (i, *item));

            assert_eq!(done, (0..count).map(|i| (i, i * 3)).collect::<Vec<_>>());
        }
    }
}
