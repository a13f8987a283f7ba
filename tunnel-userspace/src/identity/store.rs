//! The store of this process's certificate: reads and verifies the CA certificates, the certificate and the
//! key together, and publishes them atomically. The last valid files stay in use.

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

/// The warning of an expiring certificate starts this long before, or after four fifths of the
/// certificate's lifetime if that is later.
const SOON: SignedDuration = SignedDuration::from_hours(30 * 24);

/// The state of this process's certificate, for status and metrics.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct CertificateState {
    /// The common name of the certificate in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The time when the certificate in use expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
    /// The earliest time at which one of the CAs in use expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_expires: Option<Timestamp>,
    /// The error of the current files, if they are not valid. The last valid files stay in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Problems that will become errors, or that weaken security.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
}

/// A receiver of the certificate in use, and of its state.
#[derive(Clone, Debug)]
pub struct Receiver {
    identity: watch::Receiver<Option<Arc<Identity>>>,
    state: watch::Receiver<CertificateState>,
}

impl Receiver {
    /// Returns the certificate in use; none until the files were valid for the first time.
    #[must_use]
    pub fn current(&self) -> Option<Arc<Identity>> {
        self.identity.borrow().clone()
    }

    /// Waits until another certificate is published; forever once the store is dropped.
    pub async fn changed(&mut self) {
        if self.identity.changed().await.is_err() {
            future::pending::<()>().await;
        }
    }

    /// Returns the state of the certificate.
    #[must_use]
    pub fn state(&self) -> CertificateState {
        self.state.borrow().clone()
    }
}

/// Reads and watches the files, and publishes the certificate.
pub struct Store {
    files: Files,
    role: Role,
    /// The contents or the error that the last check found.
    seen: Result<Contents, String>,
    /// True if the contents of the last check are in use.
    is_good: bool,
    identity: watch::Sender<Option<Arc<Identity>>>,
    state: watch::Sender<CertificateState>,
}

impl Store {
    /// Reads the files. Invalid files are not a failure: their error is in the state, and they are checked
    /// again later.
    #[must_use]
    pub fn open(files: Files, role: Role) -> (Self, Receiver) {
        Self::open_at(files, role, Timestamp::now())
    }

    fn open_at(files: Files, role: Role, now: Timestamp) -> (Self, Receiver) {
        let found = Contents::read(&files);
        let mut store = Self {
            files,
            role,
            // Set as if an earlier check had found the same, so that invalid files are reported at once.
            seen: found.as_ref().map_err(Rejected::to_string).cloned(),
            is_good: false,
            identity: watch::Sender::new(None),
            state: watch::Sender::new(CertificateState::default()),
        };
        store.take(found, now);
        // Subscribes after the first certificate, which thus does not count as a change.
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
                Err(error) => warn!(%error, "cannot check the certificate files"),
            }
        }
    }

    /// Handles the result of a check. Invalid files may be in the middle of a replacement, so they are a
    /// problem only if the next check finds them unchanged.
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
            "the certificate was loaded"
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
                "the certificate files are not valid; the last valid ones stay in use"
            );
        } else {
            error!(problem, "the certificate files are not valid");
        }
    }

    fn warn(&self, now: Timestamp) {
        let mut warnings = Vec::new();
        if self.seen.as_ref().is_ok_and(Contents::is_open) {
            let key = self.files.key.display();
            warnings.push(format!(
                "{key}: users other than the owner can access the private key; run: chmod 600 {key}"
            ));
        }
        if let Some(identity) = &*self.identity.borrow() {
            let (from, until) = (identity.from, identity.expires);
            let soon = SOON.min(from.duration_until(until) / 5);
            if now <= until && now.duration_until(until) < soon {
                let cert = self.files.cert.display();
                warnings.push(format!("{cert}: expires on {until}; issue a new certificate"));
            }
        }
        self.state.send_if_modified(|state| {
            let is_news = state.warnings != warnings;
            if is_news {
                for warning in warnings.iter().filter(|it| !state.warnings.contains(it)) {
                    warn!(warning, "the certificate files need attention");
                }
                state.warnings = warnings;
            }
            is_news
        });
    }
}

#[cfg(test)]
mod tests;
