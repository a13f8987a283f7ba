//! A value that others follow.

use tokio::sync::watch;

/// Puts a value in the place of the last one, if it is another one; whether it was.
pub fn put<T: PartialEq>(sender: &watch::Sender<T>, value: T) -> bool {
    sender.send_if_modified(|last| {
        let is_new = *last != value;
        if is_new {
            *last = value;
        }
        is_new
    })
}
