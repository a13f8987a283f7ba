//! The ingress: accepts steered connects, and forwards each to the node and port that its steering address
//! stands for.

use std::{collections::BTreeSet, io, net::SocketAddr, sync::Arc, time::Duration};

use bytes::{Bytes, BytesMut};
use socket2::SockRef;
use tokio::{
    io::AsyncReadExt as _,
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::timeout,
};
use tracing::{debug, info};
use tunnel_common::{addr::Address, reason::Reason, steering::Prefix};

use super::{
    ACCEPT_PAUSE, CommonSettings, Sessions, copy,
    gateway::listener,
    gateway_session::StreamPermit,
    incoming_interface,
    socket::{move_to_current_runtime, set_stream_options},
};
use crate::{
    drain, listen,
    model::{SteeringTarget, SteeringTargets},
};

/// The time to wait for the client's first bytes. They are sent with the CONNECT, which saves a round trip
/// if the client speaks first. A client that waits for the server is delayed by this time.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_millis(2);
/// The maximum number of first bytes that are sent with the CONNECT.
const MAX_FIRST_BYTES: usize = 16 << 10;
/// The maximum number of client connections.
const MAX_CLIENTS: usize = 16 << 10;

/// The reasons for which a client or target ended a stream. They are counted, but not recorded as an
/// error of the node.
const NOT_AN_ERROR: [Reason; 3] = [
    Reason::StreamCompleted,
    Reason::ClientReset,
    Reason::TargetReset,
];

/// The time to wait until a new link, such as that of a new pod, is in the set of inside links.
const NEW_LINK_TIMEOUT: Duration = Duration::from_secs(1);

/// The settings of an ingress.
#[derive(Clone, Debug)]
pub struct IngressSettings {
    /// The prefixes of steering addresses.
    pub prefixes: Vec<Prefix>,
    /// The address and port to listen on; `::` accepts IPv4 connects, too.
    pub listen: SocketAddr,
}

/// The listener for steered connects.
#[derive(Debug)]
pub struct Ingress {
    listener: TcpListener,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    settings: IngressSettings,
    common: CommonSettings,
    targets: watch::Receiver<Arc<SteeringTargets>>,
    inside_links: watch::Receiver<Arc<BTreeSet<u32>>>,
    sessions: Arc<Sessions>,
}

impl Ingress {
    /// Opens the listener, but accepts no connection yet. `inside_links` has the indices of the links from
    /// which steered connects may arrive; a connection from any other link is reset.
    ///
    /// # Errors
    ///
    /// If listening on the address fails.
    pub fn bind(
        settings: IngressSettings,
        common: CommonSettings,
        targets: watch::Receiver<Arc<SteeringTargets>>,
        inside_links: watch::Receiver<Arc<BTreeSet<u32>>>,
        sessions: Arc<Sessions>,
    ) -> io::Result<Self> {
        let is_v6 = settings.listen.is_ipv6();
        let listener = listener(settings.listen, common.mark, |socket| {
            incoming_interface::enable(socket, is_v6)?;
            // Without CAP_NET_ADMIN only local addresses can be served, which is enough with local routes.
            if let Err(error) = socket.set_ip_transparent_v4(true) {
                debug!(%error, "cannot set IP_TRANSPARENT on the listener of the ingress");
            }
            Ok(())
        })?;
        let shared = Arc::new(Shared {
            settings,
            common,
            targets,
            inside_links,
            sessions,
        });
        Ok(Self { listener, shared })
    }

    /// Returns the address of the listener.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        let listen = self.shared.settings.listen;
        self.listener.local_addr().unwrap_or(listen)
    }

    /// Serves until the drain begins, then lets open streams run for at most
    /// [`SessionLimits::drain_timeout`](super::SessionLimits::drain_timeout).
    pub async fn run(self, draining: watch::Receiver<bool>) {
        info!(address = %self.local_addr(), "ingress listens");
        let Self { listener, shared } = self;
        let (stop, stopped) = watch::channel(false);
        let mut clients = JoinSet::new();
        let admit = |clients: &mut JoinSet<()>, (tcp, peer)| {
            if clients.len() < MAX_CLIENTS {
                clients.spawn(handle_connection(
                    Arc::clone(&shared),
                    tcp,
                    peer,
                    stopped.clone(),
                ));
            } else {
                reset(&tcp);
                let subject = "ingress".into();
                shared
                    .sessions
                    .report_problem(&subject, Reason::StreamLimit, &peer);
            }
        };
        listen::accept_all(
            || listener.accept(),
            ACCEPT_PAUSE,
            &mut clients,
            draining,
            admit,
        )
        .await;
        drop(listener);
        info!(clients = clients.len(), "ingress drains");
        let all = async { while clients.join_next().await.is_some() {} };
        if timeout(shared.common.limits.drain_timeout, all)
            .await
            .is_err()
        {
            stop.send_replace(true);
            while clients.join_next().await.is_some() {}
        }
    }
}

/// Makes the connection be reset when the socket is closed.
fn reset(tcp: &TcpStream) {
    // On failure the client gets a FIN instead of a reset, which does no harm.
    drop(SockRef::from(tcp).set_linger(Some(Duration::ZERO)));
}

async fn handle_connection(
    shared: Arc<Shared>,
    tcp: TcpStream,
    peer: SocketAddr,
    stopped: watch::Receiver<bool>,
) {
    let sessions = &shared.sessions;
    let target = match shared.target(&tcp).await {
        Ok(target) => target,
        Err(reason) => {
            reset(&tcp);
            sessions.report_problem(&"ingress".into(), reason, &peer);
            return;
        }
    };
    let (reason, tcp) = Box::pin(forward(sessions, &target, tcp, stopped)).await;
    debug!(dialled = %target, %peer, reason = reason.label(), "stream ended");
    if NOT_AN_ERROR.contains(&reason) {
        sessions.count(reason);
    } else {
        sessions.record_refusal(&target, reason);
    }
    // Closed last, so that the reason is counted before the client sees the end.
    drop(tcp);
}

impl Shared {
    /// Sets the options of a connection, and returns its target. Refuses a connection whose local address
    /// is not a steering address, or which did not arrive over an inside link.
    async fn target(&self, tcp: &TcpStream) -> Result<SteeringTarget, Reason> {
        set_stream_options(tcp).map_err(|_error| Reason::ClientReset)?;
        let local = tcp.local_addr().map_err(|_error| Reason::ClientReset)?;
        let address = Address::from_ip(local.ip().to_canonical());
        let mut prefixes = self.settings.prefixes.iter();
        let index = prefixes.find_map(|prefix| prefix.index(&address));
        let index = index.ok_or(Reason::ArrivedUnsteered)?;
        let interface = incoming_interface::index(tcp, local).map_err(|error| {
            debug!(%error, "the incoming interface is unknown");
            Reason::ArrivedUnsteered
        })?;
        // The link of a pod that has just started may not be in the set yet.
        let mut inside_links = self.inside_links.clone();
        let known = inside_links.wait_for(|inside_links| inside_links.contains(&interface));
        if !matches!(timeout(NEW_LINK_TIMEOUT, known).await, Ok(Ok(_))) {
            return Err(Reason::ArrivedUnsteered);
        }
        let targets = self.targets.borrow();
        targets.get(&index).cloned().ok_or(Reason::TargetUnknown)
    }
}

/// Forwards a client's connection to its target until it ends. Returns the reason for the end, and the
/// connection, which the caller closes.
pub(super) async fn forward(
    sessions: &Sessions,
    target: &SteeringTarget,
    mut tcp: TcpStream,
    stopped: watch::Receiver<bool>,
) -> (Reason, Option<TcpStream>) {
    let permitted = async {
        // Takes the permit first, so that a connect to a node without a session is refused at once.
        let permit = sessions.take_permit(&target.node)?;
        let first = read_first_bytes(&mut tcp).await;
        // The session may have ended meanwhile; another session of the node may be open.
        if permit.session.is_open() {
            return Ok((permit, first));
        }
        Ok((sessions.take_permit(&target.node)?, first))
    };
    let (permit, first) = match permitted.await {
        Ok(permitted) => permitted,
        Err(reason) => return (reason, Some(tcp)),
    };
    let runtime = permit.session.thread.runtime().clone();
    let mut task = JoinSet::new();
    task.spawn_on(
        run_stream(permit, target.clone(), (first, tcp), stopped),
        &runtime,
    );
    match task.join_next().await {
        Some(Ok(ended)) => ended,
        // The task panicked, or the thread of the session is gone.
        Some(Err(_)) | None => (Reason::AgentConnectionLost, None),
    }
}

/// Opens a stream and copies until it ends, on the thread of its session.
async fn run_stream(
    permit: StreamPermit,
    target: SteeringTarget,
    (first, tcp): (Bytes, TcpStream),
    mut stopped: watch::Receiver<bool>,
) -> (Reason, Option<TcpStream>) {
    let session = &permit.session;
    let Ok(mut tcp) = move_to_current_runtime(tcp) else {
        return (Reason::ClientReset, None);
    };
    let mut stop = std::pin::pin!(drain::begun(&mut stopped));
    let stream = tokio::select! {
        stream = session.open(&target, first, &tcp) => stream,
        () = &mut stop => Err(Reason::Draining),
    };
    let stream = match stream {
        Ok(stream) => stream,
        Err(reason) => return (reason, Some(tcp)),
    };
    let stopped = async {
        tokio::select! {
            () = session.stopped() => {}
            () = stop => {}
        }
    };
    let reason = copy::run(&mut tcp, stream, &session.traffic, stopped).await;
    (reason, Some(tcp))
}

/// Reads the client's first bytes; none if the client waits for the server.
async fn read_first_bytes(tcp: &mut TcpStream) -> Bytes {
    let mut first = BytesMut::with_capacity(MAX_FIRST_BYTES);
    // An end or an error is ignored here, since the copy will see it again.
    drop(timeout(FIRST_BYTES_TIMEOUT, tcp.read_buf(&mut first)).await);
    first.freeze()
}

#[cfg(test)]
mod tests {
    use std::{future::poll_fn, io::Read as _, task::Poll};

    use tokio::io::AsyncWriteExt as _;

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn first_bytes_are_waited_for_although_the_socket_seems_readable() {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let at = listener.local_addr().expect("an address");
        let mut client = TcpStream::connect(at).await.expect("connected");
        let (mut tcp, _) = listener.accept().await.expect("accepted");
        // Reads the byte without tokio, which still assumes that the socket is readable.
        client.write_all(b"!").await.expect("written");
        tcp.readable().await.expect("readable");
        (&*SockRef::from(&tcp)).read_exact(&mut [0]).expect("read");

        let mut first = Box::pin(read_first_bytes(&mut tcp));
        let waits = poll_fn(|cx| Poll::Ready(first.as_mut().poll(cx).is_pending()));
        assert!(waits.await);
        client.write_all(b"hello").await.expect("written");

        assert_eq!(first.await, "hello");
    }
}
