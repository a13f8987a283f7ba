//! The store of this end's certificate: reads and verifies the files as a set, then publishes it
//! atomically. The last valid set stays in use.

use std::{future, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{MissedTickBehavior, interval},
};
use tracing::{error, info, warn};

use super::{Files, Identity, Rejected, Role, files::Contents};
use crate::drain;

/// The interval at which the files are checked.
const POLL: Duration = Duration::from_secs(2);

/// The longest time before its expiry that a certificate is warned about; a fifth of its lifetime if
/// that is shorter.
const SOON: SignedDuration = SignedDuration::from_hours(30 * 24);

/// The state of this end's certificate, for status and metrics.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct State {
    /// The common name in the certificate that is in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The time when the certificate in use expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
    /// The earliest time at which an authority in use expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_expires: Option<Timestamp>,
    /// The file and the reason why the current files can't be used. The last valid set stays in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The problems to fix before they become errors.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A handle to the certificate in use. It is read-only.
#[derive(Clone, Debug)]
pub struct Receiver {
    identity: watch::Receiver<Option<Arc<Identity>>>,
    state: watch::Receiver<State>,
}

impl Receiver {
    /// Returns the identity in use; none until the files were valid once.
    #[must_use]
    pub fn current(&self) -> Option<Arc<Identity>> {
        self.identity.borrow().clone()
    }

    /// Waits until another identity is published; forever once the store is gone.
    pub async fn changed(&mut self) {
        if self.identity.changed().await.is_err() {
            future::pending::<()>().await;
        }
    }

    /// Returns the state of the certificate.
    #[must_use]
    pub fn state(&self) -> State {
        self.state.borrow().clone()
    }
}

/// The store: reads and watches the files.
pub struct Store {
    files: Files,
    role: Role,
    /// The result of the last check.
    seen: Result<Contents, String>,
    /// True if the result of the last check is in use.
    is_good: bool,
    identity: watch::Sender<Option<Arc<Identity>>>,
    state: watch::Sender<State>,
}

impl Store {
    /// Reads the files of an end. Invalid files are not an error: the state has the reason, and the
    /// files are checked again.
    #[must_use]
    pub fn open(files: Files, role: Role) -> (Self, Receiver) {
        Self::open_at(files, role, Timestamp::now())
    }

    fn open_at(files: Files, role: Role, now: Timestamp) -> (Self, Receiver) {
        let found = Contents::read(&files);
        let mut store = Self {
            files,
            role,
            // Counts as seen before, so that invalid files are reported at once: no set is in use
            // meanwhile.
            seen: found.as_ref().map_err(Rejected::to_string).cloned(),
            is_good: false,
            identity: watch::Sender::new(None),
            state: watch::Sender::new(State::default()),
        };
        store.take(found, now);
        // Subscribed after the first set, which is thus not reported as a change.
        let receiver = Receiver {
            identity: store.identity.subscribe(),
            state: store.state.subscribe(),
        };
        (store, receiver)
    }

    /// Checks the files every two seconds until the drain begins.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        let mut poll = interval(POLL);
        poll.set_missed_tick_behavior(MissedTickBehavior::Delay);
        poll.reset();
        loop {
            let look = async {
                poll.tick().await;
                let files = self.files.clone();
                spawn_blocking(move || Contents::read(&files)).await
            };
            let found = tokio::select! {
                biased;
                () = drain::begun(&mut draining) => break,
                found = look => found,
            };
            match found {
                Ok(found) => self.take(found, Timestamp::now()),
                Err(error) => warn!(%error, "the files of the identity were not looked at"),
            }
        }
    }

    /// Handles the result of a check. An invalid set may be half replaced; it becomes a problem if the
    /// next check finds it unchanged.
    fn take(&mut self, found: Result<Contents, Rejected>, now: Timestamp) {
        let seen = found.as_ref().map_err(Rejected::to_string).cloned();
        let is_same = seen == self.seen;
        self.seen = seen;
        let used = self.identity.borrow().clone();
        let is_due = used.is_none_or(|used| used.revisit <= now);
        if !is_same || !self.is_good || is_due {
            let verified = found
                .and_then(|contents| Identity::verified(&self.files, &contents, self.role, now));
            self.is_good = verified.is_ok();
            match verified {
                Ok(identity) => self.publish(identity),
                Err(rejected) if is_same => self.complain(&rejected),
                Err(_) => {}
            }
        }
        self.warn(now);
    }

    fn publish(&self, identity: Identity) {
        info!(
            name = identity.name,
            expires = %identity.expires,
            "the certificate is in use"
        );
        self.state.send_modify(|state| {
            state.name = Some(identity.name.clone());
            state.expires = Some(identity.expires);
            state.ca_expires = Some(identity.ca_expires);
            state.problem = None;
        });
        self.identity.send_replace(Some(Arc::new(identity)));
    }

    fn complain(&self, rejected: &Rejected) {
        let problem = rejected.to_string();
        let is_news = self.state.send_if_modified(|state| {
            let is_news = state.problem.as_ref() != Some(&problem);
            state.problem = Some(problem.clone());
            is_news
        });
        if !is_news {
            return;
        }
        if self.identity.borrow().is_some() {
            error!(
                problem,
                "the files of the identity can't be used; what was read before stays in use"
            );
        } else {
            error!(problem, "the files of the identity can't be used");
        }
    }

    fn warn(&self, now: Timestamp) {
        let mut warnings = Vec::new();
        if self.seen.as_ref().is_ok_and(Contents::is_open) {
            let key = self.files.key.display();
            warnings.push(format!(
                "{key}: others than its owner can use the private key; chmod 600 it"
            ));
        }
        if let Some(identity) = &*self.identity.borrow() {
            let (from, until) = (identity.from, identity.expires);
            let soon = SOON.min(from.duration_until(until) / 5);
            if now <= until && now.duration_until(until) < soon {
                let cert = self.files.cert.display();
                warnings.push(format!("{cert}: expires on {until}; issue another"));
            }
        }
        self.state.send_if_modified(|state| {
            let is_news = state.warnings != warnings;
            if is_news {
                for warning in warnings.iter().filter(|it| !state.warnings.contains(it)) {
                    warn!(warning, "the files of the identity need care");
                }
                state.warnings = warnings;
            }
            is_news
        });
    }
}

#[cfg(test)]
mod tests;
