//! The agent's side of a session, which serves the streams that the gateway opens.

use std::{pin::pin, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::future::poll_fn;
use h2::{RecvStream, server::SendResponse};
use http::{Request, Response};
use jiff::SignedDuration;
use tokio::{
    net::TcpStream,
    sync::{mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tracing::{debug, warn};
use tunnel_common::reason::Reason;

use super::{
    AgentState, CommonSettings,
    agent::AgentSettings,
    allow_list::{AllowList, RequestedTarget, is_own_address},
    copy::{self, TunnelStream},
    dial,
    dial_permits::DialPermits,
    error_code::{StreamSide, code_of, reason_of_code, reason_of_error, refusal_response},
    hello::{self, GatewayLine, GatewayLines},
    http2::{self, ServerConnection, TlsConnection},
    keepalive::wait_for_silence,
    log_limit::LogLimit,
    peer_certificates::PeerCertificates,
    session_token::SessionToken,
    socket::{Meter, set_stream_options},
    stream_window::StreamWindow,
    traffic::Traffic,
};
use crate::{
    drain,
    error_chain::chain,
    identity::{self, CertificateReceiver, Identity, Role, clock},
};

/// The time limit for the HTTP/2 handshake and the hello together.
const HELLO_TIMEOUT: Duration = Duration::from_secs(5);
/// The maximum number of allow-list entries to include in the hello.
const MAX_ALLOW_ENTRIES: usize = 100;
/// The longest that a dial may wait its turn while `maxPendingDials` others are in progress.
const DIAL_QUEUE_TIMEOUT: Duration = Duration::from_secs(1);
/// The time limit for sending resets to the peer before the connection is closed.
const RESET_TIMEOUT: Duration = Duration::from_millis(200);

/// The state shared by all of an agent's sessions and streams.
#[derive(Debug)]
pub(super) struct AgentContext {
    pub(super) settings: AgentSettings,
    pub(super) common: CommonSettings,
    pub(super) allow_list: AllowList,
    pub(super) dial_permits: DialPermits,
    pub(super) state: Arc<AgentState>,
    pub(super) log_limit: LogLimit,
    pub(super) boot_id: String,
}

/// An event that a session reports to the task that maintains the connection.
#[derive(Debug)]
pub(super) enum SessionEvent {
    /// The gateway has renewed the sessions with these tokens.
    Renewed(Vec<SessionToken>),
    /// The gateway is draining, so the agent must open a new session. The streams of this one continue.
    GatewayDrains,
    /// The session ended with this error.
    Ended(String),
}

/// A session that has completed the exchange of hellos.
pub(super) struct EstablishedSession {
    connection: ServerConnection,
    hello: GatewayLines,
    pub(super) traffic: Arc<Traffic>,
    meter: Arc<Meter>,
    pub(super) handle: SessionHandle,
    /// Becomes true once another session takes this one's new streams.
    retired: watch::Receiver<bool>,
    /// The earlier sessions that this one renews.
    renews: Vec<SessionHandle>,
}

/// The parts of a session that the sessions after it use.
#[derive(Clone, Debug)]
pub(super) struct SessionHandle {
    token: SessionToken,
    pub(super) gateway: PeerCertificates,
    /// Becomes true once another session takes this one's new streams. Closed once the session has ended.
    retired: watch::Sender<bool>,
}

impl EstablishedSession {
    /// Returns true if the gateway confirms which sessions it has renewed.
    pub(super) const fn confirms_renewals(&self) -> bool {
        self.hello.confirms_renewals
    }

    /// Returns the difference between the gateway's clock and this machine's.
    pub(super) const fn clock_skew(&self) -> Option<SignedDuration> {
        self.hello.clock_skew
    }
}

impl SessionHandle {
    /// Returns true if this session is among those with the tokens.
    pub(super) fn is_in(&self, tokens: &[SessionToken]) -> bool {
        tokens.iter().any(|token| token.is(&self.token))
    }

    /// Lets the session take no more streams, and end with its last one.
    pub(super) fn retire(&self) {
        self.retired.send_replace(true);
    }

    /// Returns true once another session takes this one's new streams.
    pub(super) fn is_retired(&self) -> bool {
        *self.retired.borrow()
    }

    /// Returns true once the session has ended.
    pub(super) fn is_closed(&self) -> bool {
        self.retired.is_closed()
    }
}

/// The sessions that a new one renews.
#[derive(Clone, Debug, Default)]
pub(super) struct Renewal {
    pub(super) sessions: Vec<SessionHandle>,
    /// True if the new session takes no streams itself.
    pub(super) is_all: bool,
}

/// Establishes a session: performs the HTTP/2 handshake and replies to the gateway's hello.
pub(super) async fn establish(
    shared: &AgentContext,
    tls: TlsConnection,
    own: &Identity,
    renewal: Renewal,
) -> Result<EstablishedSession, String> {
    let begun = timeout(
        HELLO_TIMEOUT,
        Box::pin(exchange_hello(shared, tls, renewal)),
    )
    .await;
    let begun = begun.unwrap_or_else(|_elapsed| {
        Err(format!(
            "the gateway sent no hello within {HELLO_TIMEOUT:?}"
        ))
    });
    begun.map_err(|error| explain_alert(error, own))
}

/// Explains the TLS alerts with which a gateway refuses an agent. `h2` keeps only the text of the TLS library's error.
fn explain_alert(error: String, own: &Identity) -> String {
    if error.ends_with("received fatal alert: CertificateExpired") {
        let (from, expires, now) = (own.from, own.expires, clock::of_machine());
        return format!(
            "the gateway's clock is not between {from} and {expires}, the dates of this agent's certificate; this machine's clock \
             says {now:.0} (TLS alert CertificateExpired)"
        );
    }
    for (alert, entry) in [
        ("AccessDenied", "node"),
        ("CertificateRevoked", "certificate"),
    ] {
        if error.ends_with(&format!("received fatal alert: {alert}")) {
            return format!("the gateway's deny list has this {entry} (TLS alert {alert})");
        }
    }
    error
}

async fn exchange_hello(
    shared: &AgentContext,
    tls: TlsConnection,
    renewal: Renewal,
) -> Result<EstablishedSession, String> {
    let meter = tls.get_ref().0.meter();
    let certificates = tls.get_ref().1.peer_certificates().unwrap_or_default();
    let (retire, retired) = watch::channel(false);
    let handle = SessionHandle {
        token: SessionToken::random(),
        gateway: PeerCertificates::new(certificates),
        retired: retire,
    };
    let handshake = http2::accept(&shared.common.limits, tls).await;
    let mut connection = handshake.map_err(|error| chain(&error))?;
    let first = connection.accept().await;
    let (request, respond) = first
        .ok_or("the gateway disconnected before the hello")?
        .map_err(|error| chain(&error))?;
    let answer = hello::AgentHello {
        release: env!("CARGO_PKG_VERSION").to_owned(),
        session: format!("{:016x}", fastrand::u64(..)),
        boot: shared.boot_id.clone(),
        allow: shared
            .settings
            .allowed_targets
            .iter()
            .take(MAX_ALLOW_ENTRIES)
            .cloned()
            .collect(),
        token: handle.token.clone(),
        renews: renewal.sessions.iter().map(|it| it.token.clone()).collect(),
        only_renews: renewal.is_all,
        ..hello::AgentHello::default()
    };
    let hello = {
        let mut answered = pin!(hello::respond(request, respond, answer));
        loop {
            tokio::select! {
                hello = &mut answered => break hello,
                next = connection.accept() => match next {
                    // The gateway must not open another stream before it has received the reply to its hello.
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
        Ok(hello) => Ok(EstablishedSession {
            connection,
            hello,
            traffic: Traffic::new(&shared.common.memory),
            meter,
            handle,
            retired,
            renews: renewal.sessions,
        }),
        Err(error) => {
            // The response that refuses the hello is still queued, so it must be sent first.
            connection.graceful_shutdown();
            flush(&mut connection).await;
            Err(chain(&error))
        }
    }
}

/// Sends the queued frames, but gives up after [`RESET_TIMEOUT`].
async fn flush(connection: &mut ServerConnection) {
    let sent = async { while connection.accept().await.is_some() {} };
    drop(timeout(RESET_TIMEOUT, sent).await);
}

/// Serves streams until the session ends.
pub(super) async fn run(
    shared: Arc<AgentContext>,
    established: EstablishedSession,
    own: CertificateReceiver,
    events: mpsc::UnboundedSender<SessionEvent>,
    mut draining: watch::Receiver<bool>,
) {
    let EstablishedSession {
        mut connection,
        hello,
        traffic,
        meter,
        handle,
        mut retired,
        renews,
    } = established;
    let gateway = &handle.gateway;
    let (stop, stopped) = watch::channel(false);
    let mut hello = Some(hello);
    let mut streams = JoinSet::new();
    let limits = &shared.common.limits;
    let ping = connection.ping_pong();
    let mut quiet = pin!(wait_for_silence(ping, &meter, &traffic, limits));
    let mut deadline = draining.clone();
    let mut drain_end = pin!(async move {
        drain::begun(&mut deadline).await;
        sleep(limits.drain_timeout).await;
    });
    let mut rejected = pin!(gateway.rejected(own, Role::Gateway));
    let mut is_draining = false;
    let mut window = StreamWindow::new(limits);
    let ended = loop {
        tokio::select! {
            accepted = connection.accept() => match accepted {
                Some(Ok((request, respond))) => {
                    let stream = Arc::clone(&shared).serve_stream(
                        request, respond, Arc::clone(&traffic), stopped.clone());
                    streams.spawn(stream);
                }
                Some(Err(error)) => break chain(&error),
                None => break "the gateway closed the connection".to_owned(),
            },
            Some(_) = streams.join_next() => {}
            bytes = window.changed(&traffic) => {
                window.set(bytes, &traffic, |bytes| connection.set_initial_window_size(bytes));
            }
            error = &mut rejected => break format!(
                "the gateway's certificate is no longer valid: {}", identity::describe(&error)),
            () = &mut quiet => break format!("no sign of life for {:?}", limits.ping_timeout),
            line = next_line(&mut hello), if hello.is_some() => match line {
                Some(line) => {
                    renew(&renews, &line, gateway);
                    drop(events.send(SessionEvent::Renewed(line.renewed)));
                }
                None => {
                    hello = None;
                    drop(events.send(SessionEvent::GatewayDrains));
                }
            },
            () = draining_or_retired(&mut draining, &mut retired), if !is_draining => {
                is_draining = true;
                // The connection closes once its last stream has ended, and the hello is a stream, too.
                hello = None;
                connection.graceful_shutdown();
            }
            () = &mut drain_end => {
                warn!(streams = streams.len(), "the drain timed out; open streams are reset");
                stop.send_replace(true);
                flush(&mut connection).await;
                break "the agent stopped".to_owned();
            }
        }
    };
    drop(connection);
    // The receiver may already be gone, since it waits only for the first event.
    drop(events.send(SessionEvent::Ended(ended)));
    // Any remaining streams now fail, since the connection is closed.
    while streams.join_next().await.is_some() {}
}

/// Waits for the gateway's next line. Returns `None` if the hello stream ends, which is how the gateway announces that it is
/// draining.
async fn next_line(hello: &mut Option<GatewayLines>) -> Option<GatewayLine> {
    match hello {
        Some(hello) => hello.next().await,
        None => None,
    }
}

/// Renews those earlier sessions that the gateway knows: the gateway's certificates in this session count for them, too.
fn renew(renews: &[SessionHandle], line: &GatewayLine, gateway: &PeerCertificates) {
    let is_renewed = |earlier: &&SessionHandle| earlier.is_in(&line.renewed);
    for earlier in renews.iter().filter(is_renewed) {
        earlier.gateway.renew(gateway);
    }
}

/// Waits until the drain begins, or until another session takes this one's new streams.
async fn draining_or_retired(
    draining: &mut watch::Receiver<bool>,
    retired: &mut watch::Receiver<bool>,
) {
    tokio::select! {
        () = drain::begun(draining) => {}
        Ok(_) = retired.wait_for(|retired| *retired) => {}
    }
}

impl AgentContext {
    /// Serves one stream.
    async fn serve_stream(
        self: Arc<Self>,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
        traffic: Arc<Traffic>,
        mut stopped: watch::Receiver<bool>,
    ) {
        // The gateway respects the advertised stream limit, so this slot only serves to count the stream.
        let slot = traffic.take_slot(u32::MAX);
        let target = RequestedTarget::parse(&request);
        let dialled = match target {
            Ok(target) if request.method() == http::Method::CONNECT => {
                self.dial(&target, &mut respond).await
            }
            Ok(_) => Err(Reason::ProtocolError),
            Err(reason) => Err(reason),
        };
        let stop = async {
            drain::begun(&mut stopped).await;
            Reason::Draining
        };
        let reason = match dialled {
            Ok(mut tcp) => {
                let accepted = self.accept_stream(&mut tcp, request, respond, &traffic, stop);
                Box::pin(accepted).await
            }
            Err(reason) => {
                refuse(respond, reason);
                reason
            }
        };
        drop(slot);
        self.state.counts.increment(reason);
        debug!(target = ?target.ok(), reason = reason.label(), "stream ended");
        self.log_exhausted_limit(reason);
    }

    /// Logs that a limit of this process, which only its operator can change, has ended a stream.
    fn log_exhausted_limit(&self, reason: Reason) {
        if ![Reason::DescriptorLimit, Reason::MemoryLimit].contains(&reason) {
            return;
        }
        let (subject, label) = ("agent".into(), reason.label());
        if let Some(suppressed) = self.log_limit.may_log(label, &subject, "") {
            warn!(reason = label, suppressed, "{}", reason.meaning());
        }
    }

    /// Dials the requested target if the allow-list permits it. Gives up if the client resets the stream.
    async fn dial(
        &self,
        target: &RequestedTarget,
        respond: &mut SendResponse<Bytes>,
    ) -> Result<TcpStream, Reason> {
        let address = self.allow_list.resolve(target, is_own_address)?;
        let (limit, mark) = (self.settings.dial_timeout, self.common.mark);
        let dialled = async {
            // In a burst, a dial may have to wait for earlier ones.
            let permit = self.dial_permits.acquire(address, DIAL_QUEUE_TIMEOUT).await;
            let _permit = permit.ok_or(Reason::DialLimit)?;
            dial::target(address, mark, limit).await
        };
        let tcp = tokio::select! {
            tcp = dialled => tcp?,
            code = poll_fn(|cx| respond.poll_reset(cx)) => return Err(match code {
                Ok(code) => reason_of_code(code, StreamSide::Client),
                Err(error) => reason_of_error(&error, StreamSide::Client),
            }),
        };
        set_stream_options(&tcp).map_err(|_error| Reason::TargetReset)?;
        Ok(tcp)
    }

    /// Accepts the CONNECT request, then copies data until the stream ends.
    async fn accept_stream(
        &self,
        tcp: &mut TcpStream,
        request: Request<RecvStream>,
        mut respond: SendResponse<Bytes>,
        traffic: &Traffic,
        stop: impl Future<Output = Reason>,
    ) -> Reason {
        let send = match respond.send_response(Response::new(()), false) {
            Ok(send) => send,
            Err(error) => return reason_of_error(&error, StreamSide::Client),
        };
        let stream = TunnelStream {
            send,
            recv: request.into_body(),
            side: StreamSide::Target,
        };
        let idle_limit = self.common.limits.idle_timeout;
        copy::run(tcp, stream, traffic, idle_limit, stop).await
    }
}

fn refuse(mut respond: SendResponse<Bytes>, reason: Reason) {
    if [Reason::ClientReset, Reason::AgentConnectionLost].contains(&reason) {
        // The client is gone, so there is no stream left to refuse.
        return;
    }
    if let Err(error) = respond.send_response(refusal_response(reason), true) {
        debug!(%error, "cannot send the refusal of a stream");
    }
}
