//! The drain signal, which makes every task stop.

use tokio::sync::watch;

/// Waits until the drain begins. Also returns when the sender is dropped.
pub async fn begun(draining: &mut watch::Receiver<bool>) {
    // The returned guard must not be held across an await in the caller.
    drop(draining.wait_for(|draining| *draining).await);
}
