//! The two roles of a tunnel process: a gateway with an ingress, and an agent.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
    sync::Arc,
    time::Duration,
};

use anyhow::{Context as _, Result};
use jiff::SignedDuration;
use nix::sys::resource::{Resource, setrlimit};
use serde::{Serialize, de::DeserializeOwned};
use tokio::{
    io::AsyncWriteExt as _,
    net::UnixListener,
    signal::unix::{SignalKind, signal},
    sync::watch,
    task::JoinSet,
};
use tunnel_common::{addr::Address, steering::Prefix};
use tunnel_userspace::{
    identity::{CertificateStore, DenyListStore, Role, clock},
    model,
    source::{
        Store,
        file::{self, FileSettings},
    },
    telemetry,
    tunnel::{
        AccessInputs, CommonSettings, ConnectionState, ConnectionView, ForwardedClients,
        SessionLimits, Sessions,
        agent::Agent,
        gateway::Gateway,
        ingress::{self, Ingress},
    },
};

use super::{
    AgentSettings, AgentState, AgentsSettings, AgentsState, CloudSettings, CloudState, Target,
    slow_link,
};

/// The log filter of a tunnel process.
const LOG_FILTER: &str = "debug,h2=warn,rustls=warn";
/// The log filter of a process with many agents.
const AGENTS_LOG_FILTER: &str = "error";

fn read_settings_and_start<T: DeserializeOwned>(
    settings: &Path,
    log_filter: &str,
) -> Result<(T, tokio::runtime::Runtime)> {
    let settings = serde_json::from_slice(&fs::read(settings)?)?;
    telemetry::start(log_filter, false)?;
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build()?;
    Ok((settings, runtime))
}

/// Sets this process's limit on open files, if one is given.
fn limit_open_files(limit: Option<u64>) -> Result<()> {
    let set = |limit| setrlimit(Resource::RLIMIT_NOFILE, limit, limit);
    Ok(limit.map_or(Ok(()), set)?)
}

/// Returns the settings that gateways and agents have in common. Sockets get no mark, since setting one
/// requires privileges.
fn common_settings(limits: SessionLimits) -> CommonSettings {
    CommonSettings::new(limits, None)
}

/// Runs a gateway with an ingress until SIGTERM arrives.
pub fn run_cloud(settings: &Path, record: &Path) -> Result<()> {
    let (settings, runtime) = read_settings_and_start::<CloudSettings>(settings, LOG_FILTER)?;
    limit_open_files(settings.open_files)?;
    runtime.block_on(Box::pin(serve_cloud(settings, record)))
}

async fn serve_cloud(settings: CloudSettings, record: &Path) -> Result<()> {
    let (store, identity) = CertificateStore::open(settings.certificate, Role::Gateway);
    let deny_list = settings.gateway.deny_file.clone().map(DenyListStore::open);
    let (deny_store, deny_list) = deny_list.unzip();
    let mut objects = Store::default();
    let nodes = match &settings.manifests {
        Some(path) => Some(file::start(FileSettings::new(path), objects.overlay()).await?),
        None => None,
    };
    let access = AccessInputs {
        deny_list: deny_list.unwrap_or_default(),
        nodes: nodes.is_some().then(|| objects.nodes()),
    };
    let denied = access.deny_list.clone();
    let (sessions, common) = (Sessions::new(), common_settings(settings.session));
    let gateway = Gateway::bind(
        settings.gateway,
        common.clone(),
        identity.clone(),
        Arc::clone(&sessions),
        access,
    )?;
    let (address, length) = settings.prefix;
    let prefix = Prefix::new(Address::from_ip(address), length)
        .context("the steering prefix is not a valid range")?;
    let (_targets, targets) = watch::channel(Arc::new(to_model(&settings.targets)));
    // The index of the interface `lo`.
    let (_inside, inside) = watch::channel(Arc::new(BTreeSet::from([1])));
    let ingress = Ingress::bind(
        ingress::IngressSettings {
            prefixes: vec![prefix],
            listen: settings.ingress,
            allow: None,
            pods: watch::channel(Arc::default()).1,
            forwarded: ForwardedClients::none(),
        },
        common,
        targets,
        inside,
        Arc::clone(&sessions),
    )?;
    let (at, ingress_address) = (gateway.local_addr(), ingress.local_addr());
    let current_state = || {
        let counts = sessions.counts().into_iter();
        let counts = counts.map(|(reason, count)| (reason.label().to_owned(), count));
        Ok(CloudState {
            gateway: at,
            ingress: ingress_address,
            counts: counts.collect::<BTreeMap<_, _>>(),
            nodes: serde_json::to_value(sessions.nodes())?,
            identity: serde_json::to_value(identity.state())?,
            deny_list: serde_json::to_value(denied.state())?,
        })
    };
    let work = async move |draining: watch::Receiver<bool>| {
        let deny_store = deny_store.map(|store| store.run(draining.clone()));
        let nodes = nodes.map(|nodes| nodes.run(draining.clone()));
        tokio::join!(
            run_if_some(deny_store),
            run_if_some(nodes),
            store.run(draining.clone()),
            Box::pin(gateway.run(draining.clone())),
            Box::pin(ingress.run(draining))
        );
    };
    Box::pin(run_and_publish(record, current_state, work)).await
}

async fn run_if_some(task: Option<impl Future<Output = ()>>) {
    if let Some(task) = task {
        task.await;
    }
}

fn to_model(targets: &[Target]) -> model::SteeringTargets {
    let one = |target: &Target| {
        let Target { index, node, at } = target;
        let target = model::SteeringTarget {
            node: node.as_str().into(),
            address: at.ip(),
            port: at.port(),
            loopback: false,
            is_disputed: false,
        };
        (*index, target)
    };
    targets.iter().map(one).collect()
}

/// Runs an agent until SIGTERM arrives.
pub fn run_agent(settings: &Path, record: &Path) -> Result<()> {
    let (settings, runtime) = read_settings_and_start::<AgentSettings>(settings, LOG_FILTER)?;
    limit_open_files(settings.open_files)?;
    runtime.block_on(Box::pin(serve_agent(settings, record)))
}

async fn serve_agent(settings: AgentSettings, record: &Path) -> Result<()> {
    clock::shift(SignedDuration::from_secs(settings.clock.ahead));
    settings
        .clock
        .directory
        .as_deref()
        .inspect(|directory| clock::open(directory));
    let (store, identity) = CertificateStore::open(settings.certificate, Role::Agent);
    let agent = Agent::new(
        settings.agent,
        common_settings(settings.session),
        identity.clone(),
    )?;
    let state = agent.state();
    let current_state = || {
        Ok(AgentState {
            view: serde_json::to_value(state.view())?,
            identity: serde_json::to_value(identity.state())?,
        })
    };
    run_and_publish(record, current_state, async move |draining| {
        tokio::join!(store.run(draining.clone()), Box::pin(agent.run(draining)));
    })
    .await
}

/// Runs many agents, whose connections to the gateway are slow, until SIGTERM arrives.
pub fn run_agents(settings: &Path, record: &Path) -> Result<()> {
    let (settings, runtime) =
        read_settings_and_start::<AgentsSettings>(settings, AGENTS_LOG_FILTER)?;
    runtime.block_on(Box::pin(serve_agents(settings, record)))
}

async fn serve_agents(settings: AgentsSettings, record: &Path) -> Result<()> {
    let delay = Duration::from_millis(settings.delay_millis);
    let (gateway, links) = slow_link::listen(settings.gateway, delay).await?;
    let (mut agents, mut stores) = (Vec::new(), Vec::new());
    let watch_files = settings.watch_files;
    for mut settings in settings.agents {
        settings.agent.gateways = vec![gateway.to_string()];
        let (store, identity) = CertificateStore::open(settings.certificate, Role::Agent);
        stores.extend(watch_files.then_some(store));
        let common = common_settings(settings.session);
        agents.push(Agent::new(settings.agent, common, identity)?);
    }
    let states: Vec<_> = agents.iter().map(Agent::state).collect();
    let is_connected = |state: &ConnectionView| state.state == ConnectionState::Connected;
    let current_state = || {
        let connected = states
            .iter()
            .filter(|state| state.view().connections.iter().any(is_connected));
        Ok(AgentsState {
            connected: connected.count(),
        })
    };
    run_and_publish(record, current_state, async move |draining| {
        let mut running = JoinSet::new();
        for agent in agents {
            running.spawn(agent.run(draining.clone()));
        }
        for store in stores {
            running.spawn(store.run(draining.clone()));
        }
        tokio::select! {
            () = links => {}
            () = async { while running.join_next().await.is_some() {} } => {}
        }
    })
    .await
}

/// Runs `work` until SIGTERM arrives and the subsequent drain has finished. Meanwhile, sends the current
/// state to each client that connects to the Unix socket `record`.
async fn run_and_publish<T: Serialize>(
    record: &Path,
    current_state: impl Fn() -> Result<T>,
    work: impl AsyncFnOnce(watch::Receiver<bool>),
) -> Result<()> {
    let mut term = signal(SignalKind::terminate())?;
    let record = UnixListener::bind(record)
        .with_context(|| format!("cannot listen on {}", record.display()))?;
    let (drain, draining) = watch::channel(false);
    let mut work = std::pin::pin!(work(draining));
    loop {
        tokio::select! {
            () = &mut work => return Ok(()),
            _ = term.recv() => drop(drain.send_replace(true)),
            accepted = record.accept() => {
                let (mut stream, _) = accepted?;
                // The client may already have disconnected.
                drop(stream.write_all(&serde_json::to_vec(&current_state()?)?).await);
            }
        }
    }
}
