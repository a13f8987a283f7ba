//! Sends Kubernetes Events to the API server: one for each problem that an operator must fix, and one each
//! time the daemon starts.
//!
//! Every node sends its own Events, but the cluster keeps only one per problem: the name of an Event contains
//! a hash of its content, so the API server rejects a duplicate because its name already exists.
//!
//! - `event`: builds Events
//! - `queue`: decides which Events to send, and when (no I/O)

mod event;
mod queue;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::api::events::v1::Event;
use kube::{Api, Client, api::PostParams, core::Status};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::{debug, info, warn};
use tunnel_common::reason::Reason;

pub(crate) use self::event::{hash, truncate};
use self::queue::EventQueue;
use crate::{drain, duration, error_chain::chain, model::ObjectWarning};

/// The interval between checks for new warnings and due Events.
const CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// The delay before the next attempt after the API server has failed to accept an Event.
const RETRY_DELAY: Duration = Duration::from_secs(60);

/// The settings that enable Events and limit their rate.
#[derive(Clone, Copy, Debug, Deserialize, Eq, JsonSchema, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct EventSettings {
    /// Enables Events.
    pub enabled: bool,
    /// The number of Events that a node may send in one burst, from 1 to 1000.
    pub burst: u32,
    /// The interval between Events after a burst.
    #[serde(with = "duration")]
    #[schemars(with = "String")]
    pub interval: Duration,
}

impl Default for EventSettings {
    fn default() -> Self {
        Self {
            enabled: true,
            burst: 10,
            interval: Duration::from_secs(30),
        }
    }
}

/// The published state that Events are created from.
#[derive(Debug)]
pub struct EventInputs {
    /// The receivers for the warnings from each part of the daemon.
    pub warnings: Vec<watch::Receiver<Arc<[ObjectWarning]>>>,
    /// The errors for listeners that could not be bound, keyed by the listener's name.
    pub unbound_ports: watch::Receiver<BTreeMap<String, String>>,
}

/// Sends a node's Events to the API server until draining begins.
pub async fn run(
    node: String,
    settings: EventSettings,
    client: Client,
    mut inputs: EventInputs,
    mut draining: watch::Receiver<bool>,
) {
    let mut queue = EventQueue::new(settings.burst, settings.interval, Instant::now());
    let mut checks = interval(CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_accepted = true;
    // The Event for the daemon's start bypasses the queue, since it is created only once and can be sent
    // immediately.
    let mut start = Some((
        event::for_start(&node, jiff::Timestamp::now()),
        Instant::now(),
    ));
    // Warnings that were published before this task started must count as new, too.
    inputs.unbound_ports.mark_changed();
    inputs
        .warnings
        .iter_mut()
        .for_each(watch::Receiver::mark_changed);
    loop {
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            _ = checks.tick() => {}
        }
        if let Some((event, due)) = start.take() {
            let is_due = due <= Instant::now();
            let is_done = is_due && create(&client, &event).await.is_ok();
            let next = if is_due {
                Instant::now() + RETRY_DELAY
            } else {
                due
            };
            start = (!is_done).then_some((event, next));
        }
        if let Some(warnings) = inputs.take_changed_warnings(&node) {
            queue.replace(warnings, Instant::now());
        }
        while let Some(warning) = queue.next_due(Instant::now()) {
            let event = event::for_warning(&warning, &node, jiff::Timestamp::now());
            let result = tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                result = create(&client, &event) => result,
            };
            match result {
                Ok(()) => {
                    if !is_accepted {
                        info!("the API server accepts Events again");
                    }
                    is_accepted = true;
                    queue.sent(&warning, Instant::now());
                }
                Err(error) => {
                    if is_accepted {
                        warn!(error = chain(&error), "cannot send Events");
                    }
                    is_accepted = false;
                    queue.failed(&warning, RETRY_DELAY, Instant::now());
                }
            }
        }
    }
}

impl EventInputs {
    /// Returns all warnings if any of them has changed since the last call; otherwise `None`.
    fn take_changed_warnings(&mut self, node: &str) -> Option<Vec<ObjectWarning>> {
        // An error means that the task that publishes these warnings has ended, so they no longer change.
        let mut receivers = self.warnings.iter();
        let is_new = receivers.any(|receiver| receiver.has_changed().unwrap_or(false))
            || self.unbound_ports.has_changed().unwrap_or(false);
        if !is_new {
            return None;
        }
        let mut all = Vec::new();
        for receiver in &mut self.warnings {
            all.extend_from_slice(&receiver.borrow_and_update());
        }
        for (port, error) in &*self.unbound_ports.borrow_and_update() {
            let note = format!("{port}: {error}");
            all.push(ObjectWarning::for_node(node, Reason::PortInUse, note));
        }
        Some(all)
    }
}

/// Creates an Event on the API server. Also returns `Ok` if the Event already exists or can never be created,
/// so that the caller does not send it again.
async fn create(client: &Client, event: &Event) -> Result<(), kube::Error> {
    let namespace = event.metadata.namespace.clone().unwrap_or_default();
    let api = Api::<Event>::namespaced(client.clone(), &namespace);
    let Err(error) = api.create(&PostParams::default(), event).await else {
        return Ok(());
    };
    if let kube::Error::Api(status) = &error
        && is_final(status)
    {
        let event = event.metadata.name.as_deref().unwrap_or_default();
        debug!(event, status = %status.message, "the API server refused an Event");
        return Ok(());
    }
    Err(error)
}

/// Returns true if the API server would also reject any further attempt.
fn is_final(status: &Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    status.is_already_exists()
        || matches!(status.code, 400 | 404 | 413 | 422)
        // The namespace is being deleted, along with its Services.
        || causes.any(|cause| cause.reason == "NamespaceTerminating")
}

#[cfg(test)]
mod tests;
