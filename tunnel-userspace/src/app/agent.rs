//! `culvert agent`: connects an edge node to the gateways and serves their streams.

use std::{collections::BTreeMap, error::Error, fs, future::Future};

use tokio::sync::watch;
use tracing::{info, warn};

use super::{
    RoleError, certificate, descriptor_limit, failed, node_tunnel::common_settings,
    shutdown_signals::ShutdownSignals,
};
use crate::{
    admin::{self, AgentSetup, AgentViews},
    config::Config,
    identity::Role,
    tasks::Tasks,
    tunnel::agent::Agent,
};

/// The time limit for the agent's tasks to stop after its streams have drained.
const STOP_TIMEOUT: std::time::Duration = std::time::Duration::from_secs(5);

/// Runs the agent until SIGTERM, SIGINT or SIGHUP; then gives open streams up to
/// `tunnel.session.drainTimeout` to finish.
///
/// # Errors
///
/// Returns an error if the config lacks a required section, a startup step fails, or a task ends
/// unexpectedly.
pub async fn agent(config: Config) -> Result<(), RoleError> {
    let mut stop = ShutdownSignals::new().map_err(failed("cannot wait for signals"))?;
    serve(&config, async move { stop.wait().await }).await
}

/// Runs the agent until `stop` completes.
async fn serve(config: &Config, stop: impl Future<Output = ()>) -> Result<(), RoleError> {
    let mut tasks = Tasks::default();
    let identity = certificate::open(config, Role::Agent, &mut tasks);
    let (Some(section), Some(identity)) = (&config.tunnel.agent, identity) else {
        let why = "the config must have the sections tunnel.agent and tunnel.identity";
        return Err(failed("cannot start the agent")(why));
    };
    // The configured drain timeout has no upper bound, so the sum may overflow.
    let drain_limit = config
        .tunnel
        .session
        .drain_timeout
        .saturating_add(STOP_TIMEOUT);
    let descriptor_problem = descriptor_limit::raise_and_check(config);
    let agent = Agent::new(section.clone(), common_settings(config), identity.clone());
    let agent = agent.map_err(failed("cannot use tunnel.agent"))?;
    let views = AgentViews {
        setup: AgentSetup {
            version: env!("CARGO_PKG_VERSION").to_owned(),
            pid: std::process::id(),
            started: jiff::Timestamp::now().to_string(),
            allowed_targets: section.allowed_targets.clone(),
            descriptor_problem,
        },
        state: agent.state(),
        identity,
        unbound_ports: watch::Sender::new(BTreeMap::new()),
    };
    // Without root privileges, the default stateDir can't be created, but the admin port still works.
    match socket(config, &views, tasks.draining()) {
        Ok(socket) => tasks.start("socket", socket),
        Err(error) => warn!(
            error = error.as_ref(),
            "no admin socket for `culvert status`: configure a stateDir that the agent can write to"
        ),
    }
    let waiting = views.unbound_ports.clone();
    let admin = admin::serve_tcp(
        "agent",
        section.admin_address,
        views,
        waiting,
        tasks.draining(),
    );
    tasks.start("admin", admin);
    // The agent has its own set of tasks, so that it can drain while the admin endpoints still respond.
    let mut agent_tasks = Tasks::default();
    agent_tasks.start("agent", agent.run(agent_tasks.draining()));
    info!(gateways = ?section.gateways, allow = ?section.allowed_targets, "agent started");
    tokio::select! {
        () = stop => {}
        name = tasks.ended() => return Err(RoleError::TaskEnded { name }),
        name = agent_tasks.ended() => return Err(RoleError::TaskEnded { name }),
    }
    info!("stopping: waiting for open streams to finish");
    agent_tasks.finish(drain_limit).await;
    tasks.finish(STOP_TIMEOUT).await;
    Ok(())
}

/// Binds the admin socket, which the command line queries. The returned future serves it.
fn socket(
    config: &Config,
    views: &AgentViews,
    draining: watch::Receiver<bool>,
) -> Result<impl Future<Output = ()> + Send + use<>, Box<dyn Error>> {
    fs::create_dir_all(&config.state_dir)?;
    let (path, views) = (config.agent_socket(), views.clone());
    let waiting = views.unbound_ports.clone();
    Ok(admin::serve_unix(&path, views, false, waiting, draining)?)
}

#[cfg(test)]
mod tests {
    use std::{path::Path, time::Duration};

    use serde_json::Value;
    use tokio::time::{interval, timeout};

    use super::*;
    use crate::app;

    /// Polls the agent's status until it matches.
    async fn until(socket: &Path, matches: impl Fn(&Value) -> bool) -> Value {
        let mut every = interval(Duration::from_millis(20));
        loop {
            every.tick().await;
            let Ok(body) = admin::request(socket, "/status").await else {
                continue;
            };
            let status = serde_json::from_slice(&body).expect("JSON");
            if matches(&status) {
                return status;
            }
        }
    }

    #[tokio::test]
    async fn an_agent_without_a_certificate_waits_for_one() {
        let directory = tempfile::tempdir().expect("a directory");
        let path = |name: &str| directory.path().join(name);
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
        let port = free.local_addr().expect("an address").port();
        drop(free);
        let (own, state) = (path("own"), path("state"));
        let text = format!(
            "stateDir: {}\n\
             tunnel:\n\
             \x20 agent: {{ gateways: ['127.0.0.1:1'], adminAddress: '127.0.0.1:{port}' }}\n\
             \x20 identity: {{ files: {{ ca: {own}/ca.pem, cert: {own}/cert.pem, key: {own}/key.pem }} }}\n",
            state.display(),
            own = own.display(),
        );
        let config = Config::parse(&text).expect("good");
        let socket = config.agent_socket();
        let waits = |status: &Value| {
            let why = status["notReady"].as_str().unwrap_or_default();
            let last_error = &status["tunnel"]["connections"][0]["lastError"];
            why.starts_with("waiting for a certificate: ")
                && why.contains("ca.pem")
                && last_error == "waiting for a certificate"
        };
        let scenario = async {
            let status = until(&socket, waits).await;
            assert_eq!(status["ready"], false);

            app::ca_init(&path("ca"), 1).expect("a CA");
            app::ca_issue_agent(&path("ca"), "edge-1", Some(&own), 1).expect("issued");

            until(&socket, |status| status["identity"]["name"] == "edge-1").await;
            let is_dialling = |status: &Value| {
                let error = &status["tunnel"]["connections"][0]["lastError"];
                error != "waiting for a certificate"
                    && status["notReady"] == "no gateway is connected"
            };
            until(&socket, is_dialling).await
        };
        let scenario = timeout(Duration::from_secs(30), scenario);

        tokio::select! {
            ended = serve(&config, std::future::pending()) => panic!("the agent ended: {ended:?}"),
            done = scenario => drop(done.expect("not in time")),
        }
    }
}
