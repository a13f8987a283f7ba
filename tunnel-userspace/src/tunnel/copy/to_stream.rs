//! Copies from the socket to the HTTP/2 stream.

use std::{
    pin::pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{BufMut as _, Bytes, BytesMut};
use h2::SendStream;
use tokio::{io::AsyncReadExt as _, net::tcp::ReadHalf};
use tunnel_common::reason::Reason;

use super::{CopyError, StreamSide, Traffic, code_of, reason_of_code};
use crate::tunnel::{adaptive_read_size::ReadSize, memory_budget::SendQueue};

pub(super) struct ToStream {
    send: SendStream<Bytes>,
    side: StreamSide,
    buffer: BytesMut,
    size: ReadSize,
    /// The bytes that `h2` has not sent yet.
    queue: SendQueue,
    has_ended: bool,
    /// The number of bytes that were read from the socket.
    moved: u64,
}

impl ToStream {
    pub(super) fn new(send: SendStream<Bytes>, side: StreamSide, traffic: &Traffic) -> Self {
        Self {
            send,
            side,
            buffer: BytesMut::new(),
            size: ReadSize::default(),
            queue: SendQueue::new(Arc::clone(traffic.memory())),
            has_ended: false,
            moved: 0,
        }
    }

    /// Returns the number of bytes that were read from the socket.
    pub(super) const fn moved(&self) -> u64 {
        self.moved
    }

    /// Returns true if the window of the other direction must be checked, since it has been reduced.
    pub(super) fn must_update_window(&mut self, cx: &Context<'_>) -> bool {
        self.queue.must_update_window(cx.waker())
    }

    pub(super) fn reset(&mut self, reason: Reason) {
        self.send.send_reset(code_of(reason));
    }

    pub(super) fn poll(
        &mut self,
        tcp: &mut ReadHalf<'_>,
        traffic: &Traffic,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CopyError>> {
        if let Poll::Ready(code) = self.send.poll_reset(cx) {
            return Poll::Ready(Err(match code {
                Ok(code) => CopyError::Stream(reason_of_code(code, self.side.other())),
                Err(error) => CopyError::stream(&error, self.side),
            }));
        }
        while !self.has_ended {
            let Some(limit) = self.queue.read_limit() else {
                return Poll::Pending;
            };
            let room = ready!(self.poll_room(cx))?.min(limit);
            ready!(self.poll_read(tcp, room, traffic, cx))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Waits for room in the stream's flow-control window, and returns how many bytes fit. The socket is read
    /// only when there is room, so that a slow reader at the other end slows down the sender.
    fn poll_room(&mut self, cx: &mut Context<'_>) -> Poll<Result<usize, CopyError>> {
        self.send.reserve_capacity(self.size.bytes());
        let room = self.send.capacity();
        if room > 0 {
            return Poll::Ready(Ok(room));
        }
        match ready!(self.send.poll_capacity(cx)) {
            Some(Ok(room)) => Poll::Ready(Ok(room)),
            Some(Err(error)) => Poll::Ready(Err(CopyError::stream(&error, self.side))),
            None => Poll::Ready(Err(CopyError::Stream(Reason::AgentConnectionLost))),
        }
    }

    fn poll_read(
        &mut self,
        tcp: &mut ReadHalf<'_>,
        room: usize,
        traffic: &Traffic,
        cx: &mut Context<'_>,
    ) -> Poll<Result<(), CopyError>> {
        let max = self.size.bytes();
        if self.buffer.capacity() < max / 2 {
            self.buffer.reserve(max);
        }
        let max = max.min(self.buffer.capacity());
        let requested = room.min(max);
        let mut space = (&mut self.buffer).limit(requested);
        // After a short read, tokio treats the socket as drained, which saves another read that would block.
        let read = ready!(pin!(tcp.read_buf(&mut space)).poll(cx));
        Poll::Ready(match read {
            Ok(0) => {
                self.has_ended = true;
                self.buffer = BytesMut::new();
                self.send(Bytes::new(), true)
            }
            Ok(read) => {
                self.moved += traffic.count_sent(read);
                if read < requested {
                    self.size.adapt(read);
                } else if requested == max {
                    self.size.adapt(self.size.bytes());
                }
                let bytes = self.queue.count(self.buffer.split().freeze());
                self.send(bytes, false)
            }
            Err(_) => Err(CopyError::socket(self.side)),
        })
    }

    fn send(&mut self, bytes: Bytes, is_last: bool) -> Result<(), CopyError> {
        self.send
            .send_data(bytes, is_last)
            .map_err(|error| CopyError::stream(&error, self.side))
    }
}
