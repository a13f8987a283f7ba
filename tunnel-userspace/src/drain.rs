//! The drain signal, on which every task stops.

use tokio::sync::watch;

/// Waits until the drain begins. Also returns when the sender is dropped.
pub async fn begun(draining: &mut watch::Receiver<bool>) {
    // The returned guard must not live across an await of the caller.
    drop(draining.wait_for(|draining| *draining).await);
}
