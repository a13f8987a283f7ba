//! The settings of HTTP/2 and TLS that both ends share.

use std::io;

use tokio_rustls::TlsStream;

use super::{Limits, socket::Socket};
use crate::identity::ALPN;

/// The transport of HTTP/2.
pub(super) type Carrier = TlsStream<Socket>;

/// The maximum flow-control window of HTTP/2 (RFC 9113 section 6.9.1).
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// The largest DATA frame, which bounds the delay of another stream's frame behind it.
const FRAME: u32 = 128 << 10;
/// The largest header list in bytes.
const HEADERS: u32 = 16 << 10;
/// The maximum number of bytes of a stream that `h2` queues for sending.
const SEND_BUFFER: usize = 256 << 10;
/// The number of reset streams that `h2` remembers, and of streams that may be reset before they are
/// accepted. Beyond these `h2` would close the connection. The limit is generous, since the other end is
/// authenticated and a burst of cancelled requests is no attack.
const RESETS: usize = 16 << 10;
/// The budget for small unread DATA frames, beyond which `h2` closes the connection. A frame of less
/// than 256 bytes costs the difference, until it is read; [`super::copy`] reads frames at once, however
/// slow its socket is.
const SMALL_FRAMES: usize = 64 << 20;
/// The maximum number of bytes that rustls buffers for the kernel: a frame goes in one write.
const TLS_BUFFER: usize = 256 << 10;

/// Returns the window of a connection: the sum of its streams' windows, so that stalled streams never
/// take the window of another. The config keeps the sum within [`LARGEST_WINDOW`]; the hello is one more
/// stream.
fn connection_window(limits: &Limits) -> u32 {
    ((limits.max_streams + 1) * limits.stream_window_bytes).min(LARGEST_WINDOW)
}

/// Configures the end that opens streams: the gateway.
pub(super) fn client(limits: &Limits) -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(limits.stream_window_bytes)
        .initial_connection_window_size(connection_window(limits))
        .max_frame_size(FRAME)
        .max_header_list_size(HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_reset_streams(RESETS)
        .max_pending_accept_reset_streams(RESETS)
        .max_local_error_reset_streams(None)
        .data_frame_budget(SMALL_FRAMES)
        .enable_push(false);
    builder
}

/// Configures the end that serves streams: the agent. The hello is one more stream.
pub(super) fn server(limits: &Limits) -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(limits.stream_window_bytes)
        .initial_connection_window_size(connection_window(limits))
        .max_frame_size(FRAME)
        .max_header_list_size(HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_streams(limits.max_streams + 1)
        .max_concurrent_reset_streams(RESETS)
        .max_pending_accept_reset_streams(RESETS)
        .max_local_error_reset_streams(None)
        .data_frame_budget(SMALL_FRAMES);
    builder
}

/// Checks the negotiated ALPN protocol and sizes the TLS buffer for bulk traffic.
pub(super) fn accept_carrier(carrier: &mut Carrier) -> io::Result<()> {
    match carrier {
        TlsStream::Client(client) => client.get_mut().1.set_buffer_limit(Some(TLS_BUFFER)),
        TlsStream::Server(server) => server.get_mut().1.set_buffer_limit(Some(TLS_BUFFER)),
    }
    if carrier.get_ref().1.alpn_protocol() == Some(ALPN) {
        Ok(())
    } else {
        Err(io::Error::other("the other end does not speak culvert/1"))
    }
}
