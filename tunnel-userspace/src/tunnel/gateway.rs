//! The gateway: accepts the connections of agents.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    pin::pin,
    sync::Arc,
    time::Duration,
};

use bytes::Bytes;
use h2::SendStream;
use jiff::Timestamp;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use socket2::Socket as TcpSocket;
use tokio::{
    io::AsyncWriteExt as _,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout, timeout_at},
};
use tokio_rustls::{TlsAcceptor, TlsStream};
use tracing::{debug, info, warn};
use tunnel_common::reason::Reason;

use super::{
    ACCEPT_PAUSE, Common, SessionView, Sessions, TrafficView,
    dial::set_mark,
    handshakes::Handshakes,
    hello,
    link::{Traffic, silence},
    session::{Pace, Session},
    socket::{Meter, Socket, prepare_carrier, seated},
    threads::{Seat, Threads},
    wire::{self, Carrier},
};
use crate::{drain, duration, failure::chain, identity, listen};

/// The time that resets have to reach the other end before the connection is closed.
const GRACE: Duration = Duration::from_millis(500);
/// The interval of the check for open streams while draining.
const LOOK: Duration = Duration::from_millis(20);
/// The TLS alert `internal_error`, unencrypted (RFC 8446 section 6): the answer to a client while the
/// gateway has no certificate.
const ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 80];

/// The settings of a gateway.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Settings {
    /// The address and port to listen on.
    pub listen: SocketAddr,
    /// The maximum number of sessions of agents.
    pub max_sessions: usize,
    /// The maximum number of concurrent handshakes.
    pub max_pending_handshakes: usize,
    /// The time limit of a handshake.
    #[serde(with = "duration")]
    pub handshake_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 10_262)),
            max_sessions: 10_000,
            max_pending_handshakes: 256,
            handshake_timeout: Duration::from_secs(10),
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
    settings: Settings,
    common: Common,
    identity: identity::Receiver,
    sessions: Arc<Sessions>,
    handshakes: Handshakes,
}

/// Opens a listener with our mark; an IPv6 address also takes IPv4 connects.
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
    /// Opens the listener, but accepts no connection yet.
    ///
    /// # Errors
    ///
    /// If listening on the address fails.
    pub fn bind(
        settings: Settings,
        common: Common,
        identity: identity::Receiver,
        sessions: Arc<Sessions>,
    ) -> io::Result<Self> {
        let listener = listener(settings.listen, common.mark, |_| Ok(()))?;
        let handshakes = Handshakes::new(settings.max_pending_handshakes);
        let shared = Arc::new(Shared {
            settings,
            common,
            identity,
            sessions,
            handshakes,
        });
        Ok(Self { listener, shared })
    }

    /// Returns the address it listens on.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        let listen = self.shared.settings.listen;
        self.listener.local_addr().unwrap_or(listen)
    }

    /// Serves until the drain begins; then lets open streams run for at most `Limits::drain`.
    pub async fn run(self, draining: watch::Receiver<bool>) {
        info!(address = %self.local_addr(), "gateway listens");
        let Self { listener, shared } = self;
        let threads = Threads::start(shared.common.limits.max_threads);
        let mut tasks = JoinSet::new();
        let admit = |tasks: &mut JoinSet<()>, (tcp, peer)| {
            let seat = threads.seat();
            admit(&shared, tasks, Joined { tcp, peer, seat }, draining.clone());
        };
        listen::accept_all(
            || listener.accept(),
            ACCEPT_PAUSE,
            &mut tasks,
            draining.clone(),
            admit,
        )
        .await;
        drop((listener, threads));
        info!(sessions = shared.sessions.len(), "gateway drains");
        while tasks.join_next().await.is_some() {}
    }
}

/// An accepted connection, with the thread that is to carry it.
struct Joined {
    tcp: TcpStream,
    peer: SocketAddr,
    seat: Seat,
}

/// Starts the handshake of a connection, unless all sessions are taken.
fn admit(
    shared: &Arc<Shared>,
    tasks: &mut JoinSet<()>,
    joined: Joined,
    draining: watch::Receiver<bool>,
) {
    let sessions = &shared.sessions;
    let full = |source: IpAddr, error: &str| {
        let source = source.to_string().into();
        sessions.unwell(&source, Reason::HandshakeLimit, &error);
    };
    let source = source_of(joined.peer);
    if sessions.len() >= shared.settings.max_sessions {
        full(source, "as many sessions as tunnel.gateway.maxSessions");
        return;
    }
    let id = sessions.next_id();
    let runtime = joined.seat.runtime().clone();
    let task = serve(Arc::clone(shared), id, joined, draining);
    let spawn = || tasks.spawn_on(task, &runtime);
    if let Some(evicted) = shared.handshakes.begin(id, source, spawn) {
        full(evicted, "a handshake of it gave way to a newer one");
    }
}

/// Returns the source that an address counts for: an IPv6 host may use any address of its /64.
fn source_of(peer: SocketAddr) -> IpAddr {
    match peer.ip().to_canonical() {
        IpAddr::V4(v4) => v4.into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

async fn serve(shared: Arc<Shared>, id: u64, joined: Joined, mut draining: watch::Receiver<bool>) {
    let peer = joined.peer;
    let limit = shared.settings.handshake_timeout;
    let shaken = tokio::select! {
        shaken = timeout(limit, Box::pin(shake(&shared, id, joined))) => shaken,
        () = drain::begun(&mut draining) => {
            shared.handshakes.end(id);
            return;
        }
    };
    let has_room = shared.handshakes.end(id);
    let Failed(reason, error) = match shaken {
        Ok(Ok(shaken)) if has_room => return Box::pin(hold(&shared, shaken, draining)).await,
        Ok(Ok(_)) => return,
        Ok(Err(failed)) => failed,
        Err(elapsed) => Failed(Reason::HandshakeTimedOut, io::Error::from(elapsed).into()),
    };
    let source = source_of(peer).to_string().into();
    shared.sessions.unwell(&source, reason, &chain(&*error));
}

/// Why a handshake failed.
struct Failed(Reason, Box<dyn std::error::Error + Send + Sync>);

impl<E: Into<Box<dyn std::error::Error + Send + Sync>>> From<E> for Failed {
    fn from(error: E) -> Self {
        Self(Reason::HandshakeFailed, error.into())
    }
}

/// A session that completed its handshake.
struct Shaken {
    session: Session,
    /// Ends the session's streams when set to true.
    stop: watch::Sender<bool>,
    hello: SendStream<Bytes>,
    connection: h2::client::Connection<Carrier, Bytes>,
    meter: Arc<Meter>,
}

async fn shake(shared: &Shared, id: u64, joined: Joined) -> Result<Shaken, Failed> {
    let Joined { tcp, peer, seat } = joined;
    let mut tcp = seated(tcp)?;
    prepare_carrier(&tcp)?;
    // Each handshake uses the current identity; established sessions keep theirs.
    let Some(own) = shared.identity.current() else {
        tcp.write_all(&ALERT).await?;
        return Err("this gateway has no certificate yet".into());
    };
    let socket = Socket::new(tcp);
    let meter = socket.meter();
    let acceptor = TlsAcceptor::from(Arc::clone(&own.server));
    let tls = acceptor.accept(socket).await?;
    let leaf = tls.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let leaf = leaf.ok_or_else(|| Failed(Reason::IdentityRejected, "no certificate".into()))?;
    let agent =
        identity::agent_of(leaf).map_err(|error| Failed(Reason::IdentityRejected, error.into()))?;
    let mut carrier = TlsStream::Server(tls);
    wire::accept_carrier(&mut carrier)?;

    let limits = &shared.common.limits;
    let (mut sender, mut connection) = wire::client(limits).handshake(carrier).await?;
    let (answer, hello) = tokio::select! {
        hello = hello::ask(&mut sender) => hello?,
        ended = &mut connection => {
            ended?;
            return Err("the agent went away".into());
        }
    };
    let (stop, stopped) = watch::channel(false);
    let session = Session {
        id,
        node: agent.node,
        facts: SessionView {
            name: answer.session,
            peer,
            since: Timestamp::now(),
            release: answer.release,
            certificate_expires: agent.expires,
            traffic: TrafficView::default(),
        },
        sender,
        streams: limits.max_streams,
        seat,
        traffic: Arc::default(),
        pace: Mutex::new(Pace::new()),
        stop: stopped,
    };
    Ok(Shaken {
        session,
        stop,
        hello,
        connection,
        meter,
    })
}

/// Keeps a session until it ends or is drained.
async fn hold(shared: &Shared, shaken: Shaken, mut draining: watch::Receiver<bool>) {
    let Shaken {
        session,
        stop,
        mut hello,
        mut connection,
        meter,
    } = shaken;
    let (sessions, limits) = (&shared.sessions, &shared.common.limits);
    let (node, traffic) = (Arc::clone(&session.node), Arc::clone(&session.traffic));
    let (peer, release) = (session.facts.peer, session.facts.release.clone());
    let (id, name) = (session.id, session.facts.name.clone());
    // The seat keeps the thread of this connection alive until the last bytes of the streams are sent.
    let _seat = session.seat.clone();
    if !sessions.insert(session, shared.settings.max_sessions) {
        let error = "as many sessions as the gateway or the node may have";
        sessions.unwell(&node, Reason::HandshakeLimit, &error);
        return;
    }
    info!(%node, %peer, release, session = name, "agent connected");

    let ping = connection.ping_pong();
    let mut quiet = pin!(silence(ping, &meter, &traffic, limits));
    let mut connection = pin!(connection);
    let ended = tokio::select! {
        ended = &mut connection => Some(ended.map_err(|error| chain(&error))),
        () = &mut quiet => Some(Err(format!("no sign of life for {:?}", limits.ping_timeout))),
        () = drain::begun(&mut draining) => None,
    };
    if let Some(ended) = ended {
        let error = ended.err();
        let text = error.as_deref().unwrap_or("it went away");
        info!(%node, %peer, error = text, "agent disconnected");
        sessions.remove(&node, id, error);
        return;
    }
    // The end of the hello asks the agent to open a replacement.
    sessions.remove(&node, id, None);
    if let Err(error) = hello.send_data(Bytes::new(), true) {
        debug!(%node, %error, "the hello had ended already");
    }
    let until = Instant::now() + limits.drain_timeout;
    let done = async {
        let served = timeout_at(until, no_streams(&traffic)).await;
        if served.is_ok() {
            // The last bytes of the streams may still be queued. The connection ends by itself once
            // nothing is.
            sleep_until(until).await;
            return;
        }
        warn!(%node, streams = traffic.streams(), "streams were reset that did not end in time");
        stop.send_replace(true);
        if timeout(GRACE, no_streams(&traffic)).await.is_err() {
            debug!(%node, "streams did not end");
        }
        sleep(LOOK).await;
    };
    tokio::select! {
        _ = &mut connection => {}
        () = quiet => {}
        () = done => {}
    }
}

async fn no_streams(traffic: &Traffic) {
    while traffic.streams() > 0 {
        sleep(LOOK).await;
    }
}
