//! Tests of the HTTP/2 settings. With its default settings, `h2` would close the session or delay its
//! streams.

use std::{
    pin::pin,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{
    RecvStream, SendStream,
    client::{self, ResponseFuture, SendRequest},
    server::{self, SendResponse},
};
use http::{HeaderValue, Request, Response, StatusCode};
use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, DuplexStream},
    task::{JoinSet, unconstrained},
    time::timeout,
};

use super::fixture::{TIMEOUT, limits, tcp_pair};
use crate::tunnel::{
    copy::{self, TunnelStream},
    error_code::StreamSide,
    frame_limit::FrameLimit,
    http2,
    socket::set_stream_options,
    traffic::Traffic,
};

/// The HTTP/2 client and server of a session, without TLS.
struct Session {
    sender: SendRequest<Bytes>,
    client: client::Connection<FrameLimit<DuplexStream>, Bytes>,
    server: server::Connection<FrameLimit<DuplexStream>, Bytes>,
}

type Accepted = Option<Result<(Request<RecvStream>, SendResponse<Bytes>), h2::Error>>;

impl Session {
    async fn new() -> Self {
        let (here, there) = tokio::io::duplex(16 << 20);
        let (here, there) = (FrameLimit::of_client(here), FrameLimit::of_server(there));
        let (of_client, of_server) = (
            http2::client_builder(&limits()),
            http2::server_builder(&limits()),
        );
        let (client, server) = tokio::join!(of_client.handshake(here), of_server.handshake(there));
        let ((sender, client), server) = (client.expect("a client"), server.expect("a server"));
        let mut session = Self {
            sender,
            client,
            server,
        };
        // Exchanges the SETTINGS frames and their acknowledgements.
        (0..2).for_each(|_| session.exchange());
        session
    }

    /// Polls the client once, and asserts that it has not ended.
    fn drive_client(&mut self) {
        let mut cx = Context::from_waker(Waker::noop());
        // Without `unconstrained`, tokio's cooperative budget could stop the poll early.
        let polled = pin!(unconstrained(&mut self.client)).poll(&mut cx);
        assert!(polled.is_pending(), "the client is alive");
    }

    /// Polls the server once.
    fn accept(&mut self) -> Poll<Accepted> {
        let accepted = unconstrained(poll_fn(|cx| self.server.poll_accept(cx)));
        pin!(accepted).poll(&mut Context::from_waker(Waker::noop()))
    }

    /// Polls the client and the server, and asserts that neither has ended and that no request arrives.
    fn exchange(&mut self) {
        self.drive_client();
        assert!(self.accept().is_pending(), "the server is alive");
        self.drive_client();
    }

    /// Opens a stream that the server has not accepted yet.
    fn request(&mut self) -> (ResponseFuture, SendStream<Bytes>) {
        let sent = self.sender.send_request(connect(), false).expect("sent");
        self.drive_client();
        sent
    }

    /// Opens a stream. Returns the client's sender, then the server's receiver and sender.
    async fn stream(&mut self) -> (SendStream<Bytes>, RecvStream, SendStream<Bytes>) {
        let (response, send) = self.request();
        let Poll::Ready(Some(Ok((request, mut respond)))) = self.accept() else {
            panic!("a request");
        };
        let answer = respond.send_response(Response::new(()), false);
        self.exchange();
        assert_eq!(response.await.expect("an answer").status(), StatusCode::OK);
        (send, request.into_body(), answer.expect("answered"))
    }
}

fn connect() -> Request<()> {
    Request::connect("10.1.2.3:10250")
        .body(())
        .expect("a request")
}

// A session and its streams share one thread.
#[tokio::test]
async fn frames_of_one_byte_for_a_blocked_socket_do_not_close_the_session() {
    const FRAMES: usize = 400_000;
    let mut session = Session::new().await;
    let (mut send, recv, answer) = session.stream().await;
    let (mut tcp, mut peer) = tcp_pair().await;
    SockRef::from(&tcp).set_send_buffer_size(4096).expect("set");
    let peer_buffer = |size| SockRef::from(&peer).set_recv_buffer_size(size);
    peer_buffer(4096).expect("set");
    set_stream_options(&tcp).expect("prepared");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        let side = StreamSide::Target;
        let stream = TunnelStream {
            send: answer,
            recv,
            side,
        };
        copy::run(
            &mut tcp,
            stream,
            &Traffic::new(&std::sync::Arc::default()),
            std::time::Duration::ZERO,
            std::future::pending(),
        )
        .await;
    });
    let Session {
        client, mut server, ..
    } = session;
    tasks.spawn(async move { while let Some(Ok(_)) = server.accept().await {} });
    tasks.spawn(async move { client.await.expect("it lives on") });

    for number in 0..FRAMES {
        send.send_data(Bytes::from_static(b"x"), false)
            .expect("it lives");
        if number % 1000 == 0 {
            tokio::task::yield_now().await;
        }
    }

    peer_buffer(1 << 20).expect("set");
    let mut got = vec![0; FRAMES];
    let read = timeout(TIMEOUT, peer.read_exact(&mut got)).await;
    read.expect("soon").expect("all of it");
}

#[tokio::test]
async fn streams_that_are_reset_before_they_are_accepted_do_not_close_the_session() {
    let mut session = Session::new().await;
    let mut streams: Vec<_> = (0..250).map(|_| session.request()).collect();
    for (_, send) in &mut streams {
        send.send_reset(h2::Reason::CANCEL);
    }
    session.drive_client();

    for _ in 0..250 {
        let accepted = session.accept();
        assert!(matches!(accepted, Poll::Ready(Some(Ok(_)))), "{accepted:?}");
    }
    session.exchange();
    drop(session.stream().await);
}

#[tokio::test]
async fn data_for_thousands_of_reset_streams_does_not_close_the_session() {
    let mut session = Session::new().await;
    for _ in 0..30 {
        let mut streams: Vec<_> = (0..100).map(|_| session.request()).collect();
        for _ in 0..100 {
            let Poll::Ready(Some(Ok((_, mut respond)))) = session.accept() else {
                panic!("a request");
            };
            respond.send_reset(h2::Reason::REFUSED_STREAM);
        }
        // Data for streams that the server has reset must do no harm.
        for (_, send) in &mut streams {
            send.send_data(Bytes::from_static(b"late"), false)
                .expect("not known yet");
        }
        session.exchange();
    }
}

#[tokio::test]
async fn headers_that_are_too_long_are_refused_and_the_session_stays_open() {
    let mut session = Session::new().await;
    let mut request = connect();
    let long = HeaderValue::from_bytes(&[b'x'; 3 << 10]).expect("a value");
    request.headers_mut().insert("culvert-target", long);

    let sent = session.sender.send_request(request, false);
    let refused = match sent {
        Err(_) => true,
        Ok((response, _send)) => {
            session.exchange();
            let answer = timeout(TIMEOUT, response).await.expect("soon");
            answer.map_or(true, |answer| answer.status() == 431)
        }
    };

    assert!(refused);
    drop(session.stream().await);
}

#[tokio::test]
async fn the_send_queue_is_bounded_and_sent_in_large_frames() {
    let mut session = Session::new().await;
    let (mut send, mut recv, _answer) = session.stream().await;
    send.reserve_capacity(1 << 20);
    assert_eq!(send.capacity(), 256 << 10);

    send.send_data(vec![0; 256 << 10].into(), false)
        .expect("sent");
    assert_eq!(send.capacity(), 0);
    session.exchange();
    let data = poll_fn(|cx| recv.poll_data(cx)).await;
    assert_eq!(data.expect("data").expect("no error").len(), 128 << 10);
    assert_eq!(send.capacity(), 256 << 10, "room again once it is out");
}

#[tokio::test]
async fn stalled_streams_do_not_block_the_window_of_another() {
    let mut session = Session::new().await;
    let mut all = Vec::new();
    // Opens the maximum number of streams, and fills the window of each.
    for _ in 0..250 {
        let mut stalled = session.stream().await;
        let chunk = Bytes::from(vec![0; 128 << 10]);
        for _ in 0..8 {
            stalled.0.send_data(chunk.clone(), false).expect("sent");
            session.exchange();
        }
        stalled.0.reserve_capacity(1);
        assert_eq!(stalled.0.capacity(), 0, "its window is full");
        all.push(stalled);
    }
    let (send, mut recv, _) = all.pop().expect("one");
    let mut freed = 0;
    while freed < 1 << 20 {
        let data = timeout(TIMEOUT, poll_fn(|cx| recv.poll_data(cx))).await;
        let data = data.expect("all of its window");
        let length = data.expect("data").expect("no error").len();
        recv.flow_control().release_capacity(length).expect("known");
        freed += length;
    }
    session.exchange();
    assert!(
        send.capacity() > 0,
        "the stream continues although 249 others stall"
    );
}
