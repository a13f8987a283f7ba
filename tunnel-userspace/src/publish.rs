//! Publishes a value on a watch channel if it has changed.

use tokio::sync::watch;

/// Publishes a value if it differs from the last one. Returns true if the value was published.
pub fn publish_if_changed<T: PartialEq>(sender: &watch::Sender<T>, value: T) -> bool {
    sender.send_if_modified(|last| {
        let is_new = *last != value;
        if is_new {
            *last = value;
        }
        is_new
    })
}
