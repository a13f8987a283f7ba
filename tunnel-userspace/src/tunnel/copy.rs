//! Copies bytes, half-closes and resets between an HTTP/2 stream and a TCP connection, in both directions.

mod idle_timer;
mod to_socket;
mod to_stream;

use std::{task::Poll, time::Duration};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{RecvStream, SendStream};
use tokio::{io::Interest, net::TcpStream, pin};
use tunnel_common::reason::Reason;

use self::{idle_timer::IdleTimer, to_socket::ToSocket, to_stream::ToStream};
use super::{
    error_code::{StreamSide, code_of, reason_of_code, reason_of_error},
    socket::disable_reset_on_close,
    traffic::Traffic,
};

/// The error that stopped copying before both directions had ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum CopyError {
    /// The TCP connection was reset, or this end must reset the stream.
    Socket(Reason),
    /// The stream was reset or failed.
    Stream(Reason),
}

impl CopyError {
    /// Returns the error for a TCP connection that was reset.
    const fn socket(side: StreamSide) -> Self {
        Self::Socket(side.reset_reason())
    }

    /// Returns the error for a stream that failed.
    fn stream(error: &h2::Error, side: StreamSide) -> Self {
        Self::Stream(reason_of_error(error, side.other()))
    }
}

/// An open stream, whose CONNECT request has been accepted.
pub(super) struct TunnelStream {
    pub(super) send: SendStream<Bytes>,
    pub(super) recv: RecvStream,
    /// The side of the stream that the TCP connection belongs to.
    pub(super) side: StreamSide,
}

/// Copies until both directions have ended, one has failed, no byte has moved for `idle_limit`, or `stop` returns
/// the reason for which this end must reset the stream. Returns the reason why copying stopped. An `idle_limit` of
/// zero means that there is none.
///
/// The caller must already have called [`super::socket::set_stream_options`] on the TCP connection, so that
/// the connection is reset on any error.
pub(super) async fn run(
    tcp: &mut TcpStream,
    stream: TunnelStream,
    traffic: &Traffic,
    idle_limit: Duration,
    stop: impl Future<Output = Reason>,
) -> Reason {
    let TunnelStream { send, recv, side } = stream;
    let mut to_stream = ToStream::new(send, side, traffic);
    let mut to_socket = ToSocket::new(recv, side, traffic);
    let mut idle = IdleTimer::new(idle_limit);
    let (mut reader, writer) = tcp.split();
    let socket: &TcpStream = writer.as_ref();
    // Socket errors must be noticed even while nothing is read from the socket: when the stream has no window
    // left, or after the peer has closed its direction.
    let failed = socket.ready(Interest::ERROR);
    pin!(failed);
    pin!(stop);
    let ended = poll_fn(|cx| {
        if let Poll::Ready(reason) = stop.as_mut().poll(cx) {
            return Poll::Ready(Err(CopyError::Socket(reason)));
        }
        if to_stream.must_update_window(cx) {
            to_socket.update_window()?;
        }
        let is_sent = to_stream.poll(&mut reader, traffic, cx)?.is_ready();
        let is_received = to_socket.poll(socket, traffic, cx)?.is_ready();
        if is_sent && is_received {
            return Poll::Ready(Ok(()));
        }
        if failed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(CopyError::socket(side)));
        }
        let moved = to_stream.moved() + to_socket.moved();
        if idle
            .as_mut()
            .is_some_and(|idle| idle.poll(moved, cx).is_ready())
        {
            return Poll::Ready(Err(CopyError::Socket(Reason::StreamIdle)));
        }
        Poll::Pending
    })
    .await;
    match ended {
        Ok(()) => match disable_reset_on_close(socket) {
            Ok(()) => Reason::StreamCompleted,
            Err(_) => side.reset_reason(),
        },
        Err(CopyError::Socket(reason)) => {
            to_stream.reset(reason);
            reason
        }
        Err(CopyError::Stream(reason)) => reason,
    }
}
