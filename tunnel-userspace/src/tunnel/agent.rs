//! The agent, on an edge node: keeps connections to the gateways up.

use std::{net::SocketAddr, sync::Arc, time::Duration};

use jiff::Timestamp;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::{Semaphore, mpsc, watch},
    task::JoinSet,
    time::{Instant, sleep},
};
use tracing::{info, warn};

pub use super::target::is_allowance;
use super::{
    BadAllowance, Board, Common, ConnectionState,
    backoff::Backoff,
    dial,
    serve::{self, News, Shared},
    target::AllowList,
    threads::{Seat, Threads},
};
use crate::{drain, duration, failure::chain, identity};

/// The maximum number of concurrent sessions per connection slot, sessions being replaced included.
const MOST: usize = 4;
/// A shorter-lived session is replaced only after a pause, even if its gateway asks for a replacement.
const SHORT: Duration = Duration::from_secs(1);

/// The settings of an agent.
#[derive(Clone, Debug, Deserialize, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields, rename_all = "camelCase")]
pub struct Settings {
    /// The gateways, each as host:port; at least one.
    pub gateways: Vec<String>,
    /// The targets that may be dialled: `self:PORT` (an address of this node), `localhost:PORT`, or
    /// `ADDRESS:PORT`.
    pub allowed_targets: Vec<String>,
    /// Connections to each gateway, from 1 to 4.
    pub connections_per_gateway: u8,
    /// The time limit of a connect to a target.
    #[serde(with = "duration")]
    pub dial_timeout: Duration,
    /// The maximum number of concurrent connects to targets.
    pub max_pending_dials: usize,
    /// The address of the agent's own `/metrics`, `/healthz` and `/readyz`.
    pub admin_address: SocketAddr,
}

impl Default for Settings {
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

/// The agent of an edge node.
#[derive(Debug)]
pub struct Agent {
    shared: Arc<Shared>,
    identity: identity::Receiver,
}

impl Agent {
    /// Creates the agent; dials nothing yet.
    ///
    /// # Errors
    ///
    /// If an allow-list entry cannot be parsed.
    pub fn new(
        settings: Settings,
        common: Common,
        identity: identity::Receiver,
    ) -> Result<Self, BadAllowance> {
        let allow = AllowList::parse(&settings.allowed_targets)?;
        let slots = settings.gateways.iter().flat_map(|gateway| {
            (0..settings.connections_per_gateway).map(|connection| (gateway.clone(), connection))
        });
        // The boot ID distinguishes reboots of the machine in the view; an unreadable one is left empty.
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id");
        let shared = Shared {
            allow,
            board: Arc::new(Board::new(slots)),
            dials: Semaphore::new(settings.max_pending_dials.min(Semaphore::MAX_PERMITS)),
            boot: boot.unwrap_or_default().trim().to_owned(),
            settings,
            common,
        };
        Ok(Self {
            shared: Arc::new(shared),
            identity,
        })
    }

    /// Returns the board that shows the state of the connections.
    #[must_use]
    pub fn board(&self) -> Arc<Board> {
        Arc::clone(&self.shared.board)
    }

    /// Keeps the connections up until the drain begins; then lets streams end within `Limits::drain`.
    pub async fn run(self, mut draining: watch::Receiver<bool>) {
        let Self { shared, identity } = self;
        let mut keepers = JoinSet::new();
        let slots = shared.board.view().connections;
        let threads = Threads::start(shared.common.limits.max_threads.min(slots.len()));
        for (slot, connection) in slots.into_iter().enumerate() {
            let keeper = Keeper {
                slot,
                gateway: connection.gateway,
                shared: Arc::clone(&shared),
                identity: identity.clone(),
                seat: threads.seat(),
            };
            let runtime = keeper.seat.runtime().clone();
            keepers.spawn_on(keeper.keep(draining.clone()), &runtime);
        }
        drop(threads);
        while keepers.join_next().await.is_some() {}
        // Without gateways no keeper runs, but `run` still lasts until the drain begins.
        drain::begun(&mut draining).await;
    }
}

/// A task that keeps one connection to a gateway up.
struct Keeper {
    slot: usize,
    gateway: String,
    shared: Arc<Shared>,
    identity: identity::Receiver,
    /// The session thread that runs this task and its sessions.
    seat: Seat,
}

impl Keeper {
    async fn keep(self, mut draining: watch::Receiver<bool>) {
        let mut backoff = Backoff::default();
        // A session whose gateway is about to stop keeps running next to its replacement.
        let mut sessions = JoinSet::new();
        loop {
            self.show(ConnectionState::Connecting, None, None);
            let begun = tokio::select! {
                begun = Box::pin(self.begin()) => begun,
                () = drain::begun(&mut draining) => break,
            };
            let mut is_wanted_at_once = false;
            match begun {
                Ok(running) => {
                    let since = Instant::now();
                    info!(gateway = self.gateway, "connected");
                    self.show(ConnectionState::Connected, None, None);
                    let traffic = Arc::clone(&running.traffic);
                    self.shared.board.carries(self.slot, traffic);
                    let (tell, mut news) = mpsc::unbounded_channel();
                    let session =
                        serve::run(Arc::clone(&self.shared), running, tell, draining.clone());
                    sessions.spawn(session);
                    let news = tokio::select! {
                        news = news.recv() => news,
                        () = drain::begun(&mut draining) => break,
                    };
                    let lived = since.elapsed();
                    backoff.lived(lived);
                    match news {
                        Some(News::Replace) => {
                            info!(gateway = self.gateway, "the gateway is about to stop");
                            // The bounds keep a gateway that asks for replacements again and again from
                            // getting ever more sessions.
                            is_wanted_at_once = lived >= SHORT && sessions.len() < MOST;
                        }
                        Some(News::Ended(error)) => self.failed(error),
                        None => self.failed("its task failed".to_owned()),
                    }
                }
                Err(error) => self.failed(error),
            }
            while sessions.try_join_next().is_some() {}
            if !is_wanted_at_once {
                let pause = backoff.pause(fastrand::f64());
                let next = Timestamp::now().checked_add(pause);
                self.show(ConnectionState::Backoff, next.ok(), None);
                tokio::select! {
                    () = sleep(pause) => {}
                    () = drain::begun(&mut draining) => break,
                }
            }
        }
        self.show(ConnectionState::Draining, None, None);
        while sessions.join_next().await.is_some() {}
    }

    /// Waits for a first certificate, dials, and begins a session.
    async fn begin(&self) -> Result<serve::Running, String> {
        let mut identity = self.identity.clone();
        while identity.current().is_none() {
            let error = "waiting for a certificate".to_owned();
            self.show(ConnectionState::Backoff, None, Some(error));
            identity.changed().await;
        }
        let mark = self.shared.common.mark;
        let carrier = dial::gateway(&self.gateway, mark, &self.identity).await;
        let carrier = carrier.map_err(|error| chain(&error))?;
        Box::pin(serve::begin(&self.shared, carrier)).await
    }

    fn failed(&self, error: String) {
        warn!(
            gateway = self.gateway,
            error, "no connection to the gateway"
        );
        self.show(ConnectionState::Backoff, None, Some(error));
    }

    fn show(&self, state: ConnectionState, next: Option<Timestamp>, error: Option<String>) {
        self.shared.board.show(self.slot, state, next, error);
    }
}
