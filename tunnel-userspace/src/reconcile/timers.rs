//! The timers of the reconcile loop, and waits for events that may never come.

use std::{future, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep_until},
};

use crate::model::LinkNetworks;

/// Timers for work that is not triggered by an event.
#[derive(Default)]
pub(super) struct Timers {
    /// The delay before failed writes are retried.
    pub(super) retry_delay: Duration,
    /// The time at which failed writes are next retried, if there are any.
    pub(super) retry_at: Option<Instant>,
    /// The time of the next sync of the steering maps, if the last one was incomplete.
    pub(super) steering_at: Option<Instant>,
    /// The time at which removed backends that still have open connections are next polled, if there are any.
    pub(super) draining_at: Option<Instant>,
    /// The time at which many Services that did not fit into the maps are tried again.
    pub(super) refused_at: Option<Instant>,
}

impl Timers {
    /// Creates timers for no work. Failed writes are first retried after `first_retry`.
    pub(super) fn new(first_retry: Duration) -> Self {
        Self {
            retry_delay: first_retry,
            ..Self::default()
        }
    }
}

/// Sleeps until the given time, or forever if there is none.
pub(super) async fn sleep_until_some(time: Option<Instant>) {
    match time {
        Some(time) => sleep_until(time).await,
        None => future::pending().await,
    }
}

/// Waits until the networks that this node has routes to change, or forever if they are not followed.
pub(super) async fn next_networks(
    networks: &mut Option<watch::Receiver<Arc<LinkNetworks>>>,
) -> Arc<LinkNetworks> {
    if let Some(networks) = networks
        && networks.changed().await.is_ok()
    {
        return Arc::clone(&networks.borrow_and_update());
    }
    future::pending().await
}
