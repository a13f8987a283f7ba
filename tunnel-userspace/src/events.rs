//! What an operator must act on, told as Kubernetes Events on the Service or Node that it is about;
//! and that the daemon starts, on its Node.
//!
//! Every node tells, and still there is one Event in the cluster for each thing: its name is made
//! from what it says, so that the second one to be made is refused by the API server as the first
//! is there already.
//!
//! - `event`: builds the Events
//! - `queue`: which Event is due, and when (no I/O)

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

/// How often to look for what is new, and for what is due.
const LOOK: Duration = Duration::from_secs(1);

/// How long to wait after the API server could not be told something.
const PAUSE: Duration = Duration::from_secs(60);

/// How much is told.
#[derive(Clone, Copy, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, deny_unknown_fields)]
pub struct Settings {
    /// Whether any Events are made.
    pub enabled: bool,
    /// How many this node may make at once, from 1 to 1000.
    pub burst: u32,
    /// How long until another one may be made, once that many were.
    #[serde(with = "duration")]
    pub every: Duration,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            enabled: true,
            burst: 10,
            every: Duration::from_secs(30),
        }
    }
}

/// Where concerns come from.
#[derive(Debug)]
pub struct Views {
    /// What the parts of the daemon are concerned with.
    pub concerns: Vec<watch::Receiver<Arc<[Concern]>>>,
    /// Ports that are not ours yet, and why.
    pub listening: watch::Receiver<BTreeMap<String, String>>,
}

/// Tells the API server what is to be told of a node, until told to stop.
pub async fn run(
    node: String,
    settings: Settings,
    client: Client,
    mut views: Views,
    mut draining: watch::Receiver<bool>,
) {
    let mut queue = Queue::new(settings.burst, settings.every, Instant::now());
    let mut looks = interval(LOOK);
    looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_told = true;
    // Of the start: it happens once, so it is told as soon as that can be.
    let mut start = Some((
        event::of_start(&node, jiff::Timestamp::now()),
        Instant::now(),
    ));
    // What there is already is news here.
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
    /// Everything there is, if something of it is new.
    fn news(&mut self, node: &str) -> Option<Vec<Concern>> {
        // A part that has ended has nothing new.
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
            all.push(Concern::of_node(node, Reason::PortTaken, note));
        }
        Some(all)
    }
}

/// Makes an Event. One that is there already, or that can't be made whatever is tried, counts as
/// told.
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

/// Whether the API server will never say anything else to this Event.
fn is_settled(status: &Status) -> bool {
    let mut causes = status.details.iter().flat_map(|details| &details.causes);
    status.is_already_exists()
        || matches!(status.code, 400 | 404 | 413 | 422)
        // Where a namespace goes, its Services go too.
        || causes.any(|cause| cause.reason == "NamespaceTerminating")
}

#[cfg(test)]
mod tests;
