//! The HTTP/2 and TLS settings for gateways and agents.

use std::{future::poll_fn, io, pin::Pin, task::Poll, time::Duration};

use bytes::Bytes;
use h2::{
    RecvStream,
    client::{self, ResponseFuture, SendRequest},
    server,
};
use http::{Response, StatusCode};
use tokio_rustls::TlsStream;

use super::{SessionLimits, frame_limit::FrameLimit, socket::SessionSocket};
use crate::identity::ALPN;

/// A TLS connection that carries HTTP/2.
pub(super) type TlsConnection = TlsStream<SessionSocket>;
/// The gateway's end of a session.
pub(super) type ClientConnection = client::Connection<FrameLimit<TlsConnection>, Bytes>;
/// The agent's end of a session.
pub(super) type ServerConnection = server::Connection<FrameLimit<TlsConnection>, Bytes>;

/// The largest flow-control window that HTTP/2 allows, in bytes (RFC 9113 section 6.9.1).
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// The maximum size of a DATA frame, in bytes. It limits how long other streams' frames wait behind one.
const MAX_FRAME: u32 = 128 << 10;
/// The maximum size of a header list, in bytes, as defined in RFC 9113 section 6.5.2. The longest one has an
/// IPv6 address and one header field.
const MAX_HEADERS: u32 = 2 << 10;
/// The maximum number of bytes per stream that `h2` queues for sending.
const SEND_BUFFER: usize = 256 << 10;
/// The maximum number of reset streams that `h2` remembers, of streams that may be reset before they are
/// accepted, and of streams that `h2` may reset over a session's lifetime because of the peer's errors. The
/// last limit closes the session. It is high, because `h2` also resets a stream that it has forgotten if the
/// peer's data for it arrives late.
const MAX_RESETS: usize = 16 << 10;
/// The time for which `h2` remembers a reset stream, and ignores the peer's late data for it.
const RESET_MEMORY: Duration = Duration::from_secs(10);
/// The budget for small unread DATA frames, in bytes. Once it is used up, `h2` closes the connection. Each
/// unread frame that is shorter than 256 bytes takes up as many bytes of the budget as it is short of 256, so
/// that at least 65,536 of them may be unread. [`super::copy`] reads frames immediately, even if its socket is
/// slow.
const SMALL_FRAMES: usize = 16 << 20;
/// The maximum number of bytes that rustls buffers for sending, which is enough to send a frame in one write.
const TLS_BUFFER: usize = 256 << 10;

/// Returns the flow-control window of a connection, in bytes. It is the sum of the windows of all streams,
/// including the hello, so that stalled streams never block other streams. Config validation keeps the sum
/// within [`LARGEST_WINDOW`].
fn connection_window(limits: &SessionLimits) -> u32 {
    ((limits.max_streams + 1) * limits.stream_window_bytes).min(LARGEST_WINDOW)
}

/// Returns the HTTP/2 settings for the gateway, which opens streams.
pub(super) fn client_builder(limits: &SessionLimits) -> client::Builder {
    let mut builder = client::Builder::new();
    builder
        .initial_window_size(limits.stream_window_bytes)
        .initial_connection_window_size(connection_window(limits))
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(MAX_RESETS)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(Some(MAX_RESETS))
        .reset_stream_duration(RESET_MEMORY)
        .data_frame_budget(SMALL_FRAMES)
        .enable_push(false);
    builder
}

/// Returns the HTTP/2 settings for the agent, which serves streams. The hello counts as a stream.
pub(super) fn server_builder(limits: &SessionLimits) -> server::Builder {
    let mut builder = server::Builder::new();
    builder
        .initial_window_size(limits.stream_window_bytes)
        .initial_connection_window_size(connection_window(limits))
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_streams(limits.max_streams + 1)
        .max_concurrent_reset_streams(MAX_RESETS)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(Some(MAX_RESETS))
        .reset_stream_duration(RESET_MEMORY)
        .data_frame_budget(SMALL_FRAMES);
    builder
}

/// Starts HTTP/2 on the gateway's end.
pub(super) async fn connect(
    limits: &SessionLimits,
    connection: TlsConnection,
) -> Result<(SendRequest<Bytes>, ClientConnection), h2::Error> {
    let connection = FrameLimit::of_client(connection);
    client_builder(limits).handshake(connection).await
}

/// Starts HTTP/2 on the agent's end.
pub(super) async fn accept(
    limits: &SessionLimits,
    connection: TlsConnection,
) -> Result<ServerConnection, h2::Error> {
    let connection = FrameLimit::of_server(connection);
    server_builder(limits).handshake(connection).await
}

/// The error from waiting for the response to a request.
#[derive(Debug, thiserror::Error)]
pub(super) enum ResponseError {
    /// The stream or the connection ended first.
    #[error("the connection was lost before the response")]
    Lost(#[from] h2::Error),
    /// Culvert never sends interim responses, and `h2` queues any number of them.
    #[error("the peer sent the interim response {0}")]
    Interim(StatusCode),
}

/// Waits for the response to a request. Fails at the first interim response.
pub(super) async fn response(
    mut response: ResponseFuture,
) -> Result<Response<RecvStream>, ResponseError> {
    poll_fn(|cx| {
        if let Poll::Ready(Some(interim)) = response.poll_informational(cx) {
            return Poll::Ready(Err(ResponseError::Interim(interim?.status())));
        }
        Pin::new(&mut response)
            .poll(cx)
            .map_err(ResponseError::from)
    })
    .await
}

/// Returns true if a session ended because the peer broke the protocol or exceeded a limit of `h2` or
/// [`FrameLimit`].
pub(super) fn is_protocol_error(error: &h2::Error) -> bool {
    let is_invalid = |error: &io::Error| error.kind() == io::ErrorKind::InvalidData;
    error.is_go_away() && error.is_library() || error.get_io().is_some_and(is_invalid)
}

/// Checks the negotiated ALPN protocol, and limits the size of the TLS buffer.
pub(super) fn finish_handshake(connection: &mut TlsConnection) -> io::Result<()> {
    match connection {
        TlsStream::Client(client) => client.get_mut().1.set_buffer_limit(Some(TLS_BUFFER)),
        TlsStream::Server(server) => server.get_mut().1.set_buffer_limit(Some(TLS_BUFFER)),
    }
    if connection.get_ref().1.alpn_protocol() == Some(ALPN) {
        Ok(())
    } else {
        Err(io::Error::other(
            "the peer did not negotiate the ALPN protocol culvert/1",
        ))
    }
}
