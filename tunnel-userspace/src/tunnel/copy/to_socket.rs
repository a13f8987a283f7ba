//! Copies from the HTTP/2 stream to the socket.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    net::Shutdown,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use h2::RecvStream;
use socket2::SockRef;
use tokio::net::TcpStream;

use super::{CopyError, StreamSide, Traffic};
use crate::tunnel::memory_budget::ReceivedBytes;

/// Queued chunks smaller than this many bytes are merged, since each chunk keeps its entire read buffer in
/// memory.
const MERGE_BELOW: usize = 4 << 10;
/// The maximum number of chunks per write.
const MAX_CHUNKS: usize = 16;

pub(super) struct ToSocket {
    recv: RecvStream,
    side: StreamSide,
    queue: WriteQueue,
    /// The number of bytes in the queue, as counted for the limit on buffered bytes.
    buffered: ReceivedBytes,
    has_ended: bool,
    is_shut: bool,
    /// The number of received bytes, plus the number of writes to the socket.
    moved: u64,
}

impl ToSocket {
    pub(super) fn new(recv: RecvStream, side: StreamSide, traffic: &Traffic) -> Self {
        Self {
            recv,
            side,
            queue: WriteQueue::default(),
            buffered: ReceivedBytes::new(Arc::clone(traffic.memory())),
            has_ended: false,
            is_shut: false,
            moved: 0,
        }
    }

    /// Returns a number that increases as bytes are received from the stream and written to the socket.
    pub(super) const fn moved(&self) -> u64 {
        self.moved
    }

    pub(super) fn poll(
        &mut self,
        tcp: &TcpStream,
        traffic: &Traffic,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CopyError>> {
        let copied = self.poll_copy(tcp, traffic, cx)?;
        self.buffered
            .set(self.queue.bytes)
            .map_err(CopyError::Socket)?;
        copied.map(Ok)
    }

    /// Sends a WINDOW_UPDATE frame if the peer needs one.
    pub(super) fn update_window(&mut self) -> Result<(), CopyError> {
        // `h2` compares the window that the peer knows with the one that it may have.
        let updated = self.recv.flow_control().release_capacity(0);
        updated.map_err(|error| CopyError::stream(&error, self.side))
    }

    fn poll_copy(
        &mut self,
        tcp: &TcpStream,
        traffic: &Traffic,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CopyError>> {
        while !self.is_shut {
            self.receive_all(traffic, cx)?;
            if self.queue.is_empty() {
                if !self.has_ended {
                    return Poll::Pending;
                }
                SockRef::from(tcp)
                    .shutdown(Shutdown::Write)
                    .map_err(|_error| CopyError::socket(self.side))?;
                self.is_shut = true;
                break;
            }
            ready!(tcp.poll_write_ready(cx)).map_err(|_error| CopyError::socket(self.side))?;
            self.write(tcp)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Moves all received data into the queue, so that a reset that follows the data is noticed, and so that
    /// small frames don't accumulate in `h2`. The queue is bounded by the stream's flow-control window, which
    /// reopens only as bytes are written to the socket.
    fn receive_all(&mut self, traffic: &Traffic, cx: &mut Context<'_>) -> Result<(), CopyError> {
        while !self.has_ended {
            match self.recv.poll_data(cx) {
                Poll::Ready(Some(Ok(bytes))) => {
                    self.moved += traffic.count_received(bytes.len());
                    self.queue.push(bytes);
                }
                Poll::Ready(Some(Err(error))) => return Err(CopyError::stream(&error, self.side)),
                Poll::Ready(None) => self.has_ended = true,
                Poll::Pending => break,
            }
        }
        Ok(())
    }

    fn write(&mut self, tcp: &TcpStream) -> Result<(), CopyError> {
        let mut slices = [IoSlice::new(&[]); MAX_CHUNKS];
        let count = self.queue.fill_slices(&mut slices);
        let slices = slices.get(..count).unwrap_or_default();
        match tcp.try_write_vectored(slices) {
            Ok(written) => {
                self.queue.advance(written);
                // The bytes are already counted as received, but a slow reader is not idle.
                self.moved += 1;
                // Reopens the stream's flow-control window by the number of bytes written.
                self.recv
                    .flow_control()
                    .release_capacity(written)
                    .map_err(|error| CopyError::stream(&error, self.side))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(_) => Err(CopyError::socket(self.side)),
        }
    }
}

/// A queue of received bytes that have yet to be written to the socket.
#[derive(Default)]
struct WriteQueue {
    /// The number of bytes in `chunks` and `tail`.
    bytes: usize,
    chunks: VecDeque<Bytes>,
    /// Merged small chunks, to be written after all `chunks`.
    tail: BytesMut,
}

impl WriteQueue {
    fn is_empty(&self) -> bool {
        self.chunks.is_empty() && self.tail.is_empty()
    }

    fn push(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        self.bytes += bytes.len();
        if self.is_empty() {
            // The usual case: the chunk will be written right away, without being copied.
            self.chunks.push_back(bytes);
        } else if bytes.len() < MERGE_BELOW {
            self.tail.extend_from_slice(&bytes);
        } else {
            if !self.tail.is_empty() {
                self.chunks.push_back(self.tail.split().freeze());
            }
            self.chunks.push_back(bytes);
        }
    }

    /// Fills `slices` with the first chunks in the queue, and returns how many slices were filled.
    fn fill_slices<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let chunks = self.chunks.iter().map(|chunk| &**chunk);
        let tail = Some(&*self.tail).filter(|tail| !tail.is_empty());
        let mut count = 0;
        for (slice, chunk) in slices.iter_mut().zip(chunks.chain(tail)) {
            *slice = IoSlice::new(chunk);
            count += 1;
        }
        count
    }

    fn advance(&mut self, mut written: usize) {
        self.bytes -= written;
        while let Some(chunk) = self.chunks.front_mut() {
            if written < chunk.len() {
                chunk.advance(written);
                return;
            }
            written -= chunk.len();
            self.chunks.pop_front();
        }
        self.tail.advance(written.min(self.tail.len()));
        if self.tail.is_empty() {
            self.tail = BytesMut::new();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn contents(queue: &WriteQueue) -> Vec<u8> {
        let mut slices = [IoSlice::new(&[]); MAX_CHUNKS];
        let count = queue.fill_slices(&mut slices);
        slices[..count].iter().flat_map(|s| s.to_vec()).collect()
    }

    #[test]
    fn queued_bytes_stay_in_order_when_merged_and_written_in_parts() {
        let mut queue = WriteQueue::default();
        let mut expected = Vec::new();
        for (number, length) in [3, 1, MERGE_BELOW, 2, 2, MERGE_BELOW + 7, 1]
            .into_iter()
            .enumerate()
        {
            let chunk = vec![u8::try_from(number).expect("few"); length];
            expected.extend_from_slice(&chunk);
            queue.push(chunk.into());
        }
        assert_eq!(queue.chunks.len(), 5, "small ones are put together");

        let mut seen = Vec::new();
        for step in [1, 2, 5, 1, 4000, 100].into_iter().cycle() {
            let all = contents(&queue);
            let written = step.min(all.len());
            seen.extend_from_slice(&all[..written]);
            queue.advance(written);
            if queue.is_empty() {
                break;
            }
        }
        assert_eq!(seen, expected);
        assert_eq!(queue.bytes, 0);
    }

    #[test]
    fn a_million_chunks_of_a_byte_are_merged() {
        let mut queue = WriteQueue::default();
        for _ in 0..1_000_000 {
            queue.push(Bytes::from_static(b"x"));
        }

        assert_eq!(queue.chunks.len(), 1);
        assert_eq!(queue.tail.len(), 999_999);
        assert!(queue.tail.capacity() < 4 << 20);
    }
}
