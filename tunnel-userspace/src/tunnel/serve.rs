//! The agent's side of a session: serves the streams that the gateway opens.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{RecvStream, server::SendResponse};
use http::{Request, Response};
use tokio::{
    net::TcpStream,
    sync::{Semaphore, mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{debug, warn};
use tunnel_common::reason::Reason;

use super::{
    Board, Common,
    agent::Settings,
    copy::{self, Stream},
    dial,
    error_code::{End, code_of, reason_of, reason_of_error, refusing},
    hello,
    link::{Traffic, silence},
    socket::{Meter, prepare_end},
    target::{AllowList, Asked, is_own_address},
    wire::{self, Carrier},
};
use crate::{drain, failure::chain};

/// The time limit of the HTTP/2 handshake and the hello.
const HELLO: Duration = Duration::from_secs(5);
/// The maximum number of allow-list entries in the hello.
const SHOWN: usize = 100;
/// The time that a dial may wait while `maxPendingDials` others are in progress.
const TURN: Duration = Duration::from_secs(1);
/// The time limit for sending resets to the peer before the connection is closed.
const GRACE: Duration = Duration::from_millis(200);

/// The state that all sessions and streams of an agent share.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) settings: Settings,
    pub(super) common: Common,
    pub(super) allow: AllowList,
    pub(super) dials: Semaphore,
    pub(super) board: Arc<Board>,
    pub(super) boot: String,
}

/// An event of a session, for the task that maintains the connection.
#[derive(Debug)]
pub(super) enum News {
    /// The gateway drains, so the agent must open a new session. The streams of this one continue.
    Replace,
    /// The session ended with this error.
    Ended(String),
}

type Connection = h2::server::Connection<Carrier, Bytes>;

/// A session after its hello.
pub(super) struct Running {
    connection: Connection,
    hello: RecvStream,
    pub(super) traffic: Arc<Traffic>,
    meter: Arc<Meter>,
}

/// Begins a session: completes the HTTP/2 handshake, and answers the gateway's hello.
pub(super) async fn begin(shared: &Shared, carrier: Carrier) -> Result<Running, String> {
    let begun = timeout(HELLO, Box::pin(greet(shared, carrier))).await;
    begun.unwrap_or_else(|_elapsed| Err(format!("the gateway sent no hello within {HELLO:?}")))
}

async fn greet(shared: &Shared, carrier: Carrier) -> Result<Running, String> {
    let meter = carrier.get_ref().0.meter();
    let builder = wire::server(&shared.common.limits);
    let handshake = builder.handshake(carrier).await;
    let mut connection = handshake.map_err(|error| chain(&error))?;
    let first = connection.accept().await;
    let (request, respond) = first
        .ok_or("the gateway disconnected before the hello")?
        .map_err(|error| chain(&error))?;
    let answer = hello::Answer {
        release: env!("CARGO_PKG_VERSION").to_owned(),
        session: format!("{:016x}", fastrand::u64(..)),
        boot: shared.boot.clone(),
        allow: shared
            .settings
            .allowed_targets
            .iter()
            .take(SHOWN)
            .cloned()
            .collect(),
        ..hello::Answer::default()
    };
    let hello = {
        let mut answered = pin!(hello::answer(request, respond, answer));
        loop {
            tokio::select! {
                hello = &mut answered => break hello,
                next = connection.accept() => match next {
                    // The gateway must not open a stream before it has the answer to the hello.
                    Some(Ok((_, mut respond))) => {
                        respond.send_reset(code_of(Reason::ProtocolError));
                    }
                    Some(Err(error)) => return Err(chain(&error)),
                    None => return Err("the gateway disconnected during the hello".to_owned()),
                },
            }
        }
    };
    match hello {
        Ok(hello) => Ok(Running {
            connection,
            hello,
            traffic: Arc::default(),
            meter,
        }),
        Err(error) => {
            // Sends the refusal of the hello, which is still queued.
            connection.graceful_shutdown();
            flush(&mut connection).await;
            Err(chain(&error))
        }
    }
}

/// Sends the queued frames, within [`GRACE`].
async fn flush(connection: &mut Connection) {
    let sent = async { while connection.accept().await.is_some() {} };
    drop(timeout(GRACE, sent).await);
}

/// Serves streams until the session ends.
pub(super) async fn run(
    shared: Arc<Shared>,
    running: Running,
    news: mpsc::UnboundedSender<News>,
    mut draining: watch::Receiver<bool>,
) {
    let Running {
        mut connection,
        hello,
        traffic,
        meter,
    } = running;
    let (stop, stopped) = watch::channel(false);
    let mut hello = Some(hello);
    let mut streams = JoinSet::new();
    let limits = &shared.common.limits;
    let ping = connection.ping_pong();
    let mut quiet = pin!(silence(ping, &meter, &traffic, limits));
    let mut deadline = draining.clone();
    let mut last = pin!(async move {
        drain::begun(&mut deadline).await;
        sleep(limits.drain_timeout).await;
    });
    let mut is_draining = false;
    let ended = loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((request, respond))) => {
                    let stream = Arc::clone(&shared).serve(
                        request, respond, Arc::clone(&traffic), stopped.clone());
                    streams.spawn(stream);
                }
                Some(Err(error)) => break chain(&error),
                None => break "the gateway closed the connection".to_owned(),
            },
            Some(_) = streams.join_next() => {}
            () = &mut quiet => break format!("no sign of life for {:?}", limits.ping_timeout),
            () = ended(&mut hello), if hello.is_some() => {
                hello = None;
                drop(news.send(News::Replace));
            }
            () = drain::begun(&mut draining), if !is_draining => {
                is_draining = true;
                // The connection ends with its last stream, and the hello is a stream, too.
                hello = None;
                connection.graceful_shutdown();
            }
            () = &mut last => {
                warn!(streams = streams.len(), "the drain timed out; open streams are reset");
                stop.send_replace(true);
                flush(&mut connection).await;
                break "the agent stopped".to_owned();
            }
        }
    };
    drop(connection);
    // The receiver may be gone, since it receives only the first event.
    drop(news.send(News::Ended(ended)));
    // The remaining streams fail, since the connection is closed.
    while streams.join_next().await.is_some() {}
}

/// Waits for the end of the hello stream, by which the gateway announces that it drains.
async fn ended(hello: &mut Option<RecvStream>) {
    let Some(hello) = hello else { return };
    // Data is ignored; a later release may send some.
    while let Some(Ok(bytes)) = poll_fn(|cx| hello.poll_data(cx)).await {
        drop(hello.flow_control().release_capacity(bytes.len()));
    }
}

impl Shared {
    /// Serves one stream.
    async fn serve(
        self: Arc<Self>,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
        traffic: Arc<Traffic>,
        mut stopped: watch::Receiver<bool>,
    ) {
        // The gateway respects the advertised limit of streams; this slot only counts the stream.
        let slot = traffic.slot(u32::MAX);
        let asked = Asked::of(&request);
        let dialled = match asked {
            Ok(asked) if request.method() == http::Method::CONNECT => {
                self.dial(&asked, &mut respond).await
            }
            Ok(_) => Err(Reason::ProtocolError),
            Err(reason) => Err(reason),
        };
        let stop = drain::begun(&mut stopped);
        let reason = match dialled {
            Ok(mut tcp) => Box::pin(answer(&mut tcp, request, respond, &traffic, stop)).await,
            Err(reason) => {
                refuse(respond, reason);
                reason
            }
        };
        drop(slot);
        self.board.counts.count(reason);
        debug!(asked = ?asked.ok(), reason = reason.label(), "stream ended");
    }

    /// Dials the requested target if the allow-list permits it, until the client resets the stream.
    async fn dial(
        &self,
        asked: &Asked,
        respond: &mut SendResponse<Bytes>,
    ) -> Result<TcpStream, Reason> {
        let address = self.allow.resolve(asked, is_own_address)?;
        let (limit, mark) = (self.settings.dial_timeout, self.common.mark);
        let dialled = async {
            // In a burst, a dial waits for earlier ones.
            let turn = timeout(TURN, self.dials.acquire()).await;
            let _dial = turn.ok().and_then(Result::ok).ok_or(Reason::DialLimit)?;
            dial::target(address, mark, limit).await
        };
        let tcp = tokio::select! {
            tcp = dialled => tcp?,
            code = poll_fn(|cx| respond.poll_reset(cx)) => return Err(match code {
                Ok(code) => reason_of(code, End::Client),
                Err(error) => reason_of_error(&error, End::Client),
            }),
        };
        prepare_end(&tcp).map_err(|_error| Reason::TargetReset)?;
        Ok(tcp)
    }
}

/// Answers the CONNECT with success, then copies until the stream ends.
async fn answer(
    tcp: &mut TcpStream,
    request: Request<RecvStream>,
    mut respond: SendResponse<Bytes>,
    traffic: &Traffic,
    stop: impl Future<Output = ()>,
) -> Reason {
    let send = match respond.send_response(Response::new(()), false) {
        Ok(send) => send,
        Err(error) => return reason_of_error(&error, End::Client),
    };
    let stream = Stream {
        send,
        recv: request.into_body(),
        local: End::Target,
    };
    copy::run(tcp, stream, traffic, stop).await
}

fn refuse(mut respond: SendResponse<Bytes>, reason: Reason) {
    if [Reason::ClientReset, Reason::AgentConnectionLost].contains(&reason) {
        // The client is gone, so there is no stream to refuse.
        return;
    }
    if let Err(error) = respond.send_response(refusing(reason), true) {
        debug!(%error, "cannot send the refusal of a stream");
    }
}
