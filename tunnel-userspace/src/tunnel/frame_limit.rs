//! Limits on the HTTP/2 frames that a peer may send, so that no session keeps its thread from the others, and
//! none makes this end work for nothing.
//!
//! `h2` reads until its connection has no more bytes, and handles each frame that it reads. A peer that sends
//! fast enough would therefore occupy the thread without end, and everything that `h2` queues meanwhile would
//! grow. [`FrameLimit`] counts the frames between TLS and `h2`, and makes `h2` pause after a number of bytes
//! and frames.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

/// The number of bytes after which the reader pauses, so that the thread's other tasks run.
const PAUSE_AFTER_BYTES: usize = 256 << 10;
/// The number of frames after which the reader pauses. Most frames cost `h2` less than a microsecond.
const PAUSE_AFTER_FRAMES: u32 = 1024;
/// The length of a frame header, in bytes (RFC 9113 section 4.1).
const HEADER: usize = 9;
/// The bytes that a client sends before its first frame (RFC 9113 section 3.4).
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// The limit on frames that concern the whole connection or carry nothing: SETTINGS, PING, GOAWAY, PRIORITY,
/// PUSH_PROMISE, unknown types, and empty DATA frames. A peer sends a few of them in each ping interval. A
/// SETTINGS frame can cost `h2` work for every open stream.
const CONNECTION_FRAMES: Rate = Rate {
    burst: 1000,
    per_second: 100,
};
/// The limit on the frames that open, end and control streams: HEADERS, CONTINUATION, RST_STREAM and
/// WINDOW_UPDATE. A busy peer sends some thousands of them per second.
const STREAM_FRAMES: Rate = Rate {
    burst: 100_000,
    per_second: 50_000,
};

/// The error for a peer that sends more frames than a limit allows.
#[derive(Clone, Copy, Debug, Eq, PartialEq, thiserror::Error)]
#[error(
    "the peer sent too many HTTP/2 frames without data: more than {} per second, and {} in a burst \
     (frame type {kind:#x})",
    rate.per_second,
    rate.burst
)]
pub(super) struct TooManyFrames {
    kind: u8,
    rate: Rate,
}

/// The limit on the frequency of frames.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Rate {
    burst: u32,
    per_second: u32,
}

/// The number of frames that a peer may still send.
#[derive(Debug)]
struct Allowance {
    rate: Rate,
    left: u32,
    refilled: Instant,
}

impl Allowance {
    fn new(rate: Rate) -> Self {
        Self {
            rate,
            left: rate.burst,
            refilled: Instant::now(),
        }
    }

    /// Takes one frame from the allowance. Returns false if none is left.
    fn take(&mut self) -> bool {
        if self.left == 0 {
            let now = Instant::now();
            let millis = now.duration_since(self.refilled).as_millis();
            let earned = millis * u128::from(self.rate.per_second) / 1000;
            let earned = u32::try_from(earned).unwrap_or(u32::MAX);
            if earned == 0 {
                return false;
            }
            self.left = earned.min(self.rate.burst);
            self.refilled = now;
        }
        self.left -= 1;
        true
    }
}

/// Follows the frames in a stream of bytes and counts them.
#[derive(Debug)]
struct FrameCounter {
    /// The header of the next frame, of which `have` bytes have arrived.
    header: [u8; HEADER],
    have: usize,
    /// The number of bytes to skip before the next header: the rest of a payload, or of the preface.
    skip: usize,
    connection: Allowance,
    stream: Allowance,
}

impl FrameCounter {
    fn new(preface: usize) -> Self {
        Self {
            header: [0; HEADER],
            have: 0,
            skip: preface,
            connection: Allowance::new(CONNECTION_FRAMES),
            stream: Allowance::new(STREAM_FRAMES),
        }
    }

    /// Counts the frames that begin in `bytes`, which follow the bytes of the previous call. Returns their
    /// number.
    fn count(&mut self, mut bytes: &[u8]) -> Result<u32, TooManyFrames> {
        let mut frames = 0;
        while !bytes.is_empty() {
            let skipped = self.skip.min(bytes.len());
            self.skip -= skipped;
            bytes = bytes.get(skipped..).unwrap_or_default();
            let taken = (HEADER - self.have).min(bytes.len());
            let (part, rest) = bytes.split_at_checked(taken).unwrap_or_default();
            if let Some(space) = self.header.get_mut(self.have..self.have + taken) {
                space.copy_from_slice(part);
            }
            self.have += taken;
            bytes = rest;
            if self.have == HEADER {
                self.have = 0;
                frames += 1;
                self.skip = self.admit()?;
            }
        }
        Ok(frames)
    }

    /// Takes the frame whose header is complete from its allowance. Returns the length of its payload.
    fn admit(&mut self) -> Result<usize, TooManyFrames> {
        let [high, middle, low, kind, flags, ..] = self.header;
        let length = usize::from(high) << 16 | usize::from(middle) << 8 | usize::from(low);
        let allowance = match FrameKind::of(kind, flags, length) {
            FrameKind::Data => return Ok(length),
            FrameKind::Stream => &mut self.stream,
            FrameKind::Connection => &mut self.connection,
        };
        let rate = allowance.rate;
        if allowance.take() {
            Ok(length)
        } else {
            Err(TooManyFrames { kind, rate })
        }
    }
}

/// The limit that a frame counts against.
enum FrameKind {
    /// Carries bytes of a stream, so its flow-control window limits it.
    Data,
    Stream,
    Connection,
}

impl FrameKind {
    /// Classifies a frame by the type, flags and length in its header (RFC 9113 section 6).
    const fn of(kind: u8, flags: u8, length: usize) -> Self {
        const END_STREAM: u8 = 1;
        match kind {
            0 if length > 0 || flags & END_STREAM != 0 => Self::Data,
            // HEADERS, RST_STREAM, WINDOW_UPDATE and CONTINUATION.
            1 | 3 | 8 | 9 => Self::Stream,
            _ => Self::Connection,
        }
    }
}

/// A connection that limits the frames it reads. A read fails with [`TooManyFrames`] once the peer exceeds a
/// limit.
#[derive(Debug)]
pub(super) struct FrameLimit<T> {
    inner: T,
    counter: FrameCounter,
    /// The bytes and frames read since the task last paused.
    bytes: usize,
    frames: u32,
}

impl<T> FrameLimit<T> {
    /// Wraps the connection of an HTTP/2 client, whose peer begins with a frame.
    pub(super) fn of_client(inner: T) -> Self {
        Self::new(inner, 0)
    }

    /// Wraps the connection of an HTTP/2 server, whose peer begins with the preface.
    pub(super) fn of_server(inner: T) -> Self {
        Self::new(inner, PREFACE.len())
    }

    fn new(inner: T, preface: usize) -> Self {
        Self {
            inner,
            counter: FrameCounter::new(preface),
            bytes: 0,
            frames: 0,
        }
    }
}

impl<T: AsyncRead + Unpin> AsyncRead for FrameLimit<T> {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = self.get_mut();
        if this.bytes >= PAUSE_AFTER_BYTES || this.frames >= PAUSE_AFTER_FRAMES {
            (this.bytes, this.frames) = (0, 0);
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        let before = buf.filled().len();
        let read = Pin::new(&mut this.inner).poll_read(cx, buf);
        if read.is_pending() {
            (this.bytes, this.frames) = (0, 0);
        }
        ready!(read)?;
        let new = buf.filled().get(before..).unwrap_or_default();
        this.bytes += new.len();
        let invalid = |error| io::Error::new(io::ErrorKind::InvalidData, error);
        this.frames += this.counter.count(new).map_err(invalid)?;
        Poll::Ready(Ok(()))
    }
}

impl<T: AsyncWrite + Unpin> AsyncWrite for FrameLimit<T> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &[u8],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(cx, buf)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write_vectored(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use std::{pin::pin, task::Waker};

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _},
        task::unconstrained,
        time::{Duration, advance},
    };

    use super::*;

    const PING: u8 = 6;

    fn frame(kind: u8, flags: u8, length: u8) -> Vec<u8> {
        let mut bytes = vec![0, 0, length, kind, flags, 0, 0, 0, 1];
        bytes.resize(HEADER + usize::from(length), 0xff);
        bytes
    }

    #[tokio::test(start_paused = true)]
    async fn frames_are_counted_however_their_bytes_are_divided() {
        let mut bytes = PREFACE.to_vec();
        for length in [0, 1, 8, 255] {
            bytes.extend(frame(PING, 0, length));
        }
        for part in 1..bytes.len() {
            let mut counter = FrameCounter::new(PREFACE.len());
            let frames = bytes.chunks(part).map(|part| counter.count(part));
            let frames: u32 = frames.map(|count| count.expect("allowed")).sum();
            assert_eq!(frames, 4, "in parts of {part}");
            assert_eq!(counter.connection.left, CONNECTION_FRAMES.burst - 4);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn frames_beyond_the_limit_are_an_error_until_time_has_passed() {
        let mut counter = FrameCounter::new(0);
        let ping = frame(PING, 0, 8);
        for _ in 0..CONNECTION_FRAMES.burst {
            counter.count(&ping).expect("within the burst");
        }
        let error = counter.count(&ping).expect_err("beyond it");
        assert_eq!(
            error.to_string(),
            "the peer sent too many HTTP/2 frames without data: more than 100 per second, and 1000 in \
             a burst (frame type 0x6)"
        );

        advance(Duration::from_secs(1)).await;
        for _ in 0..CONNECTION_FRAMES.per_second {
            counter.count(&ping).expect("a second later");
        }
        counter.count(&ping).unwrap_err();
    }

    #[tokio::test(start_paused = true)]
    async fn only_frames_with_data_are_unlimited() {
        let count = |kind, flags, length| {
            let mut counter = FrameCounter::new(0);
            let frame = frame(kind, flags, length);
            (0..1_000_000).find(|_| counter.count(&frame).is_err())
        };
        const END_STREAM: u8 = 1;
        assert_eq!(count(0, 0, 1), None, "DATA");
        assert_eq!(count(0, END_STREAM, 0), None, "the end of a stream");
        assert_eq!(count(0, 0, 0), Some(1000), "empty DATA");
        for kind in [2, 4, 5, 6, 7, 10, 0xff] {
            assert_eq!(count(kind, 0, 8), Some(1000), "type {kind}");
        }
        for kind in [1, 3, 8, 9] {
            assert_eq!(count(kind, 0, 8), Some(100_000), "type {kind}");
        }
    }

    /// Reads as `h2` does, until the connection is pending. Returns the number of bytes read, and whether the
    /// task was woken at once.
    fn read_until_pending(limit: &mut FrameLimit<impl AsyncRead + Unpin>) -> usize {
        let mut cx = Context::from_waker(Waker::noop());
        let (mut buf, mut total) = (vec![0; 16 << 10], 0);
        while let Poll::Ready(read) = pin!(unconstrained(limit.read(&mut buf))).poll(&mut cx) {
            total += read.expect("read");
        }
        total
    }

    #[tokio::test(start_paused = true)]
    async fn the_reader_pauses_after_many_frames_and_after_many_bytes() {
        for length in [1, 200] {
            let (mut peer, here) = tokio::io::duplex(4 << 20);
            let mut limit = FrameLimit::of_client(here);
            let data = frame(0, 0, length).repeat(10_000);
            peer.write_all(&data).await.expect("written");

            let first = read_until_pending(&mut limit);
            let frames = data.len() / 10_000 * usize::try_from(PAUSE_AFTER_FRAMES).expect("few");
            let expected = frames.min(PAUSE_AFTER_BYTES);
            assert!(
                (expected..=expected + (16 << 10)).contains(&first),
                "{first} bytes"
            );
            let mut total = first;
            while total < data.len() {
                total += read_until_pending(&mut limit);
            }
            assert_eq!(total, data.len());
        }
    }
}
