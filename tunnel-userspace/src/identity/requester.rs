//! Requests this process's certificate from the API server, and renews it in time. The certificate and its key are written into
//! one file, which the store reads.
//!
//! - `on_disk`: the files of the certificate in use and of the request that waits for its certificate
//! - `api`: the requests to the API server

mod api;
mod on_disk;

use std::{path::PathBuf, time::Duration};

use jiff::{SignedDuration, Timestamp};
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::sleep};
use tracing::{error, info};

pub use self::api::{ApiError, Asked, KubeApi, RequestApi, State};
use self::on_disk::{Current, NotInstalled, OnDisk, Pending};
use super::{IdentityFiles, Role, clock};
use crate::drain;

/// The longest interval between two looks at the wall clock, which may be set at any time.
const MAX_INTERVAL: Duration = Duration::from_secs(60);
/// The shortest one, for certificates that live for seconds.
const MIN_INTERVAL: Duration = Duration::from_millis(200);

/// The bounds of the delay between two tries. For short lives, the first delays are shorter.
const FIRST_DELAY: Duration = Duration::from_secs(5);
const MAX_DELAY: Duration = Duration::from_secs(300);

/// The problem if a certificate that has just been issued must be renewed already.
const CLOCK_AHEAD: &str = "the clock of this machine is so far ahead of the controller's that a new certificate must be renewed at once";

/// The life of a certificate that is not known yet.
const DEFAULT_LIFE: Duration = Duration::from_hours(30 * 24);

/// The time without success after which the problem is reported.
const REPORT_AFTER: SignedDuration = SignedDuration::from_hours(1);

/// The certificate is renewed after a part of its life between these two, which depends on the certificate alone.
const RENEW_AFTER: [f64; 2] = [0.7, 0.9];
/// The time before its end by which a certificate is renewed, unless half of its life is left then.
const MIN_MARGIN: SignedDuration = SignedDuration::from_secs(6);

/// The certificate that is requested, and its requester.
#[derive(Clone, Debug)]
pub struct Wanted {
    /// The role.
    pub role: Role,
    /// The name of the Node.
    pub node: String,
    /// The life of a certificate. `None` leaves it to the controller.
    pub life: Option<Duration>,
    /// The file with the trusted CAs.
    pub ca: PathBuf,
    /// The directory for the certificate, its key, and the request.
    pub directory: PathBuf,
}

impl Wanted {
    /// Returns the files that the store reads. The certificate and the key are in one file, so that both are replaced at once.
    #[must_use]
    pub fn files(&self) -> IdentityFiles {
        let pair = self.directory.join("cert-and-key.pem");
        IdentityFiles {
            ca: self.ca.clone(),
            cert: pair.clone(),
            key: pair,
        }
    }
}

/// The state of the requests, as shown in the status and the metrics.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct RequestState {
    /// The name of the request that waits for its certificate.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending: Option<String>,
    /// The reason why the last try was without success.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// The time since which there has been no success.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub failing_since: Option<Timestamp>,
    /// The time when the certificate is renewed.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub renew_at: Option<Timestamp>,
    /// The number of certificates that this process has received.
    pub received: u64,
}

impl RequestState {
    /// Returns the problem if there has been no success for an hour.
    #[must_use]
    pub fn lasting_problem(&self, now: Timestamp) -> Option<&str> {
        let since = self.failing_since?;
        let problem = self.problem.as_deref()?;
        (now.duration_since(since) >= REPORT_AFTER).then_some(problem)
    }
}

/// The result of a try to get a certificate.
enum Try {
    /// The certificate was written.
    Received,
    /// The request waits.
    Waits(String),
    /// There will be no certificate for this request.
    Refused(String),
}

/// Returns the time of the wall clock.
pub type Clock = Box<dyn Fn() -> Timestamp + Send + Sync>;

/// Requests certificates and renews them.
pub struct Requester<A> {
    wanted: Wanted,
    api: A,
    clock: Clock,
    on_disk: OnDisk,
    state: watch::Sender<RequestState>,
    failures: u32,
}

impl<A: RequestApi> Requester<A> {
    /// Creates a requester, and a receiver for its state.
    pub fn new(wanted: Wanted, api: A, clock: Clock) -> (Self, watch::Receiver<RequestState>) {
        let state = watch::Sender::new(RequestState::default());
        let receiver = state.subscribe();
        let requester = Self {
            on_disk: OnDisk::new(wanted.clone()),
            wanted,
            api,
            clock,
            state,
            failures: 0,
        };
        (requester, receiver)
    }

    /// Keeps a valid certificate in the files until the drain begins.
    pub async fn run(mut self, mut draining: watch::Receiver<bool>) {
        loop {
            let pause = tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                pause = self.look() => pause,
            };
            tokio::select! {
                biased;
                () = drain::begun(&mut draining) => return,
                () = sleep(pause) => {}
            }
        }
    }

    /// Makes a try if a certificate is needed. Returns the time until the next look.
    async fn look(&mut self) -> Duration {
        let now = (self.clock)();
        let current = self.on_disk.current(now);
        if let Err(error) = &current
            && error.path == self.wanted.ca
            && self.on_disk.has_certificate()
        {
            // The certificate may be good, and another one could not be used either.
            self.fail_with_error(now, &error.to_string());
            return interval_for(self.wanted.life.unwrap_or(DEFAULT_LIFE));
        }
        let life = current.as_ref().map(Current::life).ok();
        let life = life.or(self.wanted.life).unwrap_or(DEFAULT_LIFE);
        if let Ok(current) = &current {
            let renew_at = current.renew_at();
            if now < renew_at {
                // An earlier problem may have gone by itself.
                self.failures = 0;
                self.state.send_if_modified(|state| {
                    let received = state.received;
                    let settled = RequestState {
                        renew_at: Some(renew_at),
                        received,
                        ..RequestState::default()
                    };
                    std::mem::replace(state, settled.clone()) != settled
                });
                return interval_for(life);
            }
        }
        match self.try_once(now).await {
            Ok(Try::Received) => {
                let received = self.on_disk.current(now);
                if let Ok(received) = received
                    && received.renew_at() <= now
                {
                    // The next one would be no better, and have no end.
                    self.state.send_modify(|state| state.received += 1);
                    self.fail_with_error(now, CLOCK_AHEAD);
                    return self.next_delay(received.life());
                }
                self.succeed();
                // The next look finds how long the new one lives.
                return MIN_INTERVAL;
            }
            Ok(Try::Waits(why)) => {
                if self.fail(now, &why) {
                    info!(reason = why, "the certificate has not arrived yet");
                }
            }
            Ok(Try::Refused(why)) => {
                self.on_disk.forget_pending();
                self.state.send_modify(|state| state.pending = None);
                self.fail_with_error(now, &why);
            }
            Err(error) => self.fail_with_error(now, &error.to_string()),
        }
        self.next_delay(life)
    }

    async fn try_once(&self, now: Timestamp) -> Result<Try, ApiError> {
        let pending = self.on_disk.pending().map_err(ApiError::File)?;
        let name = pending.name(self.wanted.role, &self.wanted.node);
        self.state
            .send_modify(|state| state.pending = Some(name.clone()));
        let asked = Asked {
            name: &name,
            role: self.wanted.role,
            request: &pending.request,
            life: self.wanted.life,
        };
        match self.api.ask(&asked).await? {
            State::Waits => Ok(Try::Waits(format!("the request {name} waits for approval"))),
            State::Refused(why) => Ok(Try::Refused(format!(
                "the request {name} was refused: {why}"
            ))),
            State::Foreign => Ok(Try::Refused(format!(
                "another request with the name {name} exists; one with another key is made"
            ))),
            State::Issued(certificate) => Ok(self.install(&pending, &certificate, now)),
        }
    }

    /// Writes a certificate that was received, if all files together are valid.
    fn install(&self, pending: &Pending, certificate: &[u8], now: Timestamp) -> Try {
        match self.on_disk.install(pending, certificate, now) {
            Ok(Current {
                issued, expires, ..
            }) => {
                info!(node = self.wanted.node, %expires, "a certificate was received");
                // It was issued a moment ago, by the controller's clock.
                clock::confirm(issued);
                Try::Received
            }
            Err(NotInstalled::Useless(problem)) => Try::Refused(format!(
                "the certificate that was issued is of no use: {problem}"
            )),
            // The CA that has signed may not have arrived in the file of trusted CAs yet.
            Err(NotInstalled::NotYet(problem)) => Try::Waits(format!(
                "the certificate that was issued can't be used: {problem}"
            )),
        }
    }

    fn succeed(&mut self) {
        self.failures = 0;
        self.state.send_modify(|state| {
            *state = RequestState {
                received: state.received + 1,
                ..RequestState::default()
            };
        });
    }

    /// Records a try without success. Returns true if the reason differs from that of the last one.
    fn fail(&mut self, now: Timestamp, why: &str) -> bool {
        self.failures = self.failures.saturating_add(1);
        let is_new = self.state.borrow().problem.as_deref() != Some(why);
        self.state.send_modify(|state| {
            state.problem = Some(why.to_owned());
            state.failing_since.get_or_insert(now);
        });
        is_new
    }

    fn fail_with_error(&mut self, now: Timestamp, why: &str) {
        if self.fail(now, why) {
            error!(problem = why, "there is no new certificate");
        }
    }

    /// Returns the delay before the next try, which doubles up to five minutes, with jitter.
    fn next_delay(&self, life: Duration) -> Duration {
        let first = FIRST_DELAY.min(life / 20).max(MIN_INTERVAL);
        let doubled = first.saturating_mul(1 << self.failures.saturating_sub(1).min(16));
        // A certificate that lives for a minute would expire during five.
        let limit = MAX_DELAY.min(life / 10).max(first);
        doubled.min(limit).mul_f64(0.75 + 0.25 * fastrand::f64())
    }
}

/// Returns the interval between two looks at the clock for certificates with a life.
fn interval_for(life: Duration) -> Duration {
    (life / 100).clamp(MIN_INTERVAL, MAX_INTERVAL)
}

#[cfg(test)]
mod tests;
