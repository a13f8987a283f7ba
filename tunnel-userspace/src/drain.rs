//! The wish to stop, as every task hears it.

use tokio::sync::watch;

/// Waits until the drain begins. An owner that is gone counts as one that drains.
pub async fn begun(draining: &mut watch::Receiver<bool>) {
    // The guard that this gives must not live across an await of the caller.
    drop(draining.wait_for(|draining| *draining).await);
}
