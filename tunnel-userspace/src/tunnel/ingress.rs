//! The ingress, which accepts steered connections and forwards each to the node and port that its steering
//! address stands for.

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
    ACCEPT_PAUSE, ClientRules, CommonSettings, Sessions,
    client_rules::{Decision, Refusal},
    client_shares::{Client, ClientPermit},
    copy,
    forwarded_clients::ForwardedClients,
    gateway::listener,
    gateway_session::{NotOpened, StreamPermit},
    incoming_interface,
    socket::{move_to_current_runtime, set_stream_options},
};
use crate::{
    drain,
    file_descriptors::{self, Part},
    listen,
    model::{PodNamespaces, SteeringTarget, SteeringTargets},
};

/// The time to wait for the client's first bytes. They are sent along with the CONNECT request, which saves a
/// round trip if the client speaks first. If the client waits for the server to speak first, this delays the
/// connection.
const FIRST_BYTES_TIMEOUT: Duration = Duration::from_millis(2);
/// The maximum number of the client's first bytes to send along with the CONNECT request.
const MAX_FIRST_BYTES: usize = 16 << 10;
/// The maximum number of concurrent client connections.
pub(crate) const MAX_CLIENTS: usize = 16 << 10;

/// The index of the loopback interface, which is the same in every network namespace (`LOOPBACK_IFINDEX` in
/// the kernel's `include/net/flow.h`).
const LOOPBACK: u32 = 1;

/// The reasons for streams that were ended by the client or the target, or whose session's end has already been
/// recorded. They are counted, but not recorded as the node's last error.
const NOT_AN_ERROR: [Reason; 4] = [
    Reason::StreamCompleted,
    Reason::ClientReset,
    Reason::TargetReset,
    Reason::SessionRevoked,
];

/// The time to wait for a new link, such as a new pod's, to appear in the set of inside links.
const NEW_LINK_TIMEOUT: Duration = Duration::from_secs(1);

/// The time to wait for the Pod that has a client's address to appear in the source. A kubelet reports a new Pod's
/// address shortly after the Pod can connect.
const NEW_POD_TIMEOUT: Duration = Duration::from_secs(2);

/// The settings for an ingress.
#[derive(Clone, Debug)]
pub struct IngressSettings {
    /// The prefixes that steering addresses belong to.
    pub prefixes: Vec<Prefix>,
    /// The address and port to listen on. Listening on `::` accepts IPv4 connections, too.
    pub listen: SocketAddr,
    /// The clients that may use the ingress, or `None` if every client may.
    pub allow: Option<ClientRules>,
    /// The namespaces of this node's Pods.
    pub pods: watch::Receiver<Arc<PodNamespaces>>,
    /// The clients whose packets are translated, and those outside this node that may use the ingress.
    pub forwarded: ForwardedClients,
}

/// The listener for steered connections.
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
    /// Opens the listener, but doesn't accept connections yet. `inside_links` holds the indices of the links
    /// over which steered connections may arrive. A connection over any other link is reset.
    ///
    /// # Errors
    ///
    /// Returns an error if listening on the address fails.
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
            // Without CAP_NET_ADMIN, only local addresses can be served. That is enough if the routes to the
            // steering prefixes are local.
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

    /// Returns the address that the listener is bound to.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        let listen = self.shared.settings.listen;
        self.listener.local_addr().unwrap_or(listen)
    }

    /// Serves clients until the drain begins, and for as long as streams are open after that, but at most for
    /// [`SessionLimits::drain_timeout`](super::SessionLimits::drain_timeout). Then resets the streams that are
    /// still open.
    pub async fn run(self, draining: watch::Receiver<bool>) {
        info!(address = %self.local_addr(), "ingress listens");
        let Self { listener, shared } = self;
        let (stop, stopped) = watch::channel(false);
        let is_stopped = stopped.clone();
        let mut clients = JoinSet::new();
        let admit = |clients: &mut JoinSet<()>, (tcp, peer): (TcpStream, SocketAddr)| match shared
            .admit(clients.len(), &tcp, peer)
        {
            Ok(admitted) => {
                let (shared, stopped) = (Arc::clone(&shared), stopped.clone());
                clients.spawn(handle_connection(shared, (tcp, peer), admitted, stopped));
            }
            Err((reason, error)) => {
                reset(&tcp);
                let subject = peer.ip().to_canonical().to_string().into();
                shared.sessions.report_problem(&subject, reason, &error);
            }
        };
        let accepting = listen::accept_all(
            || listener.accept(),
            ACCEPT_PAUSE,
            &mut clients,
            is_stopped,
            admit,
        );
        let drained = async {
            let limit = shared.common.limits.drain_timeout;
            shared.sessions.drained(draining, limit).await;
            stop.send_replace(true);
        };
        tokio::join!(accepting, drained);
        drop(listener);
        while clients.join_next().await.is_some() {}
    }
}

/// Returns the maximum number of clients, which the limit on open files may reduce.
fn max_clients() -> usize {
    MAX_CLIENTS.min(file_descriptors::share())
}

/// A connection that counts towards its client's share.
#[derive(Debug)]
struct Admitted {
    permit: ClientPermit,
    /// The index of the interface on which the connection arrived.
    interface: u32,
}

/// The way that a connection has taken to the ingress.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
enum Arrival {
    /// It comes from a process or pod of this node.
    Inside,
    /// This node has forwarded it.
    Forwarded,
}

/// Arranges for the connection to be reset when its socket is closed.
fn reset(tcp: &TcpStream) {
    // If this fails, the client gets a FIN instead of a reset, which does no harm.
    drop(SockRef::from(tcp).set_linger(Some(Duration::ZERO)));
}

async fn handle_connection(
    shared: Arc<Shared>,
    (tcp, peer): (TcpStream, SocketAddr),
    admitted: Admitted,
    stopped: watch::Receiver<bool>,
) {
    let sessions = &shared.sessions;
    let Admitted {
        mut permit,
        interface,
    } = admitted;
    let (target, arrival) = match shared.target(&tcp, peer, interface).await {
        Ok(found) => found,
        Err(reason) => {
            reset(&tcp);
            sessions.report_problem(&"ingress".into(), reason, &peer);
            return;
        }
    };
    if arrival == Arrival::Inside
        && let Some(refusal) = shared.refusal(peer, interface).await
    {
        reset(&tcp);
        let subject = peer.ip().to_canonical().to_string().into();
        let error = format!("{target}: {refusal}");
        sessions.report_problem(&subject, Reason::ClientNotAllowed, &error);
        return;
    }
    if target.is_disputed {
        reset(&tcp);
        return sessions.record_refusal(&target, Reason::AddressDisputed);
    }
    let is_memory_scarce = shared.common.memory.is_scarce();
    if let Err(error) = sessions.take_share(&mut permit, &target.node, is_memory_scarce) {
        reset(&tcp);
        let subject = peer.ip().to_canonical().to_string().into();
        let (reason, error) = (error.reason(), format!("{target}: {error}"));
        return sessions.report_problem(&subject, reason, &error);
    }
    let (reason, tcp) = Box::pin(forward(sessions, &target, tcp, stopped)).await;
    debug!(dialled = %target, %peer, reason = reason.label(), "stream ended");
    if NOT_AN_ERROR.contains(&reason) {
        sessions.count(reason);
    } else {
        sessions.record_refusal(&target, reason);
    }
    // Closed last, so that the reason is counted before the client sees the connection end.
    drop((tcp, permit));
}

impl Shared {
    /// Counts a new connection towards its client's share, before anything is waited for. Returns the reason to
    /// refuse it, with a description, if there is no room for another client, or none for this one.
    fn admit(
        &self,
        clients: usize,
        tcp: &TcpStream,
        peer: SocketAddr,
    ) -> Result<Admitted, (Reason, String)> {
        let limit = max_clients();
        if clients >= MAX_CLIENTS {
            let error = format!("the ingress has {clients} clients, and may have no more");
            return Err((Reason::StreamLimit, error));
        }
        let local = tcp.local_addr();
        let interface = local.and_then(|local| incoming_interface::index(tcp, local));
        let interface = interface.map_err(|error| {
            let error = format!("the incoming interface is unknown: {error}");
            (Reason::ArrivedUnsteered, error)
        })?;
        let client = Client::new(peer.ip(), interface == LOOPBACK);
        let has_descriptor = match client {
            Client::Host => file_descriptors::part_of(tcp) == Part::Clients,
            Client::Pod(_) => file_descriptors::is_for_all(tcp),
        };
        if clients >= limit || !has_descriptor {
            let error = format!("the limit on open files allows no client beside these {clients}");
            return Err((Reason::DescriptorLimit, error));
        }
        let permit = self.sessions.admit(client, limit);
        let permit = permit.map_err(|error| (error.reason(), error.to_string()))?;
        Ok(Admitted { permit, interface })
    }

    /// Sets a client connection's socket options, and returns its target. Refuses a connection whose local
    /// address is not a steering address, or that neither arrived over an inside link nor was forwarded by this node.
    async fn target(
        &self,
        tcp: &TcpStream,
        peer: SocketAddr,
        interface: u32,
    ) -> Result<(SteeringTarget, Arrival), Reason> {
        set_stream_options(tcp).map_err(|_error| Reason::ClientReset)?;
        let local = tcp.local_addr().map_err(|_error| Reason::ClientReset)?;
        let address = Address::from_ip(local.ip().to_canonical());
        let mut prefixes = self.settings.prefixes.iter();
        let index = prefixes.find_map(|prefix| prefix.index(&address));
        let index = index.ok_or(Reason::ArrivedUnsteered)?;
        let target = || self.targets.borrow().get(&index).cloned();
        if let Some(target) = target()
            && let (peer, local) = (canonical(peer), canonical(local))
            && let Some(dialled) = self.settings.forwarded.dialled(peer, local)
        {
            // The flow may be an old one of a client that is gone, and its steering address may stand for another node by now.
            if dialled != SocketAddr::new(target.address, target.port) {
                return Err(Reason::TargetUnknown);
            }
            let is_inside = self.inside_links.borrow().contains(&interface);
            if !is_inside && self.settings.forwarded.include(peer) {
                return Ok((target, Arrival::Forwarded));
            }
        }
        // The link of a pod that has only just started may not be in the set yet.
        let mut inside_links = self.inside_links.clone();
        let known = inside_links.wait_for(|inside_links| inside_links.contains(&interface));
        if !matches!(timeout(NEW_LINK_TIMEOUT, known).await, Ok(Ok(_))) {
            return Err(Reason::ArrivedUnsteered);
        }
        let target = target().ok_or(Reason::TargetUnknown)?;
        Ok((target, Arrival::Inside))
    }

    /// Returns the reason if a client may not use the ingress.
    async fn refusal(&self, peer: SocketAddr, interface: u32) -> Option<Refusal> {
        let rules = self.settings.allow.as_ref()?;
        let decide = |pods: &PodNamespaces| rules.decide(peer.ip(), interface == LOOPBACK, pods);
        let mut pods = self.settings.pods.clone();
        let decided = pods.wait_for(|pods| decide(pods) != Decision::UnknownPod);
        match timeout(NEW_POD_TIMEOUT, decided).await {
            Ok(Ok(pods)) => match decide(&pods) {
                Decision::Allowed => None,
                Decision::Refused(refusal) => Some(refusal),
                Decision::UnknownPod => Some(Refusal::UnknownPod),
            },
            Ok(Err(_)) | Err(_) => Some(Refusal::UnknownPod),
        }
    }
}

/// Returns an address that is not in the IPv6 form of an IPv4 address.
fn canonical(address: SocketAddr) -> SocketAddr {
    SocketAddr::new(address.ip().to_canonical(), address.port())
}

/// Forwards a client's connection to its target until it ends. Returns the reason why it ended, and the
/// connection for the caller to close.
pub(super) async fn forward(
    sessions: &Sessions,
    target: &SteeringTarget,
    mut tcp: TcpStream,
    stopped: watch::Receiver<bool>,
) -> (Reason, Option<TcpStream>) {
    // The permit is taken first, so that a connection to a node without a session is refused immediately.
    let mut permit = match sessions.take_permit(&target.node) {
        Ok(permit) => permit,
        Err(reason) => return (reason, Some(tcp)),
    };
    let first = read_first_bytes(&mut tcp).await;
    // The session may have ended in the meantime. Another session with the node may still be open.
    if !permit.session.is_open() {
        permit = match sessions.take_permit(&target.node) {
            Ok(permit) => permit,
            Err(reason) => return (reason, Some(tcp)),
        };
    }
    let session = Arc::clone(&permit.session);
    let outcome = run_on_session(permit, target, (first.clone(), tcp), &stopped).await;
    let (NotOpened { reason, is_sent }, tcp) = match outcome {
        StreamOutcome::Ended(reason, tcp) => return (reason, tcp),
        StreamOutcome::NotOpened(why, tcp) => (why, tcp),
    };
    let other = if reason == Reason::TargetDenied {
        // Two machines may use the node's certificate, one of them wrongly.
        sessions.take_permit_elsewhere(&session)
    } else if reason == Reason::AgentConnectionLost && (first.is_empty() || !is_sent) {
        // Otherwise, the agent may have got the first bytes, which must not be sent twice.
        sessions.take_permit(&target.node).ok()
    } else {
        None
    };
    let Some(permit) = other else {
        return (reason, Some(tcp));
    };
    match run_on_session(permit, target, (first, tcp), &stopped).await {
        StreamOutcome::Ended(reason, tcp) => (reason, tcp),
        StreamOutcome::NotOpened(why, tcp) => (why.reason, Some(tcp)),
    }
}

/// The end of a stream.
enum StreamOutcome {
    /// The agent has not accepted the stream, for this reason. The client has received nothing.
    NotOpened(NotOpened, TcpStream),
    /// The stream has ended for this reason. The connection is for the caller to close.
    Ended(Reason, Option<TcpStream>),
}

/// Runs a stream on its session's thread.
async fn run_on_session(
    permit: StreamPermit,
    target: &SteeringTarget,
    (first, tcp): (Bytes, TcpStream),
    stopped: &watch::Receiver<bool>,
) -> StreamOutcome {
    let runtime = permit.session.thread.runtime().clone();
    let mut task = JoinSet::new();
    let stream = run_stream(permit, target.clone(), (first, tcp), stopped.clone());
    task.spawn_on(stream, &runtime);
    match task.join_next().await {
        Some(Ok(outcome)) => outcome,
        // The task panicked, or the session's thread is gone.
        Some(Err(_)) | None => StreamOutcome::Ended(Reason::AgentConnectionLost, None),
    }
}

/// Opens a stream and copies data until it ends. Runs on the session's thread.
async fn run_stream(
    permit: StreamPermit,
    target: SteeringTarget,
    (first, tcp): (Bytes, TcpStream),
    mut stopped: watch::Receiver<bool>,
) -> StreamOutcome {
    let session = &permit.session;
    let Ok(mut tcp) = move_to_current_runtime(tcp) else {
        return StreamOutcome::Ended(Reason::ClientReset, None);
    };
    let mut stop = std::pin::pin!(drain::begun(&mut stopped));
    let stream = tokio::select! {
        stream = session.open(&target, first, &tcp) => stream,
        () = &mut stop => Err(Reason::Draining.into()),
    };
    let stream = match stream {
        Ok(stream) => stream,
        Err(why) => return StreamOutcome::NotOpened(why, tcp),
    };
    let stopped = async {
        tokio::select! {
            reason = session.stopped() => reason,
            () = stop => Reason::Draining,
        }
    };
    let idle_limit = session.idle_timeout;
    let reason = copy::run(&mut tcp, stream, &session.traffic, idle_limit, stopped).await;
    StreamOutcome::Ended(reason, Some(tcp))
}

/// Reads the client's first bytes. There are none if the client waits for the server to speak first.
async fn read_first_bytes(tcp: &mut TcpStream) -> Bytes {
    let mut first = BytesMut::with_capacity(MAX_FIRST_BYTES);
    // EOF and errors are ignored here, since copying will run into them again.
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
        // Reads the byte behind tokio's back, so that tokio still assumes that the socket is readable.
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
