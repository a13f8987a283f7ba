//! Copying between an HTTP/2 stream and a TCP connection: bytes, half-closes and resets, in both
//! directions.

mod to_socket;
mod to_stream;

use std::task::Poll;

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{RecvStream, SendStream};
use tokio::{io::Interest, net::TcpStream, pin};
use tunnel_common::reason::Reason;

use self::{to_socket::ToSocket, to_stream::ToStream};
use super::{
    error_code::{End, code_of, reason_of, reason_of_error},
    link::Traffic,
    socket::closes_in_order,
};

/// The error of a copy that stopped before both directions ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Broken {
    /// The TCP connection was reset, or this process drains: the stream must be reset.
    Here(Reason),
    /// The stream was reset or failed.
    There(Reason),
}

impl Broken {
    /// Returns the error for a reset of the TCP connection.
    const fn here(local: End) -> Self {
        Self::Here(local.reset())
    }

    /// Returns the error for a failed stream.
    fn there(error: &h2::Error, local: End) -> Self {
        Self::There(reason_of_error(error, local.other()))
    }
}

/// An open stream, after the successful answer to its CONNECT.
pub(super) struct Stream {
    pub(super) send: SendStream<Bytes>,
    pub(super) recv: RecvStream,
    /// The side of the stream that the TCP connection belongs to.
    pub(super) local: End,
}

/// Copies until both directions have ended, one fails, or `stop` is ready (the end of a drain); returns
/// the reason.
///
/// The caller must have called [`super::socket::prepare_end`] on the TCP connection, so that the
/// connection is reset on every error.
pub(super) async fn run(
    tcp: &mut TcpStream,
    stream: Stream,
    traffic: &Traffic,
    stop: impl Future<Output = ()>,
) -> Reason {
    let Stream { send, recv, local } = stream;
    let mut to_stream = ToStream::new(send, local);
    let mut to_socket = ToSocket::new(recv, local);
    let (mut reader, writer) = tcp.split();
    let socket: &TcpStream = writer.as_ref();
    // An error of the socket must also be noticed while the socket is not read: when the stream has no
    // window, or after the peer ended its direction.
    let failed = socket.ready(Interest::ERROR);
    pin!(failed);
    pin!(stop);
    let ended = poll_fn(|cx| {
        if stop.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(Broken::Here(Reason::Draining)));
        }
        let is_sent = to_stream.poll(&mut reader, traffic, cx)?.is_ready();
        let is_received = to_socket.poll(socket, traffic, cx)?.is_ready();
        if is_sent && is_received {
            return Poll::Ready(Ok(()));
        }
        if failed.as_mut().poll(cx).is_ready() {
            return Poll::Ready(Err(Broken::here(local)));
        }
        Poll::Pending
    })
    .await;
    match ended {
        Ok(()) => match closes_in_order(socket) {
            Ok(()) => Reason::StreamCompleted,
            Err(_) => local.reset(),
        },
        Err(Broken::Here(reason)) => {
            to_stream.reset(reason);
            reason
        }
        Err(Broken::There(reason)) => reason,
    }
}
