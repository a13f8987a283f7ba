//! The TCP connection beneath a session's TLS, and the socket options for all of the tunnel's connections.

use std::{
    future::Future as _,
    io::{self, IoSlice},
    pin::{Pin, pin},
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    task::{Context, Poll, ready},
    time::Duration,
};

use bytes::{Buf as _, BytesMut};
use socket2::{SockRef, TcpKeepalive};
use tokio::{
    io::{AsyncRead, AsyncReadExt as _, AsyncWrite, ReadBuf},
    net::TcpStream,
};

use super::adaptive_read_size::ReadSize;

/// The maximum time that sent bytes may stay unacknowledged before the kernel closes the connection.
const USER_TIMEOUT: Duration = Duration::from_secs(20);
/// The maximum number of unsent bytes in the kernel. It is limited because queued bytes delay later frames.
const MAX_UNSENT: u32 = 256 << 10;
/// The maximum number of bytes to read ahead while a write is blocked. It exceeds what the peer can have
/// queued between `h2` and the wire: a frame, the TLS buffer, and the unsent bytes in the peer's kernel.
const MAX_READ_AHEAD: usize = 1 << 20;

/// Sets the socket options for a session's TCP connection.
pub(super) fn set_session_options(tcp: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(tcp);
    socket.set_tcp_nodelay(true)?;
    socket.set_tcp_user_timeout(Some(USER_TIMEOUT))?;
    socket.set_tcp_notsent_lowat(MAX_UNSENT)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(10))
        .with_interval(Duration::from_secs(5))
        .with_retries(2);
    socket.set_tcp_keepalive(&keepalive)
}

/// The size of the kernel's send and receive buffers for the sockets of clients and targets, in bytes. By
/// default, the kernel buffers many times as much for a slow reader. A few hundred slow readers would then
/// use up the kernel's TCP memory, and every connection on the node would stall on retransmissions.
const BUFFER_SIZE: usize = 256 * 1024;

/// The congestion control algorithm for the sockets of clients and targets. Their peers are nearby, usually
/// on the same node, where `bbr`, the default on some systems, costs a timer per write and gains nothing.
/// Every kernel has `reno`.
const CONGESTION_CONTROL: &[u8] = b"reno";

/// Sets the socket options for a TCP connection to a client or target. Closing the connection resets it
/// unless [`disable_reset_on_close`] has been called, so that a failed stream never looks complete to the
/// peer.
pub(super) fn set_stream_options(tcp: &TcpStream) -> io::Result<()> {
    let socket = SockRef::from(tcp);
    socket.set_tcp_nodelay(true)?;
    socket.set_linger(Some(Duration::ZERO))?;
    socket.set_tcp_congestion(CONGESTION_CONTROL)?;
    socket.set_recv_buffer_size(BUFFER_SIZE)?;
    socket.set_send_buffer_size(BUFFER_SIZE)?;
    let keepalive = TcpKeepalive::new()
        .with_time(Duration::from_secs(60))
        .with_interval(Duration::from_secs(10))
        .with_retries(6);
    socket.set_tcp_keepalive(&keepalive)
}

/// Makes closing the connection orderly again, now that both directions have ended. The kernel then still
/// sends any unsent bytes after the close.
pub(super) fn disable_reset_on_close(tcp: &TcpStream) -> io::Result<()> {
    SockRef::from(tcp).set_linger(None)
}

/// Moves a connection to the current thread's runtime, which then polls it.
pub(super) fn move_to_current_runtime(tcp: TcpStream) -> io::Result<TcpStream> {
    TcpStream::from_std(tcp.into_std()?)
}

/// A counter of the bytes that a session has received, measured below TLS.
#[derive(Debug, Default)]
pub(super) struct Meter {
    received: AtomicU64,
}

impl Meter {
    /// Returns the number of bytes received so far. Any increase means that the peer is alive.
    pub(super) fn received(&self) -> u64 {
        self.received.load(Ordering::Relaxed)
    }
}

/// A session's TCP connection, below TLS. It counts the received bytes, and reads in large blocks, since
/// rustls reads only 4 KiB at a time.
#[derive(Debug)]
pub(super) struct SessionSocket {
    tcp: TcpStream,
    inbox: BytesMut,
    size: ReadSize,
    meter: Arc<Meter>,
}

impl SessionSocket {
    pub(super) fn new(tcp: TcpStream) -> Self {
        Self {
            tcp,
            inbox: BytesMut::new(),
            size: ReadSize::default(),
            meter: Arc::default(),
        }
    }

    pub(super) fn meter(&self) -> Arc<Meter> {
        Arc::clone(&self.meter)
    }

    /// Reads once and appends the bytes to `inbox`.
    fn poll_fill(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<usize>> {
        if self.inbox.is_empty() && self.inbox.capacity() > 2 * self.size.bytes() {
            self.inbox = BytesMut::new();
        }
        self.inbox.reserve(self.size.bytes());
        let read = pin!(self.tcp.read_buf(&mut self.inbox)).poll(cx);
        let is_idle = read.is_pending() && self.inbox.is_empty();
        if is_idle && self.inbox.capacity() > ReadSize::default().bytes() {
            // Idle sessions must not hold on to a buffer.
            self.inbox = BytesMut::new();
        }
        let read = ready!(read)?;
        self.size.adapt(read);
        let counted = u64::try_from(read).unwrap_or(u64::MAX);
        self.meter.received.fetch_add(counted, Ordering::Relaxed);
        Poll::Ready(Ok(read))
    }

    /// Reads ahead into `inbox`, up to [`MAX_READ_AHEAD`] bytes, while a write is blocked.
    ///
    /// `h2` does not read while it has a ping acknowledgement to write. If both peers were in this state with
    /// full buffers between them, neither write would ever complete.
    fn poll_read_ahead<T>(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<T>> {
        while self.inbox.len() < MAX_READ_AHEAD {
            match self.poll_fill(cx) {
                // The next read reports the end of the stream again.
                Poll::Pending | Poll::Ready(Ok(0)) => break,
                Poll::Ready(Ok(_)) => {}
                Poll::Ready(Err(error)) => return Poll::Ready(Err(error)),
            }
        }
        Poll::Pending
    }
}

impl AsyncRead for SessionSocket {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.inbox.is_empty() {
            ready!(this.poll_fill(cx))?;
        }
        let length = buf.remaining().min(this.inbox.len());
        if let Some(bytes) = this.inbox.get(..length) {
            buf.put_slice(bytes);
        }
        this.inbox.advance(length);
        Poll::Ready(Ok(()))
    }
}

impl AsyncWrite for SessionSocket {
    fn poll_write(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        self.poll_write_vectored(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let this = self.get_mut();
        match Pin::new(&mut this.tcp).poll_write_vectored(cx, bufs) {
            Poll::Pending => this.poll_read_ahead(cx),
            written @ Poll::Ready(_) => written,
        }
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_flush(cx)
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().tcp).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::future::poll_fn;
    use tokio::{io::AsyncWriteExt as _, net::TcpSocket, time::timeout};

    use super::*;

    /// Returns a session's connection and its other end, both with small kernel buffers.
    async fn pair() -> (SessionSocket, TcpStream) {
        let [listener, dialler] = [(); 2].map(|()| {
            let socket = TcpSocket::new_v4().expect("a socket");
            socket.set_recv_buffer_size(8192).expect("set");
            socket.set_send_buffer_size(8192).expect("set");
            socket
        });
        let any = "127.0.0.1:0".parse().expect("an address");
        listener.bind(any).expect("bound");
        let listener = listener.listen(1).expect("listening");
        let address = listener.local_addr().expect("an address");
        let here = dialler.connect(address).await.expect("connected");
        let (there, _) = listener.accept().await.expect("accepted");
        (SessionSocket::new(here), there)
    }

    /// Writes until the socket accepts no more bytes.
    fn write_until_blocked(
        here: &mut SessionSocket,
        bytes: &[u8],
        cx: &mut Context<'_>,
    ) -> Poll<io::Result<()>> {
        while Pin::new(&mut *here).poll_write(cx, bytes)?.is_ready() {}
        Poll::Pending
    }

    #[tokio::test]
    async fn a_blocked_write_reads_ahead_so_that_the_peer_can_go_on_writing() {
        let (mut here, mut there) = pair().await;
        let (sent, half) = (vec![3; 900 << 10], vec![0; 64 << 10]);

        let blocked = poll_fn(|cx| write_until_blocked(&mut here, &half, cx));
        tokio::select! {
            _ = blocked => panic!("nobody reads"),
            written = timeout(Duration::from_secs(10), there.write_all(&sent)) => {
                written.expect("soon").expect("written");
            }
        }

        let mut got = vec![0; sent.len()];
        here.read_exact(&mut got).await.expect("read");
        assert!(got == sent);
    }

    #[tokio::test]
    async fn reading_ahead_is_bounded() {
        let (mut here, mut there) = pair().await;
        let half = vec![0; 64 << 10];

        let both = async {
            let blocked = poll_fn(|cx| write_until_blocked(&mut here, &half, cx));
            let flood = there.write_all(&[0; 4 << 20]);
            tokio::join!(blocked, flood)
        };
        timeout(Duration::from_millis(500), both)
            .await
            .expect_err("both wait");

        assert!(
            here.inbox.len() < MAX_READ_AHEAD + (256 << 10),
            "{}",
            here.inbox.len()
        );
    }

    #[tokio::test]
    async fn an_idle_session_holds_no_buffer() {
        let (mut here, mut there) = pair().await;
        let mut got = vec![0; 1 << 20];
        let (written, read) =
            tokio::join!(there.write_all(&[1; 1 << 20]), here.read_exact(&mut got));
        written.expect("written");
        read.expect("read");
        // Nothing more arrives.
        let mut one = [0];
        let idle = timeout(Duration::from_millis(50), here.read(&mut one)).await;
        idle.expect_err("idle");

        assert!(here.inbox.capacity() <= ReadSize::default().bytes());
    }
}
