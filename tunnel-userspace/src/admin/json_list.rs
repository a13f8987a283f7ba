//! Responses that are created while the client reads them, since a list can take hundreds of megabytes.

use std::{io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::{BodyExt as _, StreamBody};
use hyper::{Response, StatusCode, body::Frame};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
    time::timeout,
};

use super::http_server::{ResponseBody, respond_with, text};

/// The size at which a chunk of a response is sent. A chunk is larger by at most one item.
pub(super) const CHUNK_BYTES: usize = 64 << 10;

/// The maximum number of lists that are sent at a time.
pub(super) const MAX_LISTS: usize = 4;

/// The maximum time that a request waits until fewer lists are being sent.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(5);

/// A list in JSON that is written in chunks.
pub(super) trait ListWriter: Send + 'static {
    /// Adds the next item to a chunk. After the last item, adds the end of the list, and returns false.
    fn write_next(&mut self, chunk: &mut Vec<u8>) -> io::Result<bool>;
}

/// Returns the next chunk of a list, or `None` after the last one. Removes the writer with the end of the list.
pub(super) fn next_chunk(writer: &mut Option<impl ListWriter>) -> io::Result<Option<Vec<u8>>> {
    let Some(list) = writer else { return Ok(None) };
    let mut chunk = Vec::new();
    while chunk.len() < CHUNK_BYTES {
        if !list.write_next(&mut chunk)? {
            *writer = None;
            break;
        }
    }
    Ok(Some(chunk))
}

/// Limits the number of lists that a listener sends at a time.
#[derive(Clone, Debug)]
pub(super) struct ListLimit(Arc<Semaphore>);

impl Default for ListLimit {
    fn default() -> Self {
        Self(Arc::new(Semaphore::new(MAX_LISTS)))
    }
}

impl ListLimit {
    /// Responds with a list, or with an error if too many lists are being sent.
    pub(super) async fn respond<W: ListWriter>(
        &self,
        writer: impl FnOnce() -> W + Send,
    ) -> Response<ResponseBody> {
        let permit = timeout(MAX_WAIT, Arc::clone(&self.0).acquire_owned()).await;
        let Ok(Ok(permit)) = permit else {
            let body = format!(
                "{MAX_LISTS} clients are reading lists, which is the maximum; try again later\n"
            );
            return text(StatusCode::SERVICE_UNAVAILABLE, body);
        };
        let body = body(writer(), permit);
        respond_with(StatusCode::OK, "application/json", body)
    }
}

/// Returns a body whose chunks are created one by one, each when the client is ready to receive it. Chunks are
/// created on a blocking thread, because reading the counters of many ports would delay other tasks.
fn body(writer: impl ListWriter, permit: OwnedSemaphorePermit) -> ResponseBody {
    let start = (Some(writer), permit);
    let chunks = stream::try_unfold(start, |(mut writer, permit)| async move {
        let next = spawn_blocking(move || {
            let chunk = next_chunk(&mut writer);
            (writer, chunk)
        });
        let (writer, chunk) = next.await?;
        let frame = chunk?.map(|chunk| Frame::data(Bytes::from(chunk)));
        Ok::<_, io::Error>(frame.map(|frame| (frame, (writer, permit))))
    });
    StreamBody::new(chunks).boxed_unsync()
}
