//! The store for this process's certificate. It reads and verifies the CA certificates, the certificate and
//! the key together, and publishes them atomically. If they are not valid, the last valid ones stay in use.

use std::{future, sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;
use serde::{Deserialize, Serialize};
use tokio::{sync::watch, time::sleep};
use tracing::{error, info, warn};

use super::{
    FileError, Identity, IdentityFiles, Role, certificate::ParsedCertificate, clock, file_poll,
    pem_files::FileContents, requester::RequestState,
};

/// The interval between checks of the files.
const CHECK_INTERVAL: Duration = Duration::from_secs(2);

/// The interval between checks whether a peer's certificate has expired.
const CLOCK_INTERVAL: Duration = Duration::from_secs(5);
/// The time within which all peers are verified again after the trusted CAs have changed.
const MAX_SPREAD: Duration = Duration::from_secs(2);

/// The warning about an expiring certificate starts this long before the expiry, or after four fifths of the
/// certificate's lifetime if that is later.
const MAX_WARNING_PERIOD: SignedDuration = SignedDuration::from_hours(30 * 24);

/// The state of this process's certificate, as shown in the status and the metrics.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
#[serde(default, rename_all = "camelCase")]
pub struct CertificateState {
    /// The common name of the certificate in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The time when the certificate in use expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub expires: Option<Timestamp>,
    /// The time when the first of the CAs in use expires.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ca_expires: Option<Timestamp>,
    /// The name of the CA that has issued the certificate in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub issuer: Option<String>,
    /// The times of the machine's clock and of the verification, if the former can't be true.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clock_problem: Option<String>,
    /// The error in the current files, if they are not valid. The last valid files stay in use.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
    /// Problems that will turn into errors later, or that weaken security.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub warnings: Vec<String>,
    /// The state of the requests for certificates, if there are any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub request: Option<RequestState>,
}

impl CertificateState {
    /// Returns who issued the certificate in use, when it expires and, if it is renewed by requests, when that happens.
    #[must_use]
    pub fn validity(&self) -> Option<String> {
        let expires = self.expires?;
        let renewal = self.request.as_ref().and_then(|request| request.renew_at);
        let renewal = renewal.map(|at| format!(", is renewed on {at}"));
        let issuer = self.issuer.as_deref().unwrap_or("an unknown CA");
        Some(format!(
            "issued by {issuer}, expires on {expires}{}",
            renewal.unwrap_or_default()
        ))
    }

    /// Returns the reason why a request for a certificate was without success, and since when.
    #[must_use]
    pub fn request_problem(&self) -> Option<String> {
        let request = self.request.as_ref()?;
        let problem = request.problem.as_ref()?;
        let since = request.failing_since.map(|since| format!(" since {since}"));
        Some(format!(
            "no new certificate{}: {problem}",
            since.unwrap_or_default()
        ))
    }
}

/// A receiver for the certificate in use, and for its state.
#[derive(Clone, Debug)]
pub struct CertificateReceiver {
    identity: watch::Receiver<Option<Arc<Identity>>>,
    state: watch::Receiver<CertificateState>,
    /// The state of the requests for certificates, if there are any.
    requests: Option<watch::Receiver<RequestState>>,
}

impl CertificateReceiver {
    /// Adds the state of the requests for certificates.
    pub fn add_requests(&mut self, requests: watch::Receiver<RequestState>) {
        self.requests = Some(requests);
    }

    /// Returns the certificate in use, or `None` if the files have never been valid.
    #[must_use]
    pub fn current(&self) -> Option<Arc<Identity>> {
        self.identity.borrow().clone()
    }

    /// Waits until another certificate is published. Never returns once the store has been dropped.
    pub async fn changed(&mut self) {
        if self.identity.changed().await.is_err() {
            future::pending::<()>().await;
        }
    }

    /// Waits until a peer's certificates are no longer valid, and returns the reason. `chain` are the certificates
    /// that the peer has shown in its handshake, its own one first. They are verified again when they expire, and
    /// when this process's trusted CAs change.
    pub async fn peer_rejected(
        &mut self,
        chain: &[CertificateDer<'static>],
        role: Role,
    ) -> rustls::Error {
        let parsed = chain.iter().map(ParsedCertificate::read);
        let ends: Vec<Timestamp> = parsed.flatten().map(|parsed| parsed.not_after).collect();
        loop {
            let now = clock::now();
            if let Some(identity) = self.current()
                && let Err(error) = identity.verify_peer(chain, role, now)
            {
                return error;
            }
            // A certificate that has expired already isn't needed, as the verification shows.
            let to_come = ends.iter().filter(|end| now.as_second() <= end.as_second());
            let expires = to_come.min().copied();
            tokio::select! {
                // With thousands of sessions, the verifications are spread over time.
                () = self.changed() => sleep(MAX_SPREAD.mul_f64(fastrand::f64())).await,
                () = wait_until_after(expires) => {}
            }
        }
    }

    /// Returns the state of the certificate and of the requests for it.
    #[must_use]
    pub fn state(&self) -> CertificateState {
        let requests = self.requests.as_ref();
        CertificateState {
            request: requests.map(|requests| requests.borrow().clone()),
            clock_problem: clock::problem(),
            ..self.state.borrow().clone()
        }
    }
}

/// Waits until a time of the wall clock has passed, which may be changed meanwhile. Waits forever without a time.
async fn wait_until_after(time: Option<Timestamp>) {
    let Some(time) = time else {
        return future::pending().await;
    };
    // The validity period includes its last second.
    while clock::now().as_second() <= time.as_second() {
        sleep(CLOCK_INTERVAL).await;
    }
}

/// Reads and watches the certificate files, and publishes the certificate.
pub struct CertificateStore {
    files: IdentityFiles,
    role: Role,
    /// The contents of the files, or the error, as found by the last check.
    last_check: Result<FileContents, String>,
    /// True if the contents found by the last check are in use.
    is_last_check_in_use: bool,
    /// The name that the certificate should have, if it is known.
    expected_name: Option<String>,
    /// True if requests renew the certificate, so that its expiration needs no warning.
    is_renewed: bool,
    /// The problem that was logged last, without the time of the clock.
    logged: Option<String>,
    identity: watch::Sender<Option<Arc<Identity>>>,
    state: watch::Sender<CertificateState>,
}

impl CertificateStore {
    /// Reads the files. Invalid files do not make this fail: their error is in the state, and they are
    /// checked again later.
    #[must_use]
    pub fn open(files: IdentityFiles, role: Role) -> (Self, CertificateReceiver) {
        Self::open_at(files, role, clock::now())
    }

    fn open_at(files: IdentityFiles, role: Role, now: Timestamp) -> (Self, CertificateReceiver) {
        let found = FileContents::read(&files);
        let mut store = Self {
            files,
            role,
            // Initialised as if an earlier check had found the same, so that invalid files are reported
            // immediately.
            last_check: found.as_ref().map_err(FileError::to_string).cloned(),
            is_last_check_in_use: false,
            expected_name: None,
            is_renewed: false,
            logged: None,
            identity: watch::Sender::new(None),
            state: watch::Sender::new(CertificateState::default()),
        };
        store.handle_check(found, now);
        // Subscribe only after the first certificate is published, so that it does not count as a change.
        let receiver = CertificateReceiver {
            identity: store.identity.subscribe(),
            state: store.state.subscribe(),
            requests: None,
        };
        (store, receiver)
    }

    /// Sets the name that the certificate should have. A certificate with another name is used, but causes a
    /// warning.
    pub fn expect_name(&mut self, name: &str) {
        self.expected_name = Some(name.to_owned());
        self.update_warnings(clock::now());
    }

    /// Leaves out the warning that the certificate expires soon, because requests renew it.
    pub fn expect_renewal(&mut self) {
        self.is_renewed = true;
        self.update_warnings(clock::now());
    }

    /// Checks the files every two seconds until the drain begins.
    pub async fn run(mut self, draining: watch::Receiver<bool>) {
        let files = self.files.clone();
        let handle = |found| self.handle_check(found, clock::now());
        file_poll::poll(
            "the certificate files",
            CHECK_INTERVAL,
            move || {
                clock::write_down();
                FileContents::read(&files)
            },
            handle,
            draining,
        )
        .await;
    }

    /// Handles the result of a check. Invalid files may be in the middle of being replaced, so they are
    /// reported as a problem only if the next check finds them unchanged.
    fn handle_check(&mut self, found: Result<FileContents, FileError>, now: Timestamp) {
        let check = found.as_ref().map_err(FileError::to_string).cloned();
        let is_same = check == self.last_check;
        self.last_check = check;
        let used = self.identity.borrow().clone();
        let is_due = used.is_none_or(|used| used.reverify_at <= now);
        if !is_same || !self.is_last_check_in_use || is_due {
            let verified =
                found.and_then(|contents| Identity::verify(&self.files, &contents, self.role, now));
            self.is_last_check_in_use = verified.is_ok();
            match verified {
                Ok(identity) => self.publish(identity),
                Err(rejected) if is_same => self.report_problem(&rejected),
                Err(_) => {}
            }
        }
        self.update_warnings(now);
    }

    fn publish(&mut self, identity: Identity) {
        self.logged = None;
        info!(
            name = identity.name,
            expires = %identity.expires,
            "the certificate was loaded"
        );
        self.state.send_modify(|state| {
            state.name = Some(identity.name.clone());
            state.expires = Some(identity.expires);
            state.ca_expires = Some(identity.ca_expires);
            state.issuer = Some(identity.issuer.clone());
            state.problem = None;
        });
        self.identity.send_replace(Some(Arc::new(identity)));
    }

    fn report_problem(&mut self, rejected: &FileError) {
        let problem = rejected.to_string();
        self.state
            .send_modify(|state| state.problem = Some(problem.clone()));
        let logged = rejected.lasting_part();
        if self.logged.as_ref() == Some(&logged) {
            return;
        }
        self.logged = Some(logged);
        if self.identity.borrow().is_some() {
            error!(
                problem,
                "the certificate files are not valid; the last valid ones stay in use"
            );
        } else {
            error!(problem, "the certificate files are not valid");
        }
    }

    fn update_warnings(&self, now: Timestamp) {
        let mut warnings = Vec::new();
        if self
            .last_check
            .as_ref()
            .is_ok_and(FileContents::is_key_open)
        {
            let key = self.files.key.display();
            warnings.push(format!(
                "{key}: users other than the owner can access this private key; run: chmod 600 {key}"
            ));
        }
        if let Some(identity) = &*self.identity.borrow() {
            if let Some(expected) = self.expected_name.as_ref()
                && *expected != identity.name
            {
                let (cert, found) = (self.files.cert.display(), &identity.name);
                warnings.push(format!(
                    "{cert}: is the certificate of node {found}, but nodeName is {expected}; the gateways use this \
                     agent for node {found}"
                ));
            }
            let (from, until) = (identity.from, identity.expires);
            let warning_period = MAX_WARNING_PERIOD.min(from.duration_until(until) / 5);
            let is_ending = now <= until && now.duration_until(until) < warning_period;
            if is_ending && !self.is_renewed {
                let cert = self.files.cert.display();
                warnings.push(format!(
                    "{cert}: expires on {until}; issue a new certificate"
                ));
            }
        }
        self.state.send_if_modified(|state| {
            let is_new = state.warnings != warnings;
            if is_new {
                for warning in warnings.iter().filter(|it| !state.warnings.contains(it)) {
                    warn!(warning, "the certificate files need attention");
                }
                state.warnings = warnings;
            }
            is_new
        });
    }
}

#[cfg(test)]
mod tests;
