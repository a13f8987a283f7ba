//! Where steered connects land: a steering address says which node and port is meant.

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
    ACCEPT_PAUSE, Common, Sessions, copy,
    gateway::listener,
    incoming_interface,
    session::Permit,
    socket::{prepare_end, seated},
};
use crate::{
    drain, listen,
    model::{Target, Targets},
};

/// How long to wait for the client's first bytes: they travel with the CONNECT, which saves a round
/// trip where the client speaks first. Where it does not, this is what it costs.
const FIRST: Duration = Duration::from_millis(2);
/// How many of them.
const FIRST_BYTES: usize = 16 << 10;
/// How many clients there may be.
const CLIENTS: usize = 16 << 10;

/// How streams end that nothing is wrong with but what their own ends did.
const BY_AN_END: [Reason; 3] = [
    Reason::StreamServed,
    Reason::ClientReset,
    Reason::TargetReset,
];

/// How long a link may take to become known.
const NEW_LINK: Duration = Duration::from_secs(1);

/// Settings of an ingress.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The ranges of steering addresses.
    pub prefixes: Vec<Prefix>,
    /// The address and port: one of IPv6 takes connects of IPv4 as well.
    pub listen: SocketAddr,
}

/// Where steered connects land.
#[derive(Debug)]
pub struct Ingress {
    listener: TcpListener,
    shared: Arc<Shared>,
}

#[derive(Debug)]
struct Shared {
    settings: Settings,
    common: Common,
    targets: watch::Receiver<Arc<Targets>>,
    inside: watch::Receiver<Arc<BTreeSet<u32>>>,
    sessions: Arc<Sessions>,
}

impl Ingress {
    /// Listens, but accepts nobody yet. `inside` has the indices of the links that steered connects
    /// come by; what comes by any other is reset.
    ///
    /// # Errors
    ///
    /// If the address can't be listened on.
    pub fn bind(
        settings: Settings,
        common: Common,
        targets: watch::Receiver<Arc<Targets>>,
        inside: watch::Receiver<Arc<BTreeSet<u32>>>,
        sessions: Arc<Sessions>,
    ) -> io::Result<Self> {
        let is_v6 = settings.listen.is_ipv6();
        let listener = listener(settings.listen, common.mark, |socket| {
            incoming_interface::remember(socket, is_v6)?;
            // Without the privilege, only addresses that are local anyway can be served.
            if let Err(error) = socket.set_ip_transparent_v4(true) {
                debug!(%error, "the ingress is not transparent");
            }
            Ok(())
        })?;
        let shared = Arc::new(Shared {
            settings,
            common,
            targets,
            inside,
            sessions,
        });
        Ok(Self { listener, shared })
    }

    /// Where it listens.
    #[must_use]
    pub fn local_addr(&self) -> SocketAddr {
        let listen = self.shared.settings.listen;
        self.listener.local_addr().unwrap_or(listen)
    }

    /// Serves until the drain begins; then lets streams go on for a while.
    pub async fn run(self, draining: watch::Receiver<bool>) {
        info!(address = %self.local_addr(), "ingress listens");
        let Self { listener, shared } = self;
        let (stop, stopped) = watch::channel(false);
        let mut clients = JoinSet::new();
        let admit = |clients: &mut JoinSet<()>, (tcp, peer)| {
            if clients.len() < CLIENTS {
                clients.spawn(serve(Arc::clone(&shared), tcp, peer, stopped.clone()));
            } else {
                reset(&tcp);
                let whom = "ingress".into();
                shared.sessions.unwell(&whom, Reason::StreamsFull, &peer);
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
        if timeout(shared.common.limits.drain, all).await.is_err() {
            stop.send_replace(true);
            while clients.join_next().await.is_some() {}
        }
    }
}

/// Has the drop of the socket reset the connection.
fn reset(tcp: &TcpStream) {
    // Where this fails, the client sees an end in the place of a reset; there is nobody to tell.
    drop(SockRef::from(tcp).set_linger(Some(Duration::ZERO)));
}

async fn serve(
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
            sessions.unwell(&"ingress".into(), reason, &peer);
            return;
        }
    };
    let (reason, tcp) = Box::pin(carry(sessions, &target, tcp, stopped)).await;
    debug!(dialled = %target, %peer, reason = reason.label(), "stream ended");
    if BY_AN_END.contains(&reason) {
        sessions.count(reason);
    } else {
        sessions.refused(&target, reason);
    }
    // Whoever sees the end of it finds it told already.
    drop(tcp);
}

impl Shared {
    /// Prepares a connection, and says what it is for, if it came as a steered one does.
    async fn target(&self, tcp: &TcpStream) -> Result<Target, Reason> {
        prepare_end(tcp).map_err(|_error| Reason::ClientReset)?;
        let local = tcp.local_addr().map_err(|_error| Reason::ClientReset)?;
        let address = Address::from_ip(local.ip().to_canonical());
        let mut prefixes = self.settings.prefixes.iter();
        let index = prefixes.find_map(|prefix| prefix.index(&address));
        let index = index.ok_or(Reason::ArrivedOutside)?;
        let interface = incoming_interface::of(tcp, local).map_err(|error| {
            debug!(%error, "the incoming interface is unknown");
            Reason::ArrivedOutside
        })?;
        // That of a pod which has only just come up may not be known yet.
        let mut inside = self.inside.clone();
        let known = inside.wait_for(|inside| inside.contains(&interface));
        if !matches!(timeout(NEW_LINK, known).await, Ok(Ok(_))) {
            return Err(Reason::ArrivedOutside);
        }
        let targets = self.targets.borrow();
        targets.get(&index).cloned().ok_or(Reason::TargetUnknown)
    }
}

/// Carries a client's connection to its target, and says how it ended; what is left of the
/// connection is still to be dropped.
pub(super) async fn carry(
    sessions: &Sessions,
    target: &Target,
    mut tcp: TcpStream,
    stopped: watch::Receiver<bool>,
) -> (Reason, Option<TcpStream>) {
    let permitted = async {
        // Without a session it is refused at once.
        let permit = sessions.permit(&target.node)?;
        let first = first_bytes(&mut tcp).await;
        // A session may end meanwhile, beside another.
        if permit.session.is_open() {
            return Ok((permit, first));
        }
        Ok((sessions.permit(&target.node)?, first))
    };
    let (permit, first) = match permitted.await {
        Ok(permitted) => permitted,
        Err(reason) => return (reason, Some(tcp)),
    };
    let runtime = permit.session.seat.runtime().clone();
    let mut there = JoinSet::new();
    there.spawn_on(
        stream(permit, target.clone(), (first, tcp), stopped),
        &runtime,
    );
    match there.join_next().await {
        Some(Ok(ended)) => ended,
        // A task that failed, or a thread that is gone.
        Some(Err(_)) | None => (Reason::AgentLost, None),
    }
}

/// A stream of a session, where the session is carried.
async fn stream(
    permit: Permit,
    target: Target,
    (first, tcp): (Bytes, TcpStream),
    mut stopped: watch::Receiver<bool>,
) -> (Reason, Option<TcpStream>) {
    let session = &permit.session;
    let Ok(mut tcp) = seated(tcp) else {
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

/// The client's first bytes, or none if it waits to be spoken to.
async fn first_bytes(tcp: &mut TcpStream) -> Bytes {
    let mut first = BytesMut::with_capacity(FIRST_BYTES);
    // The copy meets an end or an error again.
    drop(timeout(FIRST, tcp.read_buf(&mut first)).await);
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
        // What was readable is read by somebody else: tokio doesn't know that nothing is left.
        client.write_all(b"!").await.expect("written");
        tcp.readable().await.expect("readable");
        (&*SockRef::from(&tcp)).read_exact(&mut [0]).expect("read");

        let mut first = Box::pin(first_bytes(&mut tcp));
        let waits = poll_fn(|cx| Poll::Ready(first.as_mut().poll(cx).is_pending()));
        assert!(waits.await);
        client.write_all(b"hello").await.expect("written");

        assert_eq!(first.await, "hello");
    }
}
