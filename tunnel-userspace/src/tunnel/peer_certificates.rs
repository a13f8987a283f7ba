//! The certificates by which the other end of a session is trusted.

use std::{sync::Arc, time::Duration};

use jiff::{SignedDuration, Timestamp};
use rustls::pki_types::CertificateDer;
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};

use crate::identity::{self, CertificateReceiver, Peer, Role, clock};

/// The interval between two looks at the wall clock, which may be set at any time.
const CLOCK_INTERVAL: Duration = Duration::from_secs(5);

/// The certificates that the peer has shown: in the session's own handshake or, if its certificate has been renewed since, in
/// that of the session that has renewed this one.
#[derive(Clone, Debug)]
pub(super) struct PeerCertificates(watch::Sender<Arc<Shown>>);

/// Certificates that a peer has shown.
#[derive(Debug)]
pub(super) struct Shown {
    /// The certificates, the peer's own one first.
    chain: Vec<CertificateDer<'static>>,
    /// The agent that the first one is for.
    pub(super) agent: Option<Peer>,
    /// The time when the first one was issued, and when it expires.
    validity: Option<[Timestamp; 2]>,
}

impl PeerCertificates {
    /// Creates the value from the certificates of the session's handshake, the peer's own one first.
    pub(super) fn new(chain: &[CertificateDer<'static>]) -> Self {
        let leaf = chain.first();
        Self(watch::Sender::new(Arc::new(Shown {
            agent: leaf.and_then(|leaf| identity::identify_agent(leaf).ok()),
            validity: leaf.and_then(identity::validity),
            chain: chain.to_vec(),
        })))
    }

    /// Trusts the peer by the certificates that it has shown in another session from now on.
    pub(super) fn renew(&self, by: &Self) {
        let shown = by.current();
        self.0.send_replace(shown);
    }

    /// Returns the certificates.
    pub(super) fn current(&self) -> Arc<Shown> {
        Arc::clone(&self.0.borrow())
    }

    /// Returns a receiver for the certificates.
    pub(super) fn subscribe(&self) -> watch::Receiver<Arc<Shown>> {
        self.0.subscribe()
    }

    /// Waits until the peer is no longer trusted, and returns the reason.
    pub(super) async fn rejected(
        &self,
        mut identity: CertificateReceiver,
        role: Role,
    ) -> rustls::Error {
        let mut changes = self.0.subscribe();
        loop {
            let shown = Arc::clone(&changes.borrow_and_update());
            tokio::select! {
                error = identity.peer_rejected(&shown.chain, role) => return error,
                Ok(()) = changes.changed() => {}
            }
        }
    }

    /// Returns the time when the peer's own certificate was issued, and when it expires, as far as they are known.
    pub(super) fn validity(&self) -> Option<[Timestamp; 2]> {
        self.0.borrow().validity
    }
}

impl Shown {
    /// Returns a description of the peer's certificate if it should have been renewed an hour ago: nine tenths of its life are
    /// over by then.
    pub(super) fn lateness(&self, now: Timestamp) -> Option<String> {
        let [issued, expires] = self.validity?;
        let agent = self.agent.as_ref()?;
        let last_part = Duration::try_from(issued.duration_until(expires)).ok()? / 10;
        let late = expires - last_part + RENEWAL_GRACE;
        (now >= late).then(|| {
            format!(
                "the agent's certificate, issued by {}, expires on {expires} and has not been renewed",
                agent.issuer
            )
        })
    }
}

/// The time after which a certificate that has not been renewed is reported.
const RENEWAL_GRACE: Duration = Duration::from_hours(1);
/// The longest delay between the renewal of an agent's certificate and that of its sessions.
const MAX_SPREAD: Duration = Duration::from_secs(60);
/// The shortest interval between two renewals of a session.
const MIN_INTERVAL: Duration = Duration::from_secs(1);

/// Decides when an agent replaces a session because a certificate of either end is renewed.
#[derive(Debug)]
pub(super) struct RenewalTimer {
    /// The certificate with which this agent has established the session.
    own: Arc<identity::Identity>,
    /// The time at which the gateway's certificate is about to expire, and the gateway will probably show another one.
    gateway_at: Option<Timestamp>,
    /// The earliest time for the next try.
    not_before: Instant,
}

impl RenewalTimer {
    /// Creates a timer for a session that has just been established.
    pub(super) fn new(own: Arc<identity::Identity>, gateway: &PeerCertificates) -> Self {
        let now = clock::now();
        let validity = gateway.validity();
        Self {
            own,
            gateway_at: validity.map(|validity| near_end(validity, now, fastrand::f64())),
            not_before: Instant::now() + MIN_INTERVAL,
        }
    }

    /// Makes no other try for a while, since one was without success.
    pub(super) fn postpone(&mut self, delay: Duration) {
        self.not_before = Instant::now() + delay.max(MIN_INTERVAL);
    }

    /// Waits until the session must be replaced.
    pub(super) async fn due(&self, identity: &CertificateReceiver) {
        sleep_until(self.not_before).await;
        tokio::select! {
            () = self.own_renewed(identity.clone()) => {}
            () = wait_until(self.gateway_at) => {}
        }
    }

    /// Waits until the agent has another certificate, and then for a part of the time that is left to the old one, so that
    /// agents that renew at the same time don't all dial at once.
    async fn own_renewed(&self, mut identity: CertificateReceiver) {
        let is_renewed =
            |current: Arc<identity::Identity>| !current.has_same_certificate(&self.own);
        while !identity.current().is_some_and(is_renewed) {
            identity.changed().await;
        }
        sleep(spread(self.own.expires, clock::now()).mul_f64(fastrand::f64())).await;
    }
}

/// Returns the time over which agents spread the renewal of their sessions: at most a quarter of the time that is left to the
/// old certificate.
fn spread(expires: Timestamp, now: Timestamp) -> Duration {
    let left = Duration::try_from(now.duration_until(expires)).unwrap_or_default();
    (left / 4).min(MAX_SPREAD)
}

/// Returns a time in the last tenth of a certificate's life, at which it has usually been renewed. If that has begun, returns
/// the middle of what is left. `chance` is a random number between 0 and 1.
fn near_end([issued, expires]: [Timestamp; 2], now: Timestamp, chance: f64) -> Timestamp {
    let part = Duration::try_from(issued.duration_until(expires)).unwrap_or_default() / 10;
    let before = SignedDuration::try_from(part.mul_f64(0.5 + chance / 2.0)).unwrap_or_default();
    let middle = now + (now.duration_until(expires) / 2).max(SignedDuration::ZERO);
    (expires - before).max(middle)
}

/// Waits until a time of the wall clock. Waits forever without a time.
async fn wait_until(time: Option<Timestamp>) {
    let Some(time) = time else {
        return std::future::pending().await;
    };
    loop {
        let left = Duration::try_from(clock::now().duration_until(time)).unwrap_or_default();
        if left.is_zero() {
            return;
        }
        sleep(left.min(CLOCK_INTERVAL)).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::identity::tests::{TestCa, first_certificate};

    fn at(second: i64) -> Timestamp {
        Timestamp::from_second(second).expect("a time")
    }

    #[test]
    fn a_session_is_replaced_in_the_last_tenth_of_the_gateways_certificate_and_then_at_halves() {
        let day = 86_400;
        let validity = [at(0), at(30 * day)];

        assert_eq!(near_end(validity, at(0), 1.0), at(27 * day));
        assert_eq!(near_end(validity, at(0), 0.0), at(30 * day - 3 * day / 2));
        // The gateway has shown the same certificate again.
        assert_eq!(near_end(validity, at(28 * day), 1.0), at(29 * day));
        assert_eq!(
            near_end(validity, at(31 * day), 1.0),
            at(31 * day),
            "expired"
        );
    }

    #[test]
    fn agents_spread_over_a_minute_and_sooner_if_their_certificates_end_sooner() {
        assert_eq!(spread(at(86_400), at(0)), MAX_SPREAD);
        assert_eq!(spread(at(8), at(0)), Duration::from_secs(2));
        assert_eq!(spread(at(0), at(8)), Duration::ZERO);
    }

    #[test]
    fn a_certificate_is_late_an_hour_into_the_last_tenth_of_its_life() {
        let test_ca = TestCa::new();
        let agent = first_certificate(&test_ca.agent("edge-1").cert);
        let chain = PeerCertificates::new(&[agent]).current();
        let [issued, expires] = chain.validity.expect("an agent's");
        let last_part = issued.duration_until(expires) / 10;
        let at = |minutes| expires - last_part + SignedDuration::from_mins(minutes);

        assert_eq!(chain.lateness(at(59)), None);
        let late = chain.lateness(at(60)).expect("late");
        assert!(late.contains(&format!("expires on {expires}")), "{late}");
    }
}
