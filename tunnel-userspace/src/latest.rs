//! Publishes a value on change.

use tokio::sync::watch;

/// Replaces the published value if the new one differs; returns true if it did.
pub fn put<T: PartialEq>(sender: &watch::Sender<T>, value: T) -> bool {
    sender.send_if_modified(|last| {
        let is_new = *last != value;
        if is_new {
            *last = value;
        }
        is_new
    })
}
