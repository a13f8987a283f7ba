use std::{io, sync::mpsc, thread};

use tokio::sync::mpsc as async_mpsc;

/// A thread that does one piece of work after another beside the owner of the maps.
#[derive(Debug)]
pub(super) struct Aside<T, R> {
    pub(super) send: mpsc::SyncSender<T>,
    pub(super) done: async_mpsc::Receiver<R>,
}

impl<T: Send + 'static, R: Send + 'static> Aside<T, R> {
    /// Starts the thread. It ends when this is dropped, or with the first work that has no result.
    pub(super) fn start(
        name: &str,
        mut work: impl FnMut(T) -> Option<R> + Send + 'static,
    ) -> io::Result<Self> {
        let (send, works) = mpsc::sync_channel(1);
        let (results, done) = async_mpsc::channel(1);
        thread::Builder::new().name(name.into()).spawn(move || {
            while let Ok(next) = works.recv() {
                let sent = work(next).map(|result| results.blocking_send(result));
                if !matches!(sent, Some(Ok(()))) {
                    break;
                }
            }
        })?;
        Ok(Self { send, done })
    }
}
