//! One stream and one TCP connection: the bytes, the ends and the resets of each become those of the
//! other.

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

/// Why a copy stopped before both directions ended.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Broken {
    /// The TCP connection was reset, or we have to stop: the other end is to hear of it.
    Here(Reason),
    /// The stream was.
    There(Reason),
}

impl Broken {
    /// The TCP connection of this end was reset.
    const fn here(local: End) -> Self {
        Self::Here(local.reset())
    }

    /// The stream of this end failed.
    fn there(error: &h2::Error, local: End) -> Self {
        Self::There(reason_of_error(error, local.other()))
    }
}

/// A stream that was answered.
pub(super) struct Stream {
    pub(super) send: SendStream<Bytes>,
    pub(super) recv: RecvStream,
    /// Which end the TCP connection is.
    pub(super) local: End,
}

/// Copies until both directions ended or something broke, and says which. `stop` ends it early, as a drain does.
///
/// The TCP connection is one of [`super::socket::prepare_end`], so whatever breaks it, our own end
/// included, resets it.
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
    // An error is noticed while nothing is read: when the stream has no window, or after the peer
    // ended its direction.
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
            Ok(()) => Reason::StreamServed,
            Err(_) => local.reset(),
        },
        Err(Broken::Here(reason)) => {
            to_stream.reset(reason);
            reason
        }
        Err(Broken::There(reason)) => reason,
    }
}
