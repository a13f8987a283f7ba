//! The HTTP/2 and TLS settings for gateways and agents.

use std::io;

use tokio_rustls::TlsStream;

use super::{SessionLimits, socket::SessionSocket};
use crate::identity::ALPN;

/// A TLS connection that carries HTTP/2.
pub(super) type TlsConnection = TlsStream<SessionSocket>;

/// The largest flow-control window that HTTP/2 allows, in bytes (RFC 9113 section 6.9.1).
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// The maximum size of a DATA frame, in bytes. It limits how long other streams' frames wait behind one.
const MAX_FRAME: u32 = 128 << 10;
/// The maximum size of a header list, in bytes.
const MAX_HEADERS: u32 = 16 << 10;
/// The maximum number of bytes per stream that `h2` queues for sending.
const SEND_BUFFER: usize = 256 << 10;
/// The maximum number of reset streams that `h2` remembers, and of streams that may be reset before they are
/// accepted. Beyond this limit, `h2` closes the connection. The limit is high, since the peer is
/// authenticated and a burst of cancelled requests is not an attack.
const MAX_RESETS: usize = 16 << 10;
/// The budget for small unread DATA frames, in bytes. Once it is used up, `h2` closes the connection. Each
/// unread frame that is shorter than 256 bytes takes up as many bytes of the budget as it is short of 256.
/// [`super::copy`] reads frames immediately, even if its socket is slow.
const SMALL_FRAMES: usize = 64 << 20;
/// The maximum number of bytes that rustls buffers for sending, which is enough to send a frame in one write.
const TLS_BUFFER: usize = 256 << 10;

/// Returns the flow-control window of a connection, in bytes. It is the sum of the windows of all streams,
/// including the hello, so that stalled streams never block other streams. Config validation keeps the sum
/// within [`LARGEST_WINDOW`].
fn connection_window(limits: &SessionLimits) -> u32 {
    ((limits.max_streams + 1) * limits.stream_window_bytes).min(LARGEST_WINDOW)
}

/// Returns the HTTP/2 settings for the gateway, which opens streams.
pub(super) fn client_builder(limits: &SessionLimits) -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(limits.stream_window_bytes)
        .initial_connection_window_size(connection_window(limits))
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(MAX_RESETS)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(None)
        .data_frame_budget(SMALL_FRAMES)
        .enable_push(false);
    builder
}

/// Returns the HTTP/2 settings for the agent, which serves streams. The hello counts as a stream.
pub(super) fn server_builder(limits: &SessionLimits) -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(limits.stream_window_bytes)
        .initial_connection_window_size(connection_window(limits))
        .max_frame_size(MAX_FRAME)
        .max_header_list_size(MAX_HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_streams(limits.max_streams + 1)
        .max_concurrent_reset_streams(MAX_RESETS)
        .max_pending_accept_reset_streams(MAX_RESETS)
        .max_local_error_reset_streams(None)
        .data_frame_budget(SMALL_FRAMES);
    builder
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
