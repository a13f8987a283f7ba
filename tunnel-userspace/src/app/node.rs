//! `culvert node`: the service proxy of a node.

use std::{
    collections::BTreeMap,
    io,
    path::PathBuf,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    signal::unix::{SignalKind, signal},
    sync::{mpsc, watch},
};
use tracing::{info, warn};
use tunnel_common::LAYOUT_VERSION;

use super::{
    canary::{self, CanaryError},
    state::State,
};
use crate::{
    admin::{self, Endpoint, Setup, Views},
    bpf::{self, Counters, DataPath, Features, KernelMaps, Pins, RcuGrace},
    config::{self, Config},
    model::{Algorithm, ServiceState, Update},
    reconcile::{self, Loop, Query, Reconciler, Settings, Sizes},
    source::file::{self, FileSource},
    tasks::Tasks,
};

/// How long tasks may take to stop.
const DRAIN: Duration = Duration::from_secs(5);
/// How many updates the source may be ahead of the maps; it gathers what comes beyond.
const UPDATES: usize = 1;
/// How many questions may wait for the owner of the maps.
const QUERIES: usize = 16;

/// A node could not start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum NodeError {
    /// A step of the start failed.
    #[error("{step}")]
    Start {
        /// What was tried.
        step: &'static str,
        /// Why it failed.
        #[source]
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A task ended that should not.
    #[error("task {name} ended")]
    TaskEnded {
        /// Its name.
        name: String,
    },
}

fn failed<E>(step: &'static str) -> impl FnOnce(E) -> NodeError
where
    E: Into<Box<dyn std::error::Error + Send + Sync>>,
{
    move |source| NodeError::Start {
        step,
        source: source.into(),
    }
}

/// Runs until SIGTERM or SIGINT. The data path stays when it ends.
///
/// # Errors
///
/// A step of the start failed; what an earlier daemon programmed goes on as it was.
pub async fn node(config: Config) -> Result<(), NodeError> {
    let mut parts = Parts::load(&config)?;
    let (update_sender, mut updates) = mpsc::channel(UPDATES);
    let settings = file::Settings {
        path: config.source.file.path.clone(),
        max_file_bytes: config.source.file.max_file_bytes,
    };
    let source = file::start(settings, update_sender)
        .await
        .map_err(failed("cannot read the manifests"))?;
    let (drain, draining) = watch::channel(false);
    let (ready, is_ready) = watch::channel(Some("waiting for the sources".to_owned()));
    let (queries, questions) = mpsc::channel(QUERIES);
    let mut tasks = Tasks::default();
    let views = parts.views(&config, &source, is_ready, queries);
    serve(&config, &Arc::new(views), &mut tasks, &draining)?;
    tasks.start("source", source.run(draining.clone()));
    let mut stop = Stop::new().map_err(failed("cannot wait for signals"))?;
    let first = tokio::select! {
        update = updates.recv() => match update {
            Some(update) => Some(update),
            None => return Err(NodeError::TaskEnded { name: tasks.ended().await }),
        },
        () = stop.wait() => None,
        name = tasks.ended() => return Err(NodeError::TaskEnded { name }),
    };
    if let Some(first) = first {
        info!(
            services = first.services.len(),
            "every source has told its first whole list"
        );
        parts.program(first)?;
        let owner = parts.owner.run(updates, questions, draining.clone());
        tasks.start("reconcile", owner);
        ready.send_replace(None);
        info!("ready");
        tokio::select! {
            () = stop.wait() => {}
            name = tasks.ended() => return Err(NodeError::TaskEnded { name }),
        }
    }
    info!("stopping; the data path stays as it is");
    ready.send_replace(Some("stopping".to_owned()));
    drain.send_replace(true);
    tasks.finish(DRAIN).await;
    Ok(())
}

/// The parts of the data path, in the order in which they are made.
struct Parts {
    cgroup: PathBuf,
    features: Features,
    data_path: DataPath,
    counters: Option<Counters>,
    owner: Loop<KernelMaps, RcuGrace>,
    stats: watch::Receiver<reconcile::Stats>,
    /// Held until the end, against another daemon.
    pins: Pins,
    _state: State,
}

impl Parts {
    /// Everything up to, and without, the first write and the first attached program.
    fn load(config: &Config) -> Result<Self, NodeError> {
        let cgroup = match &config.bpf.cgroup.0 {
            Some(path) => path.clone(),
            None => bpf::find_root().map_err(failed("cannot find the cgroup"))?,
        };
        bpf::check_cgroup(&cgroup).map_err(failed("cannot use bpf.cgroup"))?;
        bpf::raise_memory_limit();
        let pins = Pins::hold(&config.bpf.bpffs).map_err(failed("cannot use bpf.bpffs"))?;
        let state = State::hold(&config.state_dir).map_err(failed("cannot use stateDir"))?;
        let features = bpf::probe().map_err(failed("cannot probe the kernel"))?;
        info!(?features, "probed the kernel");
        let wanted = sizes(config.bpf.maps);
        let mut data_path =
            DataPath::load(&pins, wanted, features).map_err(failed("cannot load the data path"))?;
        let found = data_path.sizes();
        if found != wanted {
            warn!(
                ?wanted,
                ?found,
                "the maps that are there keep the sizes they were made with"
            );
        }
        let (maps, counters) = data_path
            .take_maps()
            .map_err(failed("cannot use the maps"))?;
        let grace = || RcuGrace::new().map_err(failed("cannot make a map to wait for RCU"));
        let settings = Settings {
            node_name: config.node_name.clone(),
            algorithm: match config.service.algorithm {
                config::Algorithm::Random => Algorithm::Random,
                config::Algorithm::RoundRobin => Algorithm::RoundRobin,
            },
        };
        let mut first = grace()?;
        let reconciler = Reconciler::adopt(maps, found, &mut first, settings)
            .map_err(failed("cannot take over the maps"))?;
        let (owner, stats) =
            reconcile::start(reconciler, (grace()?, first), config.service.full_sync)
                .map_err(failed("cannot start the owner of the maps"))?;
        Ok(Self {
            cgroup,
            features,
            data_path,
            counters: Some(counters),
            owner,
            stats,
            pins,
            _state: state,
        })
    }

    fn views(
        &mut self,
        config: &Config,
        source: &FileSource,
        ready: watch::Receiver<Option<String>>,
        queries: mpsc::Sender<Query>,
    ) -> Views {
        let counters = self.counters.take();
        let sizes = self.data_path.sizes();
        let refusing = if self.features.set_retval {
            "bpf_set_retval"
        } else {
            "rewrite"
        };
        let setup = Setup {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            node: config.node_name.clone(),
            started: jiff::Timestamp::now().to_string(),
            cgroup: self.cgroup.display().to_string(),
            pins: self.pins.root().display().to_string(),
            layout: LAYOUT_VERSION,
            refusing: refusing.to_owned(),
            maps: admin::Maps {
                fronts: sizes.fronts,
                slots: sizes.slots,
                backends: sizes.backends,
            },
        };
        let read = move || match &counters {
            Some(counters) => counters.read().map_err(|error| error.to_string()),
            None => Ok(Vec::new()),
        };
        Views {
            setup,
            ready,
            stats: self.stats.clone(),
            queries,
            source: source.report(),
            counters: Box::new(read),
            listening: watch::Sender::new(BTreeMap::new()),
        }
    }

    /// Writes the maps, attaches the programs, and sends the canary.
    fn program(&mut self, first: Update) -> Result<(), NodeError> {
        let (since, whole) = (first.since, first.whole);
        self.owner.apply(first);
        let attached = self
            .data_path
            .attach(&self.cgroup)
            .map_err(failed("cannot attach the programs"))?;
        info!(new = attached.new_links(), replaced = attached.replaced, cgroup = %self.cgroup.display(), "programs attached");
        let canary = |state: Option<ServiceState>| Update {
            services: vec![(canary::name(), state)],
            nodes: Vec::new(),
            synced: true,
            whole,
            since,
        };
        self.owner.apply(canary(Some(canary::service())));
        let arrived = if self.owner.is_programmed(&canary::name()) {
            canary::connect(self.cgroup.clone())
        } else {
            warn!("no canary was sent: the maps have no room for it");
            Ok(())
        };
        self.owner.apply(canary(None));
        // Links that are not pinned end here if the canary did not arrive.
        arrived.map_err(|error: CanaryError| failed("the canary did not arrive")(error))?;
        attached.pin().map_err(failed("cannot pin the programs"))
    }
}

const fn sizes(maps: config::Maps) -> Sizes {
    Sizes {
        fronts: maps.fronts,
        slots: maps.slots,
        backends: maps.backends,
    }
}

fn serve(
    config: &Config,
    views: &Arc<Views>,
    tasks: &mut Tasks,
    draining: &watch::Receiver<bool>,
) -> Result<(), NodeError> {
    let answers = Arc::new(Mutex::new(BTreeMap::new()));
    let socket = admin::serve_socket(
        &config.admin_socket(),
        Arc::clone(views),
        Arc::clone(&answers),
        draining.clone(),
    )
    .map_err(failed("cannot serve the admin socket"))?;
    tasks.start("admin socket", socket);
    let ports = [
        ("admin", Endpoint::Admin, config.admin.address),
        ("healthz", Endpoint::Healthz, config.healthz.address),
    ];
    for (name, endpoint, address) in ports {
        let (views, answers) = (Arc::clone(views), Arc::clone(&answers));
        tasks.start(
            name,
            admin::serve(endpoint, address, views, answers, draining.clone()),
        );
    }
    Ok(())
}

/// SIGTERM or SIGINT.
struct Stop {
    term: tokio::signal::unix::Signal,
    int: tokio::signal::unix::Signal,
}

impl Stop {
    fn new() -> io::Result<Self> {
        Ok(Self {
            term: signal(SignalKind::terminate())?,
            int: signal(SignalKind::interrupt())?,
        })
    }

    async fn wait(&mut self) {
        tokio::select! {
            _ = self.term.recv() => {}
            _ = self.int.recv() => {}
        }
    }
}
