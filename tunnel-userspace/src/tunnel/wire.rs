//! The settings of HTTP/2 and TLS that both ends share.

use std::io;

use tokio_rustls::TlsStream;

use super::{Limits, socket::Socket};
use crate::identity::ALPN;

/// What HTTP/2 runs over.
pub(super) type Carrier = TlsStream<Socket>;

/// The most bytes that HTTP/2 lets a connection have under way (RFC 9113 section 6.9.1).
const LARGEST_WINDOW: u32 = (1 << 31) - 1;
/// The largest DATA frame. One of another stream waits for no more than this.
const FRAME: u32 = 128 << 10;
/// The largest list of headers.
const HEADERS: u32 = 16 << 10;
/// How many bytes of a stream wait in `h2` to be sent.
const SEND_BUFFER: usize = 256 << 10;
/// How many streams that ended by a reset are remembered, and how many may be reset before they
/// were looked at. The other end is authenticated, and a burst of cancelled requests is no attack:
/// beyond these, `h2` would close the whole connection.
const RESETS: usize = 16 << 10;
/// What small DATA frames that wait to be read may cost before `h2` closes the connection. A frame
/// of less than 256 bytes costs what it is short of that, until it is read; [`super::copy`] reads
/// them at once, however slow its socket is.
const SMALL_FRAMES: usize = 64 << 20;
/// How many bytes of TLS wait for the kernel to take them: a frame goes in one write.
const TLS_BUFFER: usize = 256 << 10;

/// The window of a connection: as much as all its streams together, so that however many of them
/// stall, none takes the window of another. The config keeps that of all streams within
/// [`LARGEST_WINDOW`]; the hello is one more.
fn connection_window(limits: &Limits) -> u32 {
    ((limits.streams + 1) * limits.window).min(LARGEST_WINDOW)
}

/// The end that opens streams: the gateway.
pub(super) fn client(limits: &Limits) -> h2::client::Builder {
    let mut builder = h2::client::Builder::new();
    builder
        .initial_window_size(limits.window)
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

/// The end that serves streams: the agent. The hello is a stream as well.
pub(super) fn server(limits: &Limits) -> h2::server::Builder {
    let mut builder = h2::server::Builder::new();
    builder
        .initial_window_size(limits.window)
        .initial_connection_window_size(connection_window(limits))
        .max_frame_size(FRAME)
        .max_header_list_size(HEADERS)
        .max_send_buffer_size(SEND_BUFFER)
        .max_concurrent_streams(limits.streams + 1)
        .max_concurrent_reset_streams(RESETS)
        .max_pending_accept_reset_streams(RESETS)
        .max_local_error_reset_streams(None)
        .data_frame_budget(SMALL_FRAMES);
    builder
}

/// Checks what the handshake of TLS agreed on, and prepares the connection for bulk.
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
