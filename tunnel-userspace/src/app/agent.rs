//! `culvert agent`: serves an edge node through the tunnel.

use std::{collections::BTreeMap, error::Error, fs, future::Future, io};

use tokio::sync::watch;
use tracing::{info, warn};

use super::{
    stop::Stop,
    tunnel::{files, limits},
};
use crate::{
    admin::{self, AgentSetup, AgentViews},
    config::{self, Config},
    identity::{Role, Store},
    tasks::Tasks,
    tunnel::{
        self,
        agent::{self, Agent},
    },
};

/// How much longer than its streams an agent may take to stop.
const GRACE: std::time::Duration = std::time::Duration::from_secs(5);

/// An agent could not start, or stopped by itself.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The config has no agent.
    #[error("the config has no tunnel.agent with a tunnel.identity, so there is no agent to run")]
    Absent,
    /// The certificate can't be used.
    #[error("{0}")]
    Identity(String),
    /// Its settings can't be used.
    #[error("cannot use tunnel.agent")]
    Settings(#[source] tunnel::Error),
    /// Signals can't be waited for.
    #[error("cannot wait for signals")]
    Signals(#[source] io::Error),
    /// A task ended that should not.
    #[error("task {0} ended")]
    TaskEnded(String),
}

/// Runs until SIGTERM, SIGINT or SIGHUP; then lets streams go on for `tunnel.session.drain`.
///
/// # Errors
///
/// The config or the certificate can't be used.
pub async fn agent(config: Config) -> Result<(), AgentError> {
    let (Some(section), Some(files)) = (&config.tunnel.agent, files(&config)) else {
        return Err(AgentError::Absent);
    };
    let (store, identity) = Store::open(files, Role::Agent);
    if let Some(problem) = store.problem() {
        return Err(AgentError::Identity(problem));
    }
    let limits = limits(&config);
    let patience = limits.drain.saturating_add(GRACE);
    let settings = agent::Settings {
        gateways: section.gateways.clone(),
        allow: section.allow.clone(),
        connections: section.connections,
        dial_timeout: section.dial_timeout,
        dials: section.dials,
        threads: config.tunnel.session.threads,
        limits,
        // A config with an agent has no steering.
        mark: Some(config::Steering::default().mark),
    };
    let agent = Agent::new(settings, identity.clone()).map_err(AgentError::Settings)?;
    let views = AgentViews {
        setup: AgentSetup {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started: jiff::Timestamp::now().to_string(),
            allow: section.allow.clone(),
        },
        view: agent.view(),
        identity,
        listening: watch::Sender::new(BTreeMap::new()),
    };
    let (drain, draining) = watch::channel(false);
    let (end, ending) = watch::channel(false);
    let mut tasks = Tasks::default();
    // Without root the default folder can't be made. The port answers all the same.
    match socket(&config, &views, &ending) {
        Ok(socket) => tasks.start("socket", socket),
        Err(error) => warn!(
            error = error.as_ref(),
            "`culvert status` will not find this agent: give it a stateDir of its own"
        ),
    }
    tasks.start("admin", admin::serve_agent(section.admin, views, ending));
    tasks.start("identity", store.run(draining.clone()));
    let mut work = Tasks::default();
    work.start("agent", agent.run(draining));
    let mut stop = Stop::new().map_err(AgentError::Signals)?;
    info!(gateways = ?section.gateways, allow = ?section.allow, "agent started");
    tokio::select! {
        () = stop.wait() => {}
        name = tasks.ended() => return Err(AgentError::TaskEnded(name)),
        name = work.ended() => return Err(AgentError::TaskEnded(name)),
    }
    info!("stopping; streams may go on for a while");
    drain.send_replace(true);
    work.finish(patience).await;
    end.send_replace(true);
    tasks.finish(GRACE).await;
    Ok(())
}

/// The socket of the command line.
fn socket(
    config: &Config,
    views: &AgentViews,
    ending: &watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + Send + use<>, Box<dyn Error>> {
    fs::create_dir_all(&config.state_dir)?;
    let path = config.agent_socket();
    Ok(admin::serve_agent_socket(
        &path,
        views.clone(),
        ending.clone(),
    )?)
}
