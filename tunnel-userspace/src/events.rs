//! Kubernetes Events for problems that an operator must act on, on the Service or Node concerned; and
//! one for each start of the daemon, on its Node.
//!
//! Every node sends its Events, yet the cluster has one Event per problem: the name is a hash of the
//! content, so that the API server refuses the second one as already existing.
//!
//! - `event`: builds the Events
//! - `queue`: the next due Event and its time (no I/O)

mod event;
mod queue;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use k8s_openapi::api::events::v1::Event;
use kube::{Api, Client, api::PostParams, core::Status};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::{debug, info, warn};
use tunnel_common::reason::Reason;

use self::queue::Queue;
use crate::{drain, duration, failure::chain, model::Concern};

/// The interval of checks for new concerns and due Events.
const LOOK: Duration = Duration::from_secs(1);

/// The pause after the API server failed to accept an Event.
const PAUSE: Duration = Duration::from_secs(60);

/// The switch and the rate limit of Events.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// True if Events are sent.
    pub enabled: bool,
    /// The number of Events that this node may send at once, from 1 to 1000.
    pub burst: u32,
    /// The interval until a further Event may be sent after a burst.
    #[serde(with = "duration")]
    pub interval: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: true,
            burst: 10,
            interval: Duration::from_secs(30),
        }
    }
}

/// The sources of concerns.
#[derive(Debug)]
pub struct Views {
    /// The concerns of the daemon's parts.
    pub concerns: Vec<watch::Receiver<Arc<[Concern]>>>,
    /// Ports that could not be bound yet, with the error.
    pub listening: watch::Receiver<BTreeMap<String, String>>,
}

/// Sends the Events of a node to the API server, until the drain begins.
pub async fn run(
    node: String,
    settings: Settings,
    client: Client,
    mut views: Views,
    mut draining: watch::Receiver<bool>,
) {
    let mut queue = Queue::new(settings.burst, settings.interval, Instant::now());
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_told = true;
    // The Event of the start bypasses the queue: it happens once, and needs no time to settle.
    let mut start = Some((
        event::of_start(&node, jiff::Timestamp::now()),
        Instant::now(),
    ));
    // Concerns from before this task count as new.
    views.listening.mark_changed();
    views
        .concerns
        .iter_mut()
        .for_each(watch::Receiver::mark_changed);
    loop {
        tokio::select! {
            biased;
            () = drain::begun(&mut draining) => return,
            _ = looks.tick() => {}
        }
        if let Some((event, due)) = start.take() {
            let is_due = due <= Instant::now();
            let is_settled = is_due && make(&client, &event).await.is_ok();
            let next = if is_due { Instant::now() + PAUSE } else { due };
            start = (!is_settled).then_some((event, next));
        }
        if let Some(concerns) = views.news(&node) {
            queue.take(concerns, Instant::now());
        }
        while let Some(concern) = queue.due(Instant::now()) {
            let event = event::of(&concern, &node, jiff::Timestamp::now());
            let told = tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                told = make(&client, &event) => told,
            };
            match told {
                Ok(()) => {
                    if !is_told {
                        info!("Events are told again");
                    }
                    is_told = true;
                    queue.told(&concern, Instant::now());
                }
                Err(error) => {
                    if is_told {
                        warn!(error = chain(&error), "cannot tell Events");
                    }
                    is_told = false;
                    queue.failed(&concern, PAUSE, Instant::now());
                }
            }
        }
    }
}

impl Views {
    /// Returns all concerns, if any has changed.
    fn news(&mut self, node: &str) -> Option<Vec<Concern>> {
        // A part that has ended publishes no change.
        let mut concerned = self.concerns.iter();
        let is_new = concerned.any(|view| view.has_changed().unwrap_or(false))
            || self.listening.has_changed().unwrap_or(false);
        if !is_new {
            return None;
        }
        let mut all = Vec::new();
        for view in &mut self.concerns {
            all.extend_from_slice(&view.borrow_and_update());
        }
        for (port, why) in &*self.listening.borrow_and_update() {
            let note = format!("{port}: {why}");
            all.push(Concern::of_node(node, Reason::PortInUse, note));
        }
        Some(all)
    }
}

/// Creates an Event. One that already exists, or that can never be created, counts as sent.
async fn make(client: &Client, event: &Event) -> Result<(), kube::Error> {
    let namespace = event.metadata.namespace.clone().unwrap_or_default();
    let api = Api::<Event>::namespaced(client.clone(), &namespace);
    let Err(error) = api.create(&PostParams::default(), event).await else {
        return Ok(());
    };
    if let kube::Error::Api(status) = &error
        && is_settled(status)
    {
        let event = event.metadata.name.as_deref().unwrap_or_default();
        debug!(event, status = %status.message, "Event not made");
        return Ok(());
    }
    Err(error)
}

/// Returns true if the API server would give the same response to every further attempt.
fn is_settled(status: &Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    status.is_already_exists()
        || matches!(status.code, 400 | 404 | 413 | 422)
        // A namespace is deleted together with its Services.
        || causes.any(|cause| cause.reason == "NamespaceTerminating")
}

#[cfg(test)]
mod tests;
