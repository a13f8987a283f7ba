//! Runs the controller: keeps the CA, and handles requests one after another.

use std::{collections::BTreeMap, time::Duration};

use jiff::Timestamp;
use kube::Client;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tracing::warn;

use super::{
    ca_keeper,
    cluster::Cluster,
    kube_cluster::KubeCluster,
    queue::{Queue, RETRY_DELAY},
    received::Requests,
    requests::{self, Outcome, RequestSettings},
    watch as request_watch,
};
use crate::{
    drain,
    error_chain::chain,
    identity::{DenyListReceiver, Role},
};

/// The interval between two looks at the CA.
const CA_INTERVAL: Duration = Duration::from_secs(30);

/// The settings for the controller.
#[derive(Clone, Debug)]
pub struct Settings {
    /// The settings for requests and the CA.
    pub requests: RequestSettings,
    /// The namespace of the Secret and the ConfigMap.
    pub namespace: String,
    /// The name of this controller, for Events.
    pub instance: String,
    /// The maximum number of requests that are handled in a second.
    pub requests_per_second: u32,
}

/// The state of the controller, as shown in the status and the metrics.
#[derive(Clone, Debug, Default)]
pub struct ControllerState {
    /// The number of certificates that this controller has issued, by role.
    pub issued: BTreeMap<&'static str, u64>,
    /// The number of requests that this controller has denied, by role and reason.
    pub denied: BTreeMap<(&'static str, &'static str), u64>,
    /// The number of requests whose handling has failed, and that are handled again.
    pub failed: u64,
    /// The number of requests that wait.
    pub waiting: usize,
    /// The time when the CA that signs expires.
    pub ca_expires: Option<Timestamp>,
    /// The reason why the CA can't be used.
    pub ca_problem: Option<String>,
    /// True if no request is handled, because the deny list has never been valid.
    pub deny_list_missing: bool,
    /// The reason why the requests for a signer can't be followed, by signer.
    pub unfollowed: BTreeMap<&'static str, String>,
}

impl ControllerState {
    /// Creates the state before the first requests to the API server.
    #[must_use]
    pub fn new() -> Self {
        let waiting = |role: Role| (role.signer(), "waiting for the API server".to_owned());
        Self {
            unfollowed: [Role::Agent, Role::Gateway].map(waiting).into(),
            ..Self::default()
        }
    }
}

/// Runs the controller until the drain begins.
pub async fn run(
    client: Client,
    settings: Settings,
    deny_list: DenyListReceiver,
    state: watch::Sender<ControllerState>,
    draining: watch::Receiver<bool>,
) {
    let (namespace, instance) = (settings.namespace.clone(), settings.instance.clone());
    let cluster = KubeCluster::new(client.clone(), namespace, instance);
    let queue = Queue::default();
    let follow = |role: Role| {
        let api = Requests::new(client.clone());
        let handle = |request, is_deleted| queue.push(request, is_deleted);
        request_watch::follow(api, role.signer(), handle, &state, draining.clone())
    };
    let (agents, gateways) = (follow(Role::Agent), follow(Role::Gateway));
    let handling = handle_all(
        &cluster,
        &settings,
        deny_list,
        &queue,
        &state,
        draining.clone(),
    );
    let keeping = keep_ca(&cluster, &settings, &state, draining.clone());
    tokio::join!(agents, gateways, handling, keeping);
}

/// Looks at the CA now and then, so that it changes without a request.
async fn keep_ca<C: Cluster>(
    cluster: &C,
    settings: &Settings,
    state: &watch::Sender<ControllerState>,
    mut draining: watch::Receiver<bool>,
) {
    let mut ticks = interval(CA_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            _ = ticks.tick() => {}
        }
        match ca_keeper::keep(cluster, &settings.requests.ca).await {
            Ok(authority) => state.send_modify(|state| {
                state.ca_expires = Some(authority.until);
                state.ca_problem = None;
            }),
            Err(error) => {
                let problem = chain(&error);
                if state.borrow().ca_problem.as_ref() != Some(&problem) {
                    warn!(problem, "the CA can't be used");
                }
                state.send_modify(|state| state.ca_problem = Some(problem));
            }
        }
    }
}

async fn handle_all<C: Cluster>(
    cluster: &C,
    settings: &Settings,
    deny_list: DenyListReceiver,
    queue: &Queue,
    state: &watch::Sender<ControllerState>,
    mut draining: watch::Receiver<bool>,
) {
    let pace = Duration::from_secs(1) / settings.requests_per_second.max(1);
    let mut next = Instant::now();
    loop {
        let Some(list) = deny_list.current() else {
            state.send_modify(|state| state.deny_list_missing = true);
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                () = sleep(RETRY_DELAY) => {}
            }
            continue;
        };
        let (request, waiting) = queue.pop();
        state.send_if_modified(|state| {
            let is_new = state.waiting != waiting || state.deny_list_missing;
            (state.waiting, state.deny_list_missing) = (waiting, false);
            is_new
        });
        let Some(request) = request else {
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                () = queue.changed.notified() => {}
                () = sleep(RETRY_DELAY) => {}
            }
            continue;
        };
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            () = tokio::time::sleep_until(next) => {}
        }
        next = Instant::now() + pace;
        let handled = requests::handle(cluster, &settings.requests, &list, request.clone()).await;
        match handled {
            Ok(outcome) => state.send_modify(|state| count(state, outcome)),
            Err(error) => {
                let name = request.metadata.name.as_deref().unwrap_or_default();
                warn!(
                    request = name,
                    problem = chain(&error),
                    "a request is handled again later"
                );
                state.send_modify(|state| state.failed += 1);
                queue.put_back(request);
            }
        }
    }
}

fn count(state: &mut ControllerState, outcome: Outcome) {
    match outcome {
        Outcome::Issued(role) => *state.issued.entry(role.label()).or_default() += 1,
        Outcome::Denied(role, denial) => {
            *state
                .denied
                .entry((role.label(), denial.label()))
                .or_default() += 1;
        }
        Outcome::Nothing => {}
    }
}
