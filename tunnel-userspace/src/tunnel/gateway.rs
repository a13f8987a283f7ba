//! Where agents connect to.

use std::{
    io,
    net::{IpAddr, Ipv6Addr, SocketAddr},
    pin::pin,
    sync::{Arc, Mutex},
    time::Duration,
};

use bytes::Bytes;
use h2::SendStream;
use jiff::Timestamp;
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
    ACCEPT_PAUSE, Common, Registry, SessionView, TrafficView,
    dial::set_mark,
    handshakes::Handshakes,
    hello,
    link::{Traffic, silence},
    session::{Carried, Pace, Session},
    socket::{Meter, Socket, prepare_carrier, seated},
    threads::{Seat, Threads},
    wire::{self, Carrier},
};
use crate::{drain, duration, failure::chain, identity, listen};

/// How long resets have to reach the other end before the connection goes.
const GRACE: Duration = Duration::from_millis(500);
/// How often to look whether streams still run while draining.
const LOOK: Duration = Duration::from_millis(20);
/// The alert `internal_error` of TLS, as it is sent before anything is encrypted (RFC 8446 section
/// 6): what a client gets while there is no certificate to show it.
const ALERT: [u8; 7] = [21, 3, 3, 0, 2, 2, 80];

/// Where agents connect to.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Settings {
    /// The address and port.
    pub listen: SocketAddr,
    /// How many sessions of agents there may be.
    pub sessions: usize,
    /// How many handshakes may be under way.
    pub handshakes: usize,
    /// How long a handshake may take.
    #[serde(with = "duration")]
    pub handshake_timeout: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([0, 0, 0, 0], 10_262)),
            sessions: 10_000,
            handshakes: 256,
            handshake_timeout: Duration::from_secs(10),
        }
    }
}

/// Where agents connect to.
#[derive(Debug)]
pub struct Gateway {
    listener: TcpListener,
    address: SocketAddr,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    settings: Settings,
    common: Common,
    identity: identity::Receiver,
    registry: Arc<Registry>,
    handshakes: Handshakes,
}

/// Listens with our mark; an address of IPv6 takes connects of IPv4 as well.
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
    /// Listens, but accepts nobody yet.
    ///
    /// # Errors
    ///
    /// If the address can't be listened on.
    pub fn bind(
        settings: Settings,
        common: Common,
        identity: identity::Receiver,
        registry: Arc<Registry>,
    ) -> io::Result<Self> {
        let listener = listener(settings.listen, common.mark, |_| Ok(()))?;
        let address = listener.local_addr().unwrap_or(settings.listen);
        let handshakes = Handshakes::new(settings.handshakes);
        let shared = Arc::new(Shared {
            settings,
            common,
            identity,
            registry,
            handshakes,
        });
        Ok(Self {
            listener,
            address,
            shared,
        })
    }

    /// Where it listens.
    #[must_use]
    pub const fn local_addr(&self) -> SocketAddr {
        self.address
    }

    /// Serves until the drain begins; then lets streams go on for a while.
    pub async fn run(self, draining: watch::Receiver<bool>) {
        let Self {
            listener,
            shared,
            address,
        } = self;
        info!(%address, "gateway listens");
        let threads = Threads::start(shared.common.limits.threads);
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
        info!(
            sessions = shared.registry.sessions.count(),
            "gateway drains"
        );
        while tasks.join_next().await.is_some() {}
    }
}

/// A connection that was accepted, and where it is to be carried.
struct Joined {
    tcp: TcpStream,
    peer: SocketAddr,
    seat: Seat,
}

/// Starts the handshake of a connection.
fn admit(
    shared: &Arc<Shared>,
    tasks: &mut JoinSet<()>,
    joined: Joined,
    draining: watch::Receiver<bool>,
) {
    let registry = &shared.registry;
    let source = source_of(joined.peer);
    if registry.sessions.count() >= shared.settings.sessions {
        let error = "as many sessions as gateway.sessions";
        registry.unwell(&name(source), Reason::HandshakesFull, &error);
        return;
    }
    let id = registry.sessions.next_id();
    let runtime = joined.seat.runtime().clone();
    let task = serve(Arc::clone(shared), id, joined, draining);
    let spawn = || tasks.spawn_on(task, &runtime);
    if let Some(evicted) = shared.handshakes.begin(id, source, spawn) {
        let error = "a handshake of it gave way to a newer one";
        registry.unwell(&name(evicted), Reason::HandshakesFull, &error);
    }
}

/// Who stands behind an address: a whole /64 of IPv6 is one host's to choose from.
fn source_of(peer: SocketAddr) -> IpAddr {
    match peer.ip().to_canonical() {
        IpAddr::V4(v4) => v4.into(),
        IpAddr::V6(v6) => Ipv6Addr::from_bits(v6.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

fn name(source: IpAddr) -> Arc<str> {
    source.to_string().into()
}

async fn serve(shared: Arc<Shared>, id: u64, joined: Joined, mut draining: watch::Receiver<bool>) {
    let registry = &shared.registry;
    let peer = joined.peer;
    let limit = shared.settings.handshake_timeout;
    let shaken = tokio::select! {
        shaken = timeout(limit, Box::pin(shake(&shared, joined))) => shaken,
        () = drain::begun(&mut draining) => {
            shared.handshakes.end(id);
            return;
        }
    };
    let has_room = shared.handshakes.end(id);
    let failed = match shaken {
        Ok(Ok(shaken)) if has_room => {
            Box::pin(hold(&shared, id, shaken, draining)).await;
            return;
        }
        Ok(Ok(_)) => return,
        Ok(Err(failed)) => failed,
        Err(_elapsed) => Failed(
            Reason::HandshakeTimedOut,
            io::Error::from(io::ErrorKind::TimedOut).into(),
        ),
    };
    let source = name(source_of(peer));
    registry.unwell(&source, failed.0, &chain(&*failed.1));
}

/// Why a handshake failed.
struct Failed(Reason, Box<dyn std::error::Error + Send + Sync>);

impl Failed {
    fn handshake(error: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Self {
        Self(Reason::HandshakeFailed, error.into())
    }
}

/// A session whose handshake is done.
struct Shaken {
    node: Arc<str>,
    view: SessionView,
    carried: Carried,
    hello: SendStream<Bytes>,
    connection: h2::client::Connection<Carrier, Bytes>,
    meter: Arc<Meter>,
}

async fn shake(shared: &Shared, joined: Joined) -> Result<Shaken, Failed> {
    let Joined { tcp, peer, seat } = joined;
    let mut tcp = seated(tcp).map_err(Failed::handshake)?;
    prepare_carrier(&tcp).map_err(Failed::handshake)?;
    // Each handshake takes the identity of its time; sessions that are there keep theirs.
    let Some(own) = shared.identity.current() else {
        let refused = tcp.write_all(&ALERT).await;
        return Err(match refused {
            Ok(()) => Failed::handshake("this gateway has no certificate yet"),
            Err(error) => Failed::handshake(error),
        });
    };
    let socket = Socket::new(tcp);
    let meter = socket.meter();
    let acceptor = TlsAcceptor::from(Arc::clone(own.server()));
    let tls = acceptor.accept(socket).await.map_err(Failed::handshake)?;
    let leaf = tls.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let leaf = leaf.ok_or_else(|| Failed(Reason::IdentityRefused, "no certificate".into()))?;
    let agent =
        identity::agent_of(leaf).map_err(|error| Failed(Reason::IdentityRefused, error.into()))?;
    let mut carrier = TlsStream::Server(tls);
    wire::accept_carrier(&mut carrier).map_err(Failed::handshake)?;

    let builder = wire::client(&shared.common.limits);
    let (mut sender, mut connection) = builder
        .handshake(carrier)
        .await
        .map_err(Failed::handshake)?;
    let (answer, hello) = tokio::select! {
        hello = hello::ask(&mut sender) => hello.map_err(Failed::handshake)?,
        ended = &mut connection => return Err(match ended {
            Ok(()) => Failed::handshake("the agent went away"),
            Err(error) => Failed::handshake(error),
        }),
    };
    let view = SessionView {
        name: answer.session,
        peer,
        since: Timestamp::now(),
        release: answer.release,
        certificate_expires: agent.expires,
        traffic: TrafficView::default(),
    };
    let streams = shared.common.limits.streams;
    Ok(Shaken {
        node: agent.node,
        view,
        carried: Carried {
            sender,
            streams,
            seat,
        },
        hello,
        connection,
        meter,
    })
}

/// Keeps a session until it ends.
async fn hold(shared: &Shared, id: u64, shaken: Shaken, mut draining: watch::Receiver<bool>) {
    let Shaken {
        node,
        view,
        carried,
        mut hello,
        mut connection,
        meter,
    } = shaken;
    let (registry, limits) = (&shared.registry, &shared.common.limits);
    let ping = connection.ping_pong();
    let traffic = Arc::new(Traffic::default());
    let (stop, stopped) = watch::channel(None);
    let peer = view.peer;
    let (release, name) = (view.release.clone(), view.name.clone());
    let session = Session {
        id,
        node: Arc::clone(&node),
        facts: view,
        carried,
        traffic: Arc::clone(&traffic),
        pace: Mutex::new(Pace::new()),
        stop: stopped,
    };
    let session = Arc::new(session);
    if !registry
        .sessions
        .insert(Arc::clone(&session), shared.settings.sessions)
    {
        let error = "as many sessions as the gateway or the node may have";
        registry.unwell(&node, Reason::HandshakesFull, &error);
        return;
    }
    info!(%node, %peer, release, session = name, "agent connected");

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
        registry.sessions.remove(&session, error);
        return;
    }
    // The agent hears of it by the end of the hello, and opens a replacement.
    registry.sessions.remove(&session, None);
    drop(session);
    if let Err(error) = hello.send_data(Bytes::new(), true) {
        debug!(%node, %error, "the hello had ended already");
    }
    let until = Instant::now() + limits.drain;
    let done = async {
        let served = timeout_at(until, no_streams(&traffic)).await;
        if served.is_ok() {
            // What they sent last may still wait to be sent on. The connection ends by itself once
            // nothing does.
            sleep_until(until).await;
            return;
        }
        warn!(%node, streams = traffic.streams(), "streams were reset that did not end in time");
        stop.send_replace(Some(Reason::Draining));
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
