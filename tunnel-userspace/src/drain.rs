//! The shutdown signal that every task waits for.

use tokio::sync::watch;

/// Waits until the drain begins. A dropped sender counts as a drain.
pub async fn begun(draining: &mut watch::Receiver<bool>) {
    // The returned guard must not live across an await of the caller.
    drop(draining.wait_for(|draining| *draining).await);
}
