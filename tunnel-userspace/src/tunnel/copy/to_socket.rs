//! Copying from the HTTP/2 stream to the socket.

use std::{
    collections::VecDeque,
    io::{self, IoSlice},
    net::Shutdown,
    task::{Context, Poll, ready},
};

use bytes::{Buf as _, Bytes, BytesMut};
use h2::RecvStream;
use socket2::SockRef;
use tokio::net::TcpStream;

use super::{Broken, End, Traffic};

/// Chunks below this size, in bytes, are merged while they are queued, since each chunk keeps the read
/// buffer alive that it is a part of.
const SMALL: usize = 4 << 10;
/// The maximum number of chunks in one write.
const PIECES: usize = 16;

pub(super) struct ToSocket {
    recv: RecvStream,
    local: End,
    waiting: Waiting,
    has_ended: bool,
    is_shut: bool,
}

impl ToSocket {
    pub(super) fn new(recv: RecvStream, local: End) -> Self {
        Self {
            recv,
            local,
            waiting: Waiting::default(),
            has_ended: false,
            is_shut: false,
        }
    }

    pub(super) fn poll(
        &mut self,
        tcp: &TcpStream,
        traffic: &Traffic,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), Broken>> {
        while !self.is_shut {
            self.take_all(traffic, cx)?;
            if self.waiting.is_empty() {
                if !self.has_ended {
                    return Poll::Pending;
                }
                SockRef::from(tcp)
                    .shutdown(Shutdown::Write)
                    .map_err(|_error| Broken::here(self.local))?;
                self.is_shut = true;
                break;
            }
            ready!(tcp.poll_write_ready(cx)).map_err(|_error| Broken::here(self.local))?;
            self.write(tcp)?;
        }
        Poll::Ready(Ok(()))
    }

    /// Moves all received data into the queue, so that a reset after the data is seen, and small frames
    /// don't accumulate in `h2`. The queue is bounded by the stream's flow-control window, which reopens
    /// only by the bytes that were written to the socket.
    fn take_all(&mut self, traffic: &Traffic, cx: &mut Context<'_>) -> Result<(), Broken> {
        while !self.has_ended {
            match self.recv.poll_data(cx) {
                Poll::Ready(Some(Ok(bytes))) => {
                    traffic.count_received(bytes.len());
                    self.waiting.push(bytes);
                }
                Poll::Ready(Some(Err(error))) => return Err(Broken::there(&error, self.local)),
                Poll::Ready(None) => self.has_ended = true,
                Poll::Pending => break,
            }
        }
        Ok(())
    }

    fn write(&mut self, tcp: &TcpStream) -> Result<(), Broken> {
        let mut slices = [IoSlice::new(&[]); PIECES];
        let count = self.waiting.fill(&mut slices);
        let slices = slices.get(..count).unwrap_or_default();
        match tcp.try_write_vectored(slices) {
            Ok(written) => {
                self.waiting.advance(written);
                // Reopens the stream's flow-control window by the written bytes.
                self.recv
                    .flow_control()
                    .release_capacity(written)
                    .map_err(|error| Broken::there(&error, self.local))
            }
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => Ok(()),
            Err(_) => Err(Broken::here(self.local)),
        }
    }
}

/// A queue of received bytes to write to the socket.
#[derive(Default)]
struct Waiting {
    pieces: VecDeque<Bytes>,
    /// Merged small chunks, after all others.
    tail: BytesMut,
}

impl Waiting {
    fn is_empty(&self) -> bool {
        self.pieces.is_empty() && self.tail.is_empty()
    }

    fn push(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        if self.is_empty() {
            // The usual case: the chunk is written at once, without a copy.
            self.pieces.push_back(bytes);
        } else if bytes.len() < SMALL {
            self.tail.extend_from_slice(&bytes);
        } else {
            if !self.tail.is_empty() {
                self.pieces.push_back(self.tail.split().freeze());
            }
            self.pieces.push_back(bytes);
        }
    }

    /// Fills the slices with the first chunks; returns the number of slices used.
    fn fill<'a>(&'a self, slices: &mut [IoSlice<'a>]) -> usize {
        let pieces = self.pieces.iter().map(|piece| &**piece);
        let tail = Some(&*self.tail).filter(|tail| !tail.is_empty());
        let mut count = 0;
        for (slice, piece) in slices.iter_mut().zip(pieces.chain(tail)) {
            *slice = IoSlice::new(piece);
            count += 1;
        }
        count
    }

    fn advance(&mut self, mut written: usize) {
        while let Some(piece) = self.pieces.front_mut() {
            if written < piece.len() {
                piece.advance(written);
                return;
            }
            written -= piece.len();
            self.pieces.pop_front();
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

    fn shown(waiting: &Waiting) -> Vec<u8> {
        let mut slices = [IoSlice::new(&[]); PIECES];
        let count = waiting.fill(&mut slices);
        slices[..count].iter().flat_map(|s| s.to_vec()).collect()
    }

    #[test]
    fn what_waits_comes_out_in_order_whatever_was_put_together_and_written_in_parts() {
        let mut waiting = Waiting::default();
        let mut expected = Vec::new();
        for (number, length) in [3, 1, SMALL, 2, 2, SMALL + 7, 1].into_iter().enumerate() {
            let piece = vec![u8::try_from(number).expect("few"); length];
            expected.extend_from_slice(&piece);
            waiting.push(piece.into());
        }
        assert_eq!(waiting.pieces.len(), 5, "small ones are put together");

        let mut seen = Vec::new();
        for step in [1, 2, 5, 1, 4000, 100].into_iter().cycle() {
            let all = shown(&waiting);
            let written = step.min(all.len());
            seen.extend_from_slice(&all[..written]);
            waiting.advance(written);
            if waiting.is_empty() {
                break;
            }
        }
        assert_eq!(seen, expected);
    }

    #[test]
    fn a_million_pieces_of_a_byte_are_held_in_few() {
        let mut waiting = Waiting::default();
        for _ in 0..1_000_000 {
            waiting.push(Bytes::from_static(b"x"));
        }

        assert_eq!(waiting.pieces.len(), 1);
        assert_eq!(waiting.tail.len(), 999_999);
        assert!(waiting.tail.capacity() < 4 << 20);
    }
}
