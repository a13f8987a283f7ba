//! Notices that two machines use the certificate of one node.

use std::time::Duration;

use jiff::{SignedDuration, Timestamp};

use super::SessionView;

/// The time for which sessions of two machines may overlap without being reported. A machine that reboots
/// leaves broken sessions behind.
const OVERLAP: Duration = Duration::from_secs(30);

/// Describes two sessions whose machines have different boot IDs, if both have lasted for [`OVERLAP`].
pub(super) fn describe(sessions: &[&SessionView], now: Timestamp) -> Option<String> {
    let overlap = SignedDuration::try_from(OVERLAP).ok()?;
    let is_lasting = |it: &&SessionView| now.duration_since(it.since) >= overlap;
    let known = sessions.iter().copied().filter(|it| !it.boot.is_empty());
    // Sorted, so that the text stays the same while the same machines have sessions.
    let mut lasting: Vec<_> = known.filter(is_lasting).collect();
    lasting.sort_by_key(|it| it.machine());
    let first = lasting.first()?;
    let other = lasting.iter().find(|it| it.boot != first.boot)?;
    let machine = |view: &SessionView| format!("{} (boot ID {})", view.peer.ip(), view.boot);
    Some(format!(
        "two machines use this node's certificate: {} and {}",
        machine(first),
        machine(other)
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tunnel::TrafficView;

    #[test]
    fn a_shared_certificate_is_described_once_both_sessions_have_lasted() {
        let session = |last: u8, boot: &str, since| SessionView {
            name: String::new(),
            peer: ([192, 0, 2, last], 4242).into(),
            since: Timestamp::from_second(since).expect("a time"),
            release: String::new(),
            boot: boot.to_owned(),
            certificate_issuer: String::new(),
            clock_skew_seconds: None,
            certificate_expires: Timestamp::UNIX_EPOCH,
            traffic: TrafficView::default(),
        };
        let described = |sessions: &[SessionView]| {
            let now = Timestamp::from_second(100).expect("a time");
            describe(&sessions.iter().collect::<Vec<_>>(), now)
        };
        let own = session(1, "a", 0);

        let text = "two machines use this node's certificate: 192.0.2.1 (boot ID a) and 192.0.2.2 \
                    (boot ID b)";
        let both = [own.clone(), session(1, "a", 5), session(2, "b", 70)];
        assert_eq!(described(&both).as_deref(), Some(text));
        let reconnected = [session(2, "b", 60), session(1, "a", 65)];
        assert_eq!(
            described(&reconnected).as_deref(),
            Some(text),
            "same machines"
        );
        assert_eq!(described(&[own.clone(), session(2, "b", 71)]), None, "new");
        assert_eq!(
            described(&[own.clone(), session(2, "", 0)]),
            None,
            "unknown"
        );
        assert_eq!(described(&[own.clone(), session(2, "a", 0)]), None, "moved");
        assert_eq!(described(&[own]), None);
    }
}
