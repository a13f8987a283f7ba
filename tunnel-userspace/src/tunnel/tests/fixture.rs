//! Fixtures for the tunnel tests: a gateway with an ingress, an agent, and TCP helpers.

use std::{
    collections::BTreeSet,
    net::{IpAddr, Ipv4Addr, SocketAddr},
    sync::{Arc, Mutex},
    time::Duration,
};

use socket2::SockRef;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpListener, TcpStream},
    sync::watch,
    task::JoinSet,
    time::{sleep, timeout},
};
use tunnel_common::{addr::Address, reason::Reason, steering::Prefix};

use crate::{
    identity::{self, Role, tests::TestCa},
    model::{SteeringTarget, SteeringTargets},
    tunnel::{
        AccessInputs, AgentState, CommonSettings, ConnectionState, ConnectionView,
        ForwardedClients, NodeView, SessionLimits, SessionView, Sessions,
        agent::{self, Agent},
        gateway::{self, Gateway},
        ingress::{self, Ingress},
    },
};

/// The time limit for a step in a test. It is reached only if the test fails.
pub(super) const TIMEOUT: Duration = Duration::from_secs(60);

pub(super) fn limits() -> SessionLimits {
    SessionLimits {
        max_streams: 250,
        stream_window_bytes: 1 << 20,
        max_buffered_bytes: 64 << 20,
        max_threads: 2,
        ping_interval: Duration::from_secs(1),
        ping_timeout: Duration::from_secs(2),
        drain_timeout: Duration::from_secs(5),
        ..SessionLimits::default()
    }
}

fn common(limits: &SessionLimits) -> CommonSettings {
    CommonSettings::new(limits.clone(), None)
}

/// Waits until a condition holds. Panics with the message `what` on a timeout.
pub(super) async fn wait_until(what: &str, mut is_so: impl FnMut() -> bool) {
    let wait = async {
        while !is_so() {
            sleep(Duration::from_millis(5)).await;
        }
    };
    timeout(TIMEOUT, wait)
        .await
        .unwrap_or_else(|_| panic!("{what}"));
}

/// A test CA that issues certificates to gateways and agents.
pub(super) struct Pki(pub(super) TestCa);

impl Pki {
    pub(super) fn new() -> Self {
        Self(TestCa::new())
    }

    pub(super) fn gateway(&self) -> identity::CertificateReceiver {
        open(self.0.gateway(), Role::Gateway)
    }

    pub(super) fn agent(&self, node: &str) -> identity::CertificateReceiver {
        open(self.0.agent(node), Role::Agent)
    }
}

fn open(files: identity::IdentityFiles, role: Role) -> identity::CertificateReceiver {
    let (_store, receiver) = identity::CertificateStore::open(files, role);
    assert_eq!(receiver.state().problem, None);
    receiver
}

/// The name of the agent's node.
pub(super) const NODE: &str = "edge-7";

/// Running tasks, and the sender for their drain signal.
#[derive(Default)]
pub(super) struct RunningTasks {
    draining: watch::Sender<bool>,
    tasks: JoinSet<()>,
}

impl RunningTasks {
    /// Starts a task that runs until the drain.
    pub(super) fn start<F: Future<Output = ()> + Send + 'static>(
        &mut self,
        task: impl FnOnce(watch::Receiver<bool>) -> F,
    ) {
        self.tasks.spawn(task(self.draining.subscribe()));
    }

    pub(super) fn drain(&self) {
        self.draining.send_replace(true);
    }

    pub(super) async fn drained(mut self) {
        self.drain();
        while let Some(ended) = self.tasks.join_next().await {
            ended.expect("no panic");
        }
    }
}

pub(super) fn gateway_settings() -> gateway::GatewaySettings {
    gateway::GatewaySettings {
        listen: SocketAddr::from(([127, 0, 0, 1], 0)),
        max_sessions: 100,
        max_pending_handshakes: 16,
        handshake_timeout: Duration::from_secs(5),
        ..gateway::GatewaySettings::default()
    }
}

/// A gateway and an ingress, with their steered targets.
pub(super) struct Cloud {
    pub(super) sessions: Arc<Sessions>,
    pub(super) gateway: SocketAddr,
    ingress: SocketAddr,
    targets: watch::Sender<Arc<SteeringTargets>>,
    pub(super) inside: watch::Sender<Arc<BTreeSet<u32>>>,
    /// The address that every client has dialled, if its packets are translated.
    pub(super) dialled: Arc<Mutex<Option<SocketAddr>>>,
    /// The address of the ingress for which that was asked last.
    pub(super) asked: Arc<Mutex<Option<SocketAddr>>>,
    pub(super) tasks: RunningTasks,
}

impl Cloud {
    pub(super) fn new(pki: &Pki, limits: &SessionLimits) -> Self {
        let none = AccessInputs::default();
        Self::with(gateway_settings(), limits, pki.gateway(), none)
    }

    pub(super) fn with(
        settings: gateway::GatewaySettings,
        limits: &SessionLimits,
        identity: identity::CertificateReceiver,
        access: AccessInputs,
    ) -> Self {
        let sessions = Sessions::new();
        let network = Address::from_ip(Ipv4Addr::new(127, 19, 0, 0).into());
        let (dialled, asked) = <(Arc<Mutex<Option<SocketAddr>>>, Arc<Mutex<_>>)>::default();
        let (answer, question) = (Arc::clone(&dialled), Arc::clone(&asked));
        let find_dialled = move |_client, ingress| {
            *question.lock().expect("no panic") = Some(ingress);
            *answer.lock().expect("no panic")
        };
        let clients = "127.0.0.0/8".parse().expect("a range");
        let ingress = ingress::IngressSettings {
            prefixes: vec![Prefix::new(network, 16).expect("a range")],
            listen: SocketAddr::from((Ipv4Addr::UNSPECIFIED, 0)),
            allow: None,
            pods: watch::channel(Arc::default()).1,
            forwarded: ForwardedClients::new(vec![clients], Arc::new(find_dialled)),
        };
        let common = common(limits);
        let targets = watch::Sender::new(Arc::default());
        // The interface index of `lo`.
        let inside = watch::Sender::new(Arc::new(BTreeSet::from([1])));
        let ingress = Ingress::bind(
            ingress,
            common.clone(),
            targets.subscribe(),
            inside.subscribe(),
            Arc::clone(&sessions),
        )
        .expect("an ingress");
        let registry = Arc::clone(&sessions);
        let gateway = Gateway::bind(settings, common, identity, registry, access);
        let gateway = gateway.expect("a gateway");
        let (at_gateway, at_ingress) = (gateway.local_addr(), ingress.local_addr());
        let mut tasks = RunningTasks::default();
        tasks.tasks.spawn(gateway.run(tasks.draining.subscribe()));
        tasks.tasks.spawn(ingress.run(tasks.draining.subscribe()));
        Self {
            sessions,
            gateway: at_gateway,
            ingress: at_ingress,
            targets,
            inside,
            dialled,
            asked,
            tasks,
        }
    }

    /// Steers an address and port of a node, and returns the steering address for clients to dial.
    pub(super) fn steer(&self, node: &str, address: SocketAddr) -> SocketAddr {
        let mut index = 0;
        self.targets.send_modify(|targets| {
            let mut next = SteeringTargets::clone(targets);
            index = u32::try_from(next.len()).expect("few");
            let target = SteeringTarget {
                node: node.into(),
                address: address.ip(),
                port: address.port(),
                loopback: false,
                is_disputed: false,
            };
            next.insert(index, target);
            *targets = Arc::new(next);
        });
        self.steering_address(index)
    }

    /// Returns the steering address for an index, with the ingress's port.
    pub(super) fn steering_address(&self, index: u32) -> SocketAddr {
        let number = u32::from(Ipv4Addr::new(127, 19, 0, 1)) + index;
        SocketAddr::new(Ipv4Addr::from(number).into(), self.ingress.port())
    }

    pub(super) fn unsteered_address(&self) -> SocketAddr {
        SocketAddr::new(IpAddr::from([127, 0, 0, 1]), self.ingress.port())
    }

    pub(super) fn count(&self, reason: Reason) -> u64 {
        self.sessions.counts().get(&reason).copied().unwrap_or(0)
    }

    pub(super) async fn counted(&self, reason: Reason, times: u64) {
        wait_until(reason.label(), || self.count(reason) >= times).await;
        assert_eq!(self.count(reason), times, "{}", reason.label());
    }

    /// Returns the gateway's view of a node, which is empty if the gateway doesn't know the node.
    pub(super) fn node(&self, node: &str) -> NodeView {
        let mut nodes = self.sessions.nodes().into_iter();
        nodes.find(|view| view.node == node).unwrap_or_default()
    }

    /// Returns the gateway's view of the first session with [`NODE`].
    pub(super) fn session(&self) -> SessionView {
        self.node(NODE).sessions.swap_remove(0)
    }

    pub(super) fn last_error(&self, node: &str) -> String {
        self.node(node).last_error.unwrap_or_default()
    }

    pub(super) async fn connected(&self, node: &str, sessions: usize) {
        wait_until("connected", || self.node(node).sessions.len() == sessions).await;
    }
}

/// A running agent.
pub(super) struct Edge {
    state: Arc<AgentState>,
    pub(super) tasks: RunningTasks,
}

pub(super) fn agent_settings(
    gateways: &[SocketAddr],
    allow: &[SocketAddr],
) -> agent::AgentSettings {
    agent::AgentSettings {
        gateways: gateways.iter().map(ToString::to_string).collect(),
        allowed_targets: allow.iter().map(ToString::to_string).collect(),
        connections_per_gateway: 1,
        dial_timeout: Duration::from_secs(2),
        ..agent::AgentSettings::default()
    }
}

impl Edge {
    pub(super) fn new(
        settings: agent::AgentSettings,
        identity: identity::CertificateReceiver,
    ) -> Self {
        Self::with(settings, &limits(), identity)
    }

    fn with(
        settings: agent::AgentSettings,
        limits: &SessionLimits,
        identity: identity::CertificateReceiver,
    ) -> Self {
        let agent = Agent::new(settings, common(limits), identity).expect("an agent");
        let state = agent.state();
        let mut tasks = RunningTasks::default();
        tasks.tasks.spawn(agent.run(tasks.draining.subscribe()));
        Self { state, tasks }
    }

    pub(super) fn state(&self) -> ConnectionState {
        self.connection().state
    }

    pub(super) fn last_error(&self) -> String {
        self.last_error_of(0)
    }

    pub(super) fn last_error_of(&self, slot: usize) -> String {
        let connection = self.state.view().connections.swap_remove(slot);
        connection.last_error.unwrap_or_default()
    }

    /// Returns the view of the agent's first connection.
    pub(super) fn connection(&self) -> ConnectionView {
        self.state.view().connections.swap_remove(0)
    }

    pub(super) async fn counted(&self, reason: Reason, times: u64) {
        let count = || self.state.view().counts.get(reason.label()).copied();
        wait_until(reason.label(), || count() == Some(times)).await;
    }
}

/// A gateway with a connected agent, and a target that is steered and on the agent's allow-list.
pub(super) struct TunnelFixture {
    pub(super) cloud: Cloud,
    pub(super) edge: Edge,
    pub(super) target: TcpListener,
    pub(super) steered: SocketAddr,
}

impl TunnelFixture {
    pub(super) async fn new() -> Self {
        Self::with(&limits(), &limits()).await
    }

    pub(super) async fn with(of_cloud: &SessionLimits, of_edge: &SessionLimits) -> Self {
        let pki = Pki::new();
        let target = TcpListener::bind("127.0.0.1:0").await.expect("bound");
        let address = target.local_addr().expect("an address");
        let cloud = Cloud::new(&pki, of_cloud);
        let settings = agent_settings(&[cloud.gateway], &[address]);
        let edge = Edge::with(settings, of_edge, pki.agent(NODE));
        let steered = cloud.steer(NODE, address);
        cloud.connected(NODE, 1).await;
        Self {
            cloud,
            edge,
            target,
            steered,
        }
    }

    /// Connects a client to the target, and returns both ends. One byte has already been sent through the
    /// tunnel and read by the target.
    pub(super) async fn connect(&self) -> (TcpStream, TcpStream) {
        let mut client = TcpStream::connect(self.steered).await.expect("connected");
        client.write_all(b"!").await.expect("written");
        let accepted = timeout(TIMEOUT, self.target.accept()).await.expect("soon");
        let (mut target, _) = accepted.expect("accepted");
        assert_eq!(read(&mut target, 1).await, b"!");
        (client, target)
    }
}

/// Returns both sockets of a TCP connection, the client's first.
pub(super) async fn tcp_pair() -> (TcpStream, TcpStream) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("bound");
    let address = listener.local_addr().expect("an address");
    let dialler = TcpStream::connect(address).await.expect("connected");
    (dialler, listener.accept().await.expect("accepted").0)
}

/// Reads exactly `length` bytes.
pub(super) async fn read(stream: &mut TcpStream, length: usize) -> Vec<u8> {
    let mut bytes = vec![0; length];
    let read = timeout(TIMEOUT, stream.read_exact(&mut bytes)).await;
    read.expect("soon").expect("read");
    bytes
}

/// Reads until EOF. Panics if the connection is reset.
pub(super) async fn read_to_end(stream: &mut TcpStream) -> Vec<u8> {
    let mut bytes = Vec::new();
    let read = timeout(TIMEOUT, stream.read_to_end(&mut bytes)).await;
    read.expect("soon").expect("an end and no reset");
    bytes
}

/// Reads until the connection is reset. Panics on EOF.
pub(super) async fn read_until_reset(stream: &mut TcpStream) {
    let mut bytes = Vec::new();
    let read = timeout(TIMEOUT, stream.read_to_end(&mut bytes)).await;
    let error = read.expect("soon").expect_err("a reset and no end");
    assert_eq!(error.kind(), std::io::ErrorKind::ConnectionReset);
}

pub(super) fn reset(stream: TcpStream) {
    let linger = SockRef::from(&stream).set_linger(Some(Duration::ZERO));
    linger.expect("set");
    drop(stream);
}

/// Returns pseudo-random bytes, so that a lost or misplaced byte is noticed.
pub(super) fn pattern(length: usize) -> Vec<u8> {
    let mut random = fastrand::Rng::with_seed(7);
    std::iter::repeat_with(|| random.u8(..))
        .take(length)
        .collect()
}
