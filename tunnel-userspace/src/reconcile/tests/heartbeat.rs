//! The heartbeat of the reconcile loop.

use std::future;

use tokio::{sync::watch, task::JoinSet, time::timeout};

use super::*;
use crate::{
    clock::monotonic,
    reconcile::{ReconcileLoop, Updates, steering::tests::idle_steering},
};

/// Sources that never deliver anything.
struct NoUpdates;

impl Updates for NoUpdates {
    fn update(&mut self) -> impl Future<Output = Option<ClusterUpdate>> + Send {
        future::pending()
    }
}

#[tokio::test(start_paused = true)]
async fn an_idle_loop_gives_a_heartbeat_every_few_seconds() {
    let reconciler = adopt(Memory::new(ROOMY));
    let audit_every = Duration::from_secs(86_400);
    let reconcile_loop = ReconcileLoop::new(reconciler, idle_steering(), NoGrace, audit_every);
    let mut heartbeat = reconcile_loop.heartbeat();
    let (_addresses, addresses) = watch::channel(Arc::default());
    let (drain, draining) = watch::channel(false);
    assert_eq!(*heartbeat.borrow_and_update(), None);

    let started = monotonic();
    let mut running = JoinSet::new();
    running.spawn(reconcile_loop.run(NoUpdates, addresses, draining));
    for _ in 0..3 {
        // The clock of tokio is paused and advances as far as the next timer.
        let beat = timeout(Duration::from_secs(6), heartbeat.changed()).await;
        beat.expect("a heartbeat").expect("a running loop");
        assert!(*heartbeat.borrow_and_update() >= Some(started));
    }
    drain.send_replace(true);
    running.join_all().await;
}
