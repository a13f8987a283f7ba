//! The gateway, which accepts connections from agents.

mod agent_hello;
mod refusals;
mod supervision;

use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    pin::pin,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use h2::SendStream;
use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use socket2::Socket as TcpSocket;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tracing::info;
use tunnel_common::reason::Reason;

use self::{
    agent_hello::{confirm_renewals, initial_view},
    refusals::{accept_tls, check_session},
    supervision::{close, revoke, revoked, supervise},
};
use super::{
    ACCEPT_PAUSE, AccessInputs, CommonSettings, Sessions,
    access::AccessRules,
    dial::set_mark,
    gateway_session::{RateMeter, Session},
    handshakes::{Admission, Handshakes},
    hello,
    http2::{self, ClientConnection},
    keepalive::wait_for_silence,
    peer_certificates::PeerCertificates,
    session_threads::{SessionThreads, ThreadHandle},
    session_token::SessionToken,
    socket::{Meter, SessionSocket, move_to_current_runtime, set_session_options},
    stream_window::StreamWindow,
    traffic::Traffic,
};
use crate::{
    drain, duration,
    error_chain::chain,
    file_descriptors::{self, Part},
    identity::{self, Peer},
    listen,
};

/// The time limit for a session that only renews others.
const RENEWAL_TIMEOUT: Duration = Duration::from_secs(10);

/// The unencrypted TLS alert `internal_error` (RFC 8446 section 6), which is sent to agents while the gateway
/// has no certificate.
const INTERNAL_ERROR_ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 80];

/// The settings for a gateway.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct GatewaySettings {
    /// The address and port to listen on.
    pub listen: SocketAddr,
    /// The maximum number of sessions with agents.
    pub max_sessions: usize,
    /// The maximum number of concurrent handshakes.
    pub max_pending_handshakes: usize,
    /// The time limit for a handshake.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub handshake_timeout: Duration,
    /// The file that lists the nodes and certificates whose agents are refused.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub deny_file: Option<PathBuf>,
    /// The time after which a node whose Node object is missing has no sessions. Zero means that the object need not
    /// exist.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub missing_node_timeout: Duration,
}

impl Default for GatewaySettings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 10_262)),
            max_sessions: 10_000,
            max_pending_handshakes: 4096,
            handshake_timeout: Duration::from_secs(10),
            deny_file: None,
            missing_node_timeout: Duration::from_secs(60),
        }
    }
}

/// The listener that agents connect to.
#[derive(Debug)]
pub struct Gateway {
    listener: TcpListener,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    settings: GatewaySettings,
    common: CommonSettings,
    identity: identity::CertificateReceiver,
    sessions: Arc<Sessions>,
    handshakes: Handshakes,
    access: AccessRules,
}

/// Opens a listener, with the given firewall mark if there is one. `prepare` sets further socket options. A
/// listener on `::` also accepts IPv4 connections.
pub(super) fn listener(
    address: SocketAddr,
    mark: Option<u32>,
    prepare: impl FnOnce(&TcpSocket) -> io::Result<()>,
) -> io::Result<TcpListener> {
    listen::tcp(address, 1024, |socket| {
        if address.is_ipv6() {
            socket.set_only_v6(false)?;
        }
        set_mark(&socket.into(), mark);
        prepare(socket)
    })
}

impl Gateway {
    /// Opens the listener, but doesn't accept connections yet.
    ///
    /// # Errors
    ///
    /// Returns an error if listening on the address fails.
    pub fn bind(
        settings: GatewaySettings,
        common: CommonSettings,
        identity: identity::CertificateReceiver,
        sessions: Arc<Sessions>,
        access: AccessInputs,
    ) -> io::Result<Self> {
        let listener = listener(settings.listen, common.mark, |_| Ok(()))?;
        let handshakes = Handshakes::new(settings.max_pending_handshakes);
        let access = AccessRules::new(access, settings.missing_node_timeout);
        let shared = Arc::new(Shared {
            settings,
            common,
            identity,
            sessions,
            handshakes,
            access,
        });
        Ok(Self { listener, shared })
    }

    /// Returns the address that the listener is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        let listen = self.shared.settings.listen;
        self.listener.local_addr().unwrap_or(listen)
    }

    /// Serves agents until the drain begins, and for as long as streams are open after that, but at most for
    /// [`SessionLimits::drain_timeout`](super::SessionLimits::drain_timeout). Then ends all sessions.
    pub async fn run(self, draining: watch::Receiver<bool>) {
        info!(address = %self.local_addr(), "gateway listens");
        let Self { listener, shared } = self;
        let threads = SessionThreads::start(shared.common.limits.max_threads);
        let (end, ended) = watch::channel(false);
        let mut tasks = JoinSet::new();
        let admit = |tasks: &mut JoinSet<()>, (tcp, peer)| {
            let thread = threads.least_loaded();
            start_handshake(
                &shared,
                tasks,
                AcceptedConnection { tcp, peer, thread },
                ended.clone(),
            );
        };
        let accepting = listen::accept_all(
            || listener.accept(),
            ACCEPT_PAUSE,
            &mut tasks,
            ended.clone(),
            admit,
        );
        // A new stream needs a session, so the sessions continue until no stream is left.
        let drained = async {
            let limit = shared.common.limits.drain_timeout;
            shared.sessions.drained(draining, limit).await;
            end.send_replace(true);
        };
        tokio::join!(accepting, drained);
        drop((listener, threads));
        info!(
            sessions = shared.sessions.len(),
            "the gateway ends its sessions"
        );
        while tasks.join_next().await.is_some() {}
    }
}

/// An accepted connection, and the thread that will run its session.
struct AcceptedConnection {
    tcp: TcpStream,
    peer: SocketAddr,
    thread: ThreadHandle,
}

/// Starts the handshake for an accepted connection, unless the maximum number of sessions has been reached.
fn start_handshake(
    shared: &Arc<Shared>,
    tasks: &mut JoinSet<()>,
    accepted: AcceptedConnection,
    ended: watch::Receiver<bool>,
) {
    let sessions = &shared.sessions;
    let peer = accepted.peer;
    let part = file_descriptors::part_of(&accepted.tcp);
    let lacks_descriptors =
        !file_descriptors::is_for_all(&accepted.tcp) || tasks.len() >= file_descriptors::share();
    let (reason, limit) = if lacks_descriptors {
        (Reason::DescriptorLimit, "the limit on open files")
    } else {
        let key = "the limit tunnel.gateway.maxPendingHandshakes";
        (Reason::HandshakeLimit, key)
    };
    let report_limit = |source: IpAddr, error: &str| {
        let source = source.to_string().into();
        sessions.report_problem(&source, reason, &error);
    };
    if part == Part::Reserved {
        let error = "the handshakes that were aborted have not closed their connections yet";
        report_limit(peer.ip().to_canonical(), error);
        return;
    }
    let id = sessions.next_id();
    let runtime = accepted.thread.runtime().clone();
    let task = handle_connection(Arc::clone(shared), id, accepted, ended);
    match shared.handshakes.begin(id, peer, lacks_descriptors, || {
        tasks.spawn_on(task, &runtime)
    }) {
        Admission::Started => {}
        Admission::Evicted(source) => report_limit(
            source,
            &format!("its oldest handshake was aborted: {limit} is reached"),
        ),
        Admission::Refused => report_limit(
            peer.ip().to_canonical(),
            &format!("{limit} is reached, and no handshake without a certificate can be aborted"),
        ),
    }
}

async fn handle_connection(
    shared: Arc<Shared>,
    id: u64,
    accepted: AcceptedConnection,
    mut ended: watch::Receiver<bool>,
) {
    let peer = accepted.peer;
    let limit = shared.settings.handshake_timeout;
    let result = tokio::select! {
        result = timeout(limit, Box::pin(handshake(&shared, id, accepted))) => result,
        () = drain::begun(&mut ended) => {
            shared.handshakes.end(id);
            return;
        }
    };
    let has_room = shared.handshakes.end(id);
    let HandshakeError(reason, error) = match result {
        Ok(Ok(established)) if has_room => {
            return Box::pin(run_session(&shared, established, ended)).await;
        }
        Ok(Ok(_)) => return,
        Ok(Err(failed)) => failed,
        Err(elapsed) => HandshakeError(Reason::HandshakeTimedOut, io::Error::from(elapsed).into()),
    };
    let source = peer.ip().to_canonical().to_string().into();
    shared
        .sessions
        .report_problem(&source, reason, &describe(&*error));
}

/// Describes why a handshake failed.
fn describe(error: &(dyn std::error::Error + 'static)) -> String {
    let tls = error
        .downcast_ref::<io::Error>()
        .and_then(|error| error.get_ref())
        .and_then(|error| error.downcast_ref::<rustls::Error>());
    match tls {
        Some(rustls::Error::AlertReceived(alert)) => {
            format!(
                "the peer refused this gateway's certificate or handshake (TLS alert {alert:?})"
            )
        }
        Some(error @ rustls::Error::InvalidCertificate(_)) => identity::describe(error),
        Some(_) | None => chain(error),
    }
}

/// The error from a failed handshake, and the reason to count it under.
struct HandshakeError(Reason, Box<dyn std::error::Error + Send + Sync>);

impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> From<E> for HandshakeError {
    fn from(error: E) -> Self {
        Self(Reason::HandshakeFailed, error.into())
    }
}

/// A session that has completed its handshake.
struct EstablishedSession {
    session: Session,
    agent: Peer,
    /// Resets the session's streams when set to a reason.
    stop: watch::Sender<Option<Reason>>,
    hello: SendStream<Bytes>,
    connection: ClientConnection,
    meter: Arc<Meter>,
    /// The tokens of the earlier sessions that this one renews.
    renews: Vec<SessionToken>,
    /// True if the session only renews others, and takes no streams.
    only_renews: bool,
}

async fn handshake(
    shared: &Shared,
    id: u64,
    accepted: AcceptedConnection,
) -> Result<EstablishedSession, HandshakeError> {
    let AcceptedConnection { tcp, peer, thread } = accepted;
    let mut tcp = move_to_current_runtime(tcp)?;
    set_session_options(&tcp)?;
    // Each handshake uses the current certificate. Established sessions keep the one that they started with.
    let Some(own) = shared.identity.current() else {
        tcp.write_all(&INTERNAL_ERROR_ALERT).await?;
        return Err("this gateway has no certificate yet".into());
    };
    if let Some(error) = shared.access.not_ready() {
        tcp.write_all(&INTERNAL_ERROR_ALERT).await?;
        return Err(error.into());
    }
    let socket = SessionSocket::new(tcp);
    let meter = socket.meter();
    let mut tls = accept_tls(shared, &own, socket).await?;
    let certificates = tls.get_ref().1.peer_certificates().unwrap_or_default();
    let leaf = certificates
        .first()
        .ok_or_else(|| HandshakeError(Reason::IdentityRejected, "no certificate".into()))?;
    let certificates_of_agent = PeerCertificates::new(certificates);
    let agent = identity::identify_agent(leaf)
        .map_err(|error| HandshakeError(Reason::IdentityRejected, error.into()))?;
    http2::finish_handshake(&mut tls)?;
    if !shared.handshakes.verify(id, &agent.node) {
        let error = format!("{} has too many handshakes in progress", agent.node);
        return Err(HandshakeError(Reason::HandshakeLimit, error.into()));
    }
    let refused = check_session(shared, &agent, peer.ip().to_canonical()).err();
    let refusal = refused.as_ref().map(|(_, cause)| cause.clone());

    let limits = &shared.common.limits;
    let (mut sender, mut connection) = Box::pin(http2::connect(limits, tls)).await?;
    let answered = tokio::select! {
        hello = hello::send(&mut sender, refusal) => hello.map_err(HandshakeError::from),
        ended = &mut connection => Err(ended.map_or_else(HandshakeError::from, |()| {
            "the agent closed the connection during the handshake".into()
        })),
    };
    // An agent that is refused closes the connection, possibly before its answer is read.
    if let Some((reason, cause)) = refused {
        let error = format!("{}: {cause}", agent.node);
        return Err(HandshakeError(reason, error.into()));
    }
    let (answer, hello) = answered?;
    let (stop, stopped) = watch::channel(None);
    let session = Session {
        id,
        node: Arc::clone(&agent.node),
        initial_view: initial_view(&agent, &answer, peer),
        token: answer.token,
        certificates: certificates_of_agent,
        sender,
        max_streams: limits.max_streams,
        thread,
        traffic: Traffic::new(&shared.common.memory),
        rate: Mutex::new(RateMeter::new()),
        end: watch::Sender::new(false),
        stop: stopped,
        idle_timeout: limits.idle_timeout,
    };
    Ok(EstablishedSession {
        session,
        agent,
        stop,
        hello,
        connection,
        meter,
        renews: answer.renews,
        only_renews: answer.only_renews,
    })
}

/// Runs an established session until it ends, or until the gateway ends it.
async fn run_session(
    shared: &Shared,
    established: EstablishedSession,
    mut gateway_ended: watch::Receiver<bool>,
) {
    let EstablishedSession {
        session,
        agent,
        stop,
        mut hello,
        mut connection,
        meter,
        renews,
        only_renews,
    } = established;
    let (sessions, limits) = (&shared.sessions, &shared.common.limits);
    let (node, traffic) = (Arc::clone(&session.node), Arc::clone(&session.traffic));
    let (id, view) = (session.id, session.initial_view.clone());
    let ended_by_operator = session.end.subscribe();
    let certificates = session.certificates.clone();
    // This handle keeps the connection's thread running until the last bytes of its streams have been sent.
    let _thread = session.thread.clone();
    if only_renews {
        confirm_renewals(sessions, &node, renews, &certificates, &mut hello);
        // The agent closes the connection.
        drop(timeout(RENEWAL_TIMEOUT, connection).await);
        return;
    }
    if let Err(error) = sessions.insert(session, shared.settings.max_sessions) {
        sessions.report_problem(&node, Reason::SessionLimit, &error);
        return;
    }
    sessions.log_event("connected", &node, &view, &view.release);
    confirm_renewals(sessions, &node, renews, &certificates, &mut hello);

    let ping = connection.ping_pong();
    let mut quiet = pin!(wait_for_silence(ping, &meter, &traffic, limits));
    let mut supervision = pin!(supervise(shared, &node, &certificates));
    let mut revoked = pin!(revoked(
        &shared.access,
        &agent,
        &certificates,
        ended_by_operator
    ));
    let mut window = StreamWindow::new(limits);
    let ended = loop {
        tokio::select! {
            cause = &mut revoked => {
                sessions.log_event("disconnected", &node, &view, &cause);
                sessions.remove(&node, id, Some(cause.clone()));
                return revoke(shared, &mut connection, (&node, &traffic), &stop, &cause).await;
            }
            error = &mut supervision => break Some(Err(error)),
            ended = &mut connection => break Some(ended.map_err(|error| {
                if http2::is_protocol_error(&error) {
                    sessions.report_problem(&node, Reason::ProtocolError, &chain(&error));
                }
                chain(&error)
            })),
            () = &mut quiet => break Some(Err(format!("no sign of life for {:?}", limits.ping_timeout))),
            () = drain::begun(&mut gateway_ended) => break None,
            bytes = window.changed(&traffic) => {
                window.set(bytes, &traffic, |bytes| connection.set_initial_window_size(bytes));
            }
        }
    };
    if let Some(ended) = ended {
        let error = ended.err();
        let text = error
            .as_deref()
            .unwrap_or("the agent closed the connection");
        sessions.log_event("disconnected", &node, &view, text);
        sessions.remove(&node, id, error);
        return;
    }
    sessions.remove(&node, id, None);
    tokio::select! {
        () = close(&mut connection, hello, (&node, &traffic), &stop) => {}
        () = quiet => {}
    }
}
