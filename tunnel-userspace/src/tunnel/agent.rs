//! The agent on an edge node, which maintains connections to the gateways.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tracing::{debug, info, warn};

pub use super::allow_list::is_allowed_target;
use super::{
    AgentState, CommonSettings, ConnectionState, InvalidAllowedTarget,
    agent_session::{self, AgentContext, EstablishedSession, Renewal, SessionEvent, SessionHandle},
    allow_list::AllowList,
    backoff::Backoff,
    dial,
    dial_permits::DialPermits,
    log_limit::LogLimit,
    peer_certificates::RenewalTimer,
    session_threads::{SessionThreads, ThreadHandle},
    sessions::MAX_PER_SOURCE,
    traffic::Traffic,
};
use crate::{drain, duration, error_chain::chain, identity};

/// The maximum number of concurrent sessions in one connection slot, the current one and earlier ones with open streams, from
/// which on the current one is renewed in place.
const MAX_SESSIONS_PER_SLOT: usize = 4;
/// The maximum number of concurrent sessions in one connection slot whose gateways drain.
const MAX_DRAINING_SESSIONS: usize = 4;
/// The maximum number of all sessions in one connection slot. Those of two slots are a gateway's limit for an address.
const MAX_SESSIONS: usize = 8;
/// The time limit for the gateway to confirm that it has renewed sessions.
const CONFIRMATION_TIMEOUT: Duration = Duration::from_secs(5);

/// The settings for an agent.
#[derive(Clone, Debug, Deserialize, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct AgentSettings {
    /// The gateways to connect to, each as HOST:PORT. There must be at least one.
    pub gateways: Vec<String>,
    /// The targets that the agent may dial: `self:PORT` (any address of this node), `localhost:PORT` or
    /// `ADDRESS:PORT`.
    pub allowed_targets: Vec<String>,
    /// The number of connections to each gateway, from 1 to 4.
    pub connections_per_gateway: u8,
    /// The time limit for connecting to a target.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub dial_timeout: Duration,
    /// The maximum number of connection attempts to targets that may be in progress at the same time. A target
    /// may have half of those that other targets leave free.
    pub max_pending_dials: usize,
    /// The address and port on which the agent serves `/metrics`, `/status`, `/healthz` and `/readyz`.
    pub admin_address: SocketAddr,
}

impl AgentSettings {
    /// Returns the number of sessions in a connection slot from which on the current one is renewed in place. The sessions of all
    /// slots, and those that renew them, are within the gateway's limit for an address.
    fn max_sessions_per_slot(&self) -> usize {
        let slots = usize::from(self.connections_per_gateway).max(1);
        (MAX_PER_SOURCE / slots - 1).min(MAX_SESSIONS_PER_SLOT)
    }
}

impl Default for AgentSettings {
    fn default() -> Self {
        Self {
            gateways: Vec::new(),
            allowed_targets: vec!["self:10250".to_owned(), "self:10255".to_owned()],
            connections_per_gateway: 2,
            dial_timeout: Duration::from_secs(5),
            max_pending_dials: 64,
            admin_address: SocketAddr::from(([127, 0, 0, 1], 10_289)),
        }
    }
}

/// The agent on an edge node.
#[derive(Debug)]
pub struct Agent {
    shared: Arc<AgentContext>,
    identity: identity::CertificateReceiver,
}

impl Agent {
    /// Creates an agent, which connects to the gateways once `run` is called.
    ///
    /// # Errors
    ///
    /// Returns an error if an allow-list entry cannot be parsed.
    pub fn new(
        settings: AgentSettings,
        common: CommonSettings,
        identity: identity::CertificateReceiver,
    ) -> Result<Self, InvalidAllowedTarget> {
        let allow = AllowList::parse(&settings.allowed_targets)?;
        let slots = settings.gateways.iter().flat_map(|gateway| {
            (0..settings.connections_per_gateway).map(|connection| (gateway.clone(), connection))
        });
        // The boot ID shows when the node has rebooted. It is left empty if it can't be read.
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let shared = AgentContext {
            allow_list: allow,
            state: Arc::new(AgentState::new(slots)),
            dial_permits: DialPermits::new(settings.max_pending_dials),
            log_limit: LogLimit::default(),
            boot_id: boot.unwrap_or_default().trim().to_owned(),
            settings,
            common,
        };
        Ok(Self {
            shared: Arc::new(shared),
            identity,
        })
    }

    /// Returns the agent's status, which the agent keeps up to date while it runs.
    #[must_use]
    pub fn state(&self) -> Arc<AgentState> {
        Arc::clone(&self.shared.state)
    }

    /// Maintains the connections until the drain begins, then gives open streams at most
    /// [`SessionLimits::drain_timeout`](super::SessionLimits::drain_timeout) to finish.
    pub async fn run(self, mut draining: watch::Receiver<bool>) {
        let Self { shared, identity } = self;
        let mut tasks = JoinSet::new();
        let slots = shared.state.view().connections;
        let threads = SessionThreads::start(shared.common.limits.max_threads.min(slots.len()));
        for (slot, connection) in slots.into_iter().enumerate() {
            let task = ConnectionTask {
                slot,
                gateway: connection.gateway,
                shared: Arc::clone(&shared),
                identity: identity.clone(),
                thread: threads.least_loaded(),
            };
            let runtime = task.thread.runtime().clone();
            tasks.spawn_on(task.run(draining.clone()), &runtime);
        }
        drop(threads);
        while tasks.join_next().await.is_some() {}
        // Without gateways, there are no tasks to wait for, but `run` must not return before the drain
        // begins.
        drain::begun(&mut draining).await;
    }
}

/// A session that has been established, and the certificate of this agent with which it was.
struct Connected {
    own: Arc<identity::Identity>,
    established: EstablishedSession,
}

/// The session of a slot that takes new streams.
struct CurrentSession {
    handle: SessionHandle,
    events: mpsc::UnboundedReceiver<SessionEvent>,
    renewal: RenewalTimer,
    traffic: Arc<Traffic>,
    clock_skew: Option<SignedDuration>,
}

/// The way in which the sessions of a slot were renewed.
enum Renewed {
    /// By a session that takes the new streams.
    By(CurrentSession),
    /// The current session still takes the new streams, and is renewed again when this timer says so.
    InPlace(RenewalTimer),
}

/// Waits until a session ends or its gateway drains, and returns that event.
async fn end_of(events: &mut mpsc::UnboundedReceiver<SessionEvent>) -> Option<SessionEvent> {
    loop {
        match events.recv().await {
            Some(SessionEvent::Renewed(_)) => {}
            event => return event,
        }
    }
}

impl CurrentSession {
    /// Waits until the gateway confirms that this session has renewed another one.
    async fn confirmed(&mut self, other: &SessionHandle) -> Result<(), String> {
        let event = timeout(CONFIRMATION_TIMEOUT, self.events.recv()).await;
        match event {
            Ok(Some(SessionEvent::Renewed(tokens))) if other.is_in(&tokens) => Ok(()),
            Ok(Some(SessionEvent::Renewed(_))) => Err(
                "the gateway does not know the session; does its name lead to several?".to_owned(),
            ),
            Ok(Some(SessionEvent::GatewayDrains)) => Err("the gateway drains".to_owned()),
            Ok(Some(SessionEvent::Ended(error))) => Err(error),
            Ok(None) => Err("the task of the session panicked".to_owned()),
            Err(_elapsed) => Err("the gateway does not confirm it".to_owned()),
        }
    }
}

/// The sessions of a slot: the current one, and earlier ones that still have streams.
#[derive(Default)]
struct SlotSessions {
    tasks: JoinSet<()>,
    handles: Vec<SessionHandle>,
}

impl SlotSessions {
    fn forget_ended(&mut self) {
        while self.tasks.try_join_next().is_some() {}
        self.handles.retain(|handle| !handle.is_closed());
    }

    /// Returns true if no other session may be added.
    fn are_full(&self) -> bool {
        let open = self.handles.iter().filter(|handle| !handle.is_closed());
        let draining = open.filter(|handle| !handle.is_retired());
        self.tasks.len() >= MAX_SESSIONS || draining.count() >= MAX_DRAINING_SESSIONS
    }

    /// Returns the sessions that have not ended.
    fn open(&self) -> Vec<SessionHandle> {
        let open = self.handles.iter().filter(|handle| !handle.is_closed());
        open.cloned().collect()
    }
}

/// The task that maintains one connection to a gateway.
struct ConnectionTask {
    slot: usize,
    gateway: String,
    shared: Arc<AgentContext>,
    identity: identity::CertificateReceiver,
    /// The thread that runs this task and its sessions.
    thread: ThreadHandle,
}

impl ConnectionTask {
    async fn run(self, mut draining: watch::Receiver<bool>) {
        let mut backoff = Backoff::default();
        // An earlier session continues alongside its replacement, until its last stream ends.
        let mut sessions = SlotSessions::default();
        loop {
            sessions.forget_ended();
            // A faulty gateway may keep draining without ever ending its sessions.
            while sessions.are_full() {
                let error = format!(
                    "waiting for one of {} sessions to end, which take no new streams",
                    sessions.open().len()
                );
                self.set_state(ConnectionState::Backoff, None, Some(error));
                tokio::select! {
                    _ = sessions.tasks.join_next() => {}
                    () = drain::begun(&mut draining) => break,
                }
            }
            self.set_state(ConnectionState::Connecting, None, None);
            let result = tokio::select! {
                result = Box::pin(self.connect(Renewal::default())) => result,
                () = drain::begun(&mut draining) => break,
            };
            let mut reconnect_now = false;
            match result {
                Ok(connected) => {
                    let since = Instant::now();
                    self.log_event("connected to the gateway");
                    self.set_state(ConnectionState::Connected, None, None);
                    let current = self.start(connected, &mut sessions, &draining);
                    self.show(&current);
                    let begin = draining.clone();
                    let kept = Box::pin(self.keep(current, &mut sessions, &begin));
                    let event = tokio::select! {
                        event = kept => event,
                        () = drain::begun(&mut draining) => break,
                    };
                    let uptime = since.elapsed();
                    backoff.record_uptime(uptime);
                    match event {
                        Some(SessionEvent::GatewayDrains) => {
                            self.log_event("the gateway drains");
                            reconnect_now = backoff.record_drain(uptime);
                        }
                        Some(SessionEvent::Ended(error)) => self.report_failure(error),
                        Some(SessionEvent::Renewed(_)) | None => {
                            self.report_failure("the task of the session panicked".to_owned());
                        }
                    }
                }
                Err(error) => self.report_failure(error),
            }
            if !reconnect_now {
                let pause = backoff.next_delay(fastrand::f64());
                let next = Timestamp::now().checked_add(pause);
                self.set_state(ConnectionState::Backoff, next.ok(), None);
                tokio::select! {
                    () = sleep(pause) => {}
                    () = drain::begun(&mut draining) => break,
                }
            }
        }
        self.set_state(ConnectionState::Draining, None, None);
        while sessions.tasks.join_next().await.is_some() {}
    }

    /// Waits until the agent has a certificate, then dials the gateway and establishes a session.
    async fn connect(&self, renewal: Renewal) -> Result<Connected, String> {
        let mut identity = self.identity.clone();
        let own = loop {
            if let Some(own) = identity.current() {
                break own;
            }
            let error = "waiting for a certificate".to_owned();
            self.set_state(ConnectionState::Backoff, None, Some(error));
            identity.changed().await;
        };
        let mark = self.shared.common.mark;
        let connection = dial::gateway(&self.gateway, mark, &own).await;
        let connection = connection.map_err(|error| chain(&error))?;
        let established = agent_session::establish(&self.shared, connection, &own, renewal);
        let established = Box::pin(established).await?;
        Ok(Connected { own, established })
    }

    /// Starts the task of a session.
    fn start(
        &self,
        connected: Connected,
        sessions: &mut SlotSessions,
        draining: &watch::Receiver<bool>,
    ) -> CurrentSession {
        let Connected { own, established } = connected;
        let handle = established.handle.clone();
        let renewal = RenewalTimer::new(own, &handle.gateway);
        let traffic = Arc::clone(&established.traffic);
        let clock_skew = established.clock_skew();
        let (event_sender, events) = mpsc::unbounded_channel();
        let session = agent_session::run(
            Arc::clone(&self.shared),
            established,
            self.identity.clone(),
            event_sender,
            draining.clone(),
        );
        sessions.tasks.spawn(session);
        sessions.handles.push(handle.clone());
        CurrentSession {
            handle,
            events,
            renewal,
            traffic,
            clock_skew,
        }
    }

    /// Keeps a session until it ends or its gateway drains, and returns that event. If a certificate of either end is renewed,
    /// another session takes the new streams, and the earlier one continues with those that it has.
    async fn keep(
        &self,
        mut current: CurrentSession,
        sessions: &mut SlotSessions,
        draining: &watch::Receiver<bool>,
    ) -> Option<SessionEvent> {
        let mut failures = Backoff::default();
        loop {
            tokio::select! {
                event = end_of(&mut current.events) => return event,
                () = current.renewal.due(&self.identity) => {}
            }
            sessions.forget_ended();
            let renewed = tokio::select! {
                event = end_of(&mut current.events) => return event,
                renewed = Box::pin(self.renew(&current.handle, sessions, draining)) => renewed,
            };
            match renewed {
                Ok(Renewed::By(next)) => {
                    current.handle.retire();
                    current = next;
                }
                Ok(Renewed::InPlace(renewal)) => current.renewal = renewal,
                Err(error) => {
                    let error = format!("the session could not be renewed: {error}");
                    self.log_failure("the session with the gateway was not renewed", &error);
                    self.set_state(ConnectionState::Connected, None, Some(error));
                    current
                        .renewal
                        .postpone(failures.next_delay(fastrand::f64()));
                    continue;
                }
            }
            self.log_event("the session with the gateway was renewed");
            failures = Backoff::default();
        }
    }

    /// Opens another session that renews the open ones. It takes the place of the current one, unless there are too many with
    /// open streams.
    async fn renew(
        &self,
        current: &SessionHandle,
        sessions: &mut SlotSessions,
        draining: &watch::Receiver<bool>,
    ) -> Result<Renewed, String> {
        let renewal = Renewal {
            sessions: sessions.open(),
            is_all: sessions.tasks.len() >= self.shared.settings.max_sessions_per_slot(),
        };
        let is_all = renewal.is_all;
        let connected = Box::pin(self.connect(renewal)).await?;
        let confirms = connected.established.confirms_renewals();
        let mut next = self.start(connected, sessions, draining);
        let confirmed = if confirms {
            next.confirmed(current).await
        } else if is_all {
            Err("the gateway's release can't renew sessions".to_owned())
        } else {
            // The open sessions end with the certificates of their handshakes.
            Ok(())
        };
        if confirmed.is_err() || is_all {
            next.handle.retire();
        }
        confirmed?;
        if is_all {
            return Ok(Renewed::InPlace(next.renewal));
        }
        self.show(&next);
        Ok(Renewed::By(next))
    }

    /// Makes the status show a session.
    fn show(&self, session: &CurrentSession) {
        let traffic = Arc::clone(&session.traffic);
        let state = &self.shared.state;
        state.set_session(self.slot, traffic, session.clock_skew);
    }

    fn report_failure(&self, error: String) {
        self.log_failure("no connection to the gateway", &error);
        self.set_state(ConnectionState::Backoff, None, Some(error));
    }

    fn log_failure(&self, event: &'static str, error: &str) {
        let gateway = &self.gateway;
        if let Some(suppressed) = self.may_log(event, error) {
            warn!(gateway, error, suppressed, "{event}");
        } else {
            debug!(gateway, error, "{event}");
        }
    }

    fn log_event(&self, event: &'static str) {
        let gateway = &self.gateway;
        if let Some(suppressed) = self.may_log(event, "") {
            info!(gateway, suppressed, "{event}");
        } else {
            debug!(gateway, "{event}");
        }
    }

    /// Returns the number of messages suppressed since the last logged one, or `None` if this message must be
    /// suppressed, too. A gateway that is down or hostile causes an attempt several times a second.
    fn may_log(&self, kind: &'static str, cause: &str) -> Option<u64> {
        let gateway = self.gateway.as_str().into();
        self.shared.log_limit.may_log(kind, &gateway, cause)
    }

    fn set_state(&self, state: ConnectionState, next: Option<Timestamp>, error: Option<String>) {
        self.shared.state.set_state(self.slot, state, next, error);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sessions_of_all_slots_and_their_renewals_are_within_the_gateways_limit() {
        for (connections_per_gateway, expected) in [(1, 4), (2, 4), (3, 4), (4, 3)] {
            let settings = AgentSettings {
                connections_per_gateway,
                ..AgentSettings::default()
            };
            let sessions = settings.max_sessions_per_slot();
            assert_eq!(sessions, expected);
            assert!((sessions + 1) * usize::from(connections_per_gateway) <= MAX_PER_SOURCE);
        }
    }
}
