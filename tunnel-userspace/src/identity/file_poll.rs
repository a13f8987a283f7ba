//! Reads files at an interval. Polling notices every change, on every kind of file system.

use std::time::Duration;

use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};
use tracing::warn;

use crate::drain;

/// Calls `read` on a blocking thread once in each interval, and `handle` with the result, until the drain begins. `what`
/// names the files in the log.
pub(super) async fn poll<T: Send + 'static>(
    what: &'static str,
    every: Duration,
    read: impl Fn() -> T + Clone + Send + Sync + 'static,
    mut handle: impl FnMut(T) + Send,
    mut draining: watch::Receiver<bool>,
) {
    let mut ticks = interval(every);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    ticks.reset();
    loop {
        let check = async {
            ticks.tick().await;
            spawn_blocking(read.clone()).await
        };
        let found = tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            found = check => found,
        };
        match found {
            Ok(found) => handle(found),
            Err(error) => warn!(%error, "cannot check {what}"),
        }
    }
}
