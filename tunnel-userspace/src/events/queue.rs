//! Decides which Event to send next, and when.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use tokio::time::Instant;

use crate::{
    model::{Kind, ObjectWarning},
    round_robin,
};

/// The minimum time to wait before sending the Event for a new warning.
const MIN_AGE: Duration = Duration::from_secs(2);

/// The maximum random delay in addition to `MIN_AGE`, so that nodes do not all send the same Event at once.
const MAX_JITTER: Duration = Duration::from_secs(8);

/// The interval at which an unresolved warning is sent again, because Events expire after an hour
/// (kube-apiserver `--event-ttl`).
const RESEND_INTERVAL: Duration = Duration::from_secs(20 * 60);

/// The maximum number of queued warnings.
const MAX_QUEUED: usize = 1000;

/// The warnings to send as Events, subject to a rate limit.
#[derive(Debug)]
pub(super) struct EventQueue {
    /// The time at which the Event for each warning is due.
    due: BTreeMap<ObjectWarning, Instant>,
    /// The last attempt to send an Event for each namespace that has queued warnings.
    last_attempts: BTreeMap<Arc<str>, Instant>,
    burst: u32,
    interval: Duration,
    /// The number of Events that may be sent now.
    tokens: u32,
    /// The start of the interval at whose end the next token is added.
    refill_start: Instant,
    /// The end of the pause after a failure. No Events are sent before then.
    paused_until: Option<Instant>,
}

impl EventQueue {
    /// Creates an empty queue that allows a burst of `burst` Events, and then one Event per interval.
    pub(super) const fn new(burst: u32, interval: Duration, now: Instant) -> Self {
        Self {
            due: BTreeMap::new(),
            last_attempts: BTreeMap::new(),
            burst,
            interval,
            tokens: burst,
            refill_start: now,
            paused_until: None,
        }
    }

    /// Replaces the queued warnings. Warnings that were already queued keep their due times. Warnings about
    /// objects that the API server does not have are dropped. If there are too many warnings, those about Nodes get
    /// at least half of the room, and those of each namespace are queued in turn.
    pub(super) fn replace(
        &mut self,
        warnings: impl IntoIterator<Item = ObjectWarning>,
        now: Instant,
    ) {
        let mut last = std::mem::take(&mut self.due);
        let is_of_node = |warning: &ObjectWarning| warning.regarding.kind == Kind::Node;
        // Warnings about Nodes come first, since a single problem with a node may cause problems with very
        // many Services.
        let (mut of_nodes, mut others): (Vec<_>, Vec<_>) =
            warnings.into_iter().partition(is_of_node);
        others.retain(|warning| warning.uid.is_some());
        of_nodes.truncate(MAX_QUEUED - others.len().min(MAX_QUEUED / 2));
        let room = MAX_QUEUED - of_nodes.len();
        let others = round_robin::take_by(others.into_iter(), namespace, room);
        for warning in of_nodes.into_iter().chain(others) {
            let jitter = MAX_JITTER.mul_f64(fastrand::f64());
            let due = last
                .remove(&warning)
                .unwrap_or_else(|| now + MIN_AGE + jitter);
            self.due.insert(warning, due);
        }
        let mut last = std::mem::take(&mut self.last_attempts);
        for warning in self.due.keys() {
            let attempt = last.remove_entry(&warning.regarding.name.namespace);
            self.last_attempts.extend(attempt);
        }
    }

    /// Returns the next warning to send, if one is due and the rate limit allows it.
    pub(super) fn next_due(&mut self, now: Instant) -> Option<ObjectWarning> {
        if self.paused_until.is_some_and(|until| now < until) {
            return None;
        }
        while self.tokens < self.burst && now.duration_since(self.refill_start) >= self.interval {
            self.tokens += 1;
            self.refill_start += self.interval;
        }
        if self.tokens == self.burst {
            self.refill_start = now;
        }
        let due = self.due.iter().filter(|(_, due)| **due <= now);
        // The namespaces take turns, so that one with very many warnings doesn't delay the others. Nodes count as a
        // namespace. Within a namespace, the warning that is most overdue comes first, so that none starves. If
        // several are equally overdue, Nodes come before other objects.
        let last = |warning| self.last_attempts.get(&namespace(warning)).copied();
        let is_service = |warning: &ObjectWarning| warning.regarding.kind != Kind::Node;
        let (warning, _) = due
            .filter(|_| self.tokens > 0)
            .min_by_key(|(warning, due)| (last(warning), **due, is_service(warning)))?;
        Some(warning.clone())
    }

    /// Records that the Event for a warning was sent.
    pub(super) fn sent(&mut self, warning: &ObjectWarning, now: Instant) {
        self.tokens -= 1;
        self.last_attempts.insert(namespace(warning), now);
        if let Some(due) = self.due.get_mut(warning) {
            *due = now + RESEND_INTERVAL;
        }
    }

    /// Records that the Event for a warning could not be sent. Nothing is sent during the pause. After the
    /// pause, other Events come first, since the failure may be specific to this one's namespace.
    pub(super) fn failed(&mut self, warning: &ObjectWarning, pause: Duration, now: Instant) {
        self.paused_until = Some(now + pause);
        self.last_attempts.insert(namespace(warning), now);
        if let Some(due) = self.due.get_mut(warning) {
            *due = now + pause;
        }
    }
}

/// Returns the namespace of the object that a warning is about; empty for a Node.
fn namespace(warning: &ObjectWarning) -> Arc<str> {
    Arc::clone(&warning.regarding.name.namespace)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        events::tests::conflict_warning as warning,
        model::{ObjectId, ObjectName},
    };

    const INTERVAL: Duration = Duration::from_secs(30);

    /// Returns a queue that contains the given warnings, and a time by which all of them are due.
    fn queue(
        burst: u32,
        warnings: impl IntoIterator<Item = ObjectWarning>,
    ) -> (EventQueue, Instant) {
        let start = Instant::now();
        let mut queue = EventQueue::new(burst, INTERVAL, start);
        queue.replace(warnings, start);
        (queue, start + MIN_AGE + MAX_JITTER)
    }

    fn send_due(queue: &mut EventQueue, now: Instant) -> Vec<String> {
        let mut names = Vec::new();
        while let Some(warning) = queue.next_due(now) {
            queue.sent(&warning, now);
            names.push(warning.regarding.name.name.to_string());
        }
        names
    }

    #[tokio::test]
    async fn an_unresolved_warning_is_sent_again_before_its_event_expires() {
        let (mut queue, all_due) = queue(5, [warning("a")]);
        let second = Duration::from_secs(1);
        assert!(send_due(&mut queue, all_due - MIN_AGE - MAX_JITTER + second).is_empty());
        assert_eq!(send_due(&mut queue, all_due), ["a"]);

        queue.replace([warning("a"), warning("b")], all_due);

        let later = all_due + MIN_AGE + MAX_JITTER;
        assert_eq!(send_due(&mut queue, later), ["b"]);
        assert!(send_due(&mut queue, all_due + RESEND_INTERVAL - second).is_empty());
        assert_eq!(send_due(&mut queue, all_due + RESEND_INTERVAL), ["a"]);
    }

    #[tokio::test]
    async fn a_warning_that_is_resolved_before_it_was_sent_is_dropped() {
        let (mut queue, all_due) = queue(5, [warning("a")]);

        queue.replace([], all_due);

        assert!(send_due(&mut queue, all_due + RESEND_INTERVAL).is_empty());
    }

    #[tokio::test]
    async fn the_rate_of_events_is_limited() {
        let (mut queue, now) = queue(2, ["a", "b", "c", "d"].map(warning));

        let mut names = send_due(&mut queue, now);
        assert_eq!(names.len(), 2);
        names.extend(send_due(&mut queue, now + INTERVAL));
        assert_eq!(names.len(), 3);
        assert!(send_due(&mut queue, now + INTERVAL).is_empty());
        names.extend(send_due(&mut queue, now + INTERVAL * 2));
        names.sort();
        assert_eq!(names, ["a", "b", "c", "d"]);
    }

    #[tokio::test]
    async fn very_many_warnings_are_all_sent_and_nodes_come_first() {
        let services = (0..2 * MAX_QUEUED).map(|number| warning(&number.to_string()));
        let of_node = ObjectWarning {
            regarding: ObjectId::new(Kind::Node, ObjectName::new("", "edge-1")),
            uid: None,
            ..warning("a")
        };
        let (mut queue, mut now) = queue(1, services.chain([of_node]));

        let mut names = std::collections::BTreeSet::new();
        // The Event for the Node is sent again every 40 intervals.
        for _ in 0..MAX_QUEUED + MAX_QUEUED / 40 {
            names.extend(send_due(&mut queue, now));
            now += INTERVAL;
        }

        assert_eq!(names.len(), MAX_QUEUED);
        assert!(names.contains("edge-1"));
    }

    #[tokio::test]
    async fn very_many_warnings_about_nodes_leave_room_for_others() {
        let of_node = |number: usize| ObjectWarning {
            regarding: ObjectId::new(Kind::Node, ObjectName::new("", format!("edge-{number}"))),
            uid: None,
            ..warning("a")
        };
        let of_nodes = (0..2 * MAX_QUEUED).map(of_node);

        let (queue, _) = queue(1, of_nodes.clone().chain([warning("service")]));
        assert_eq!(queue.due.len(), MAX_QUEUED);
        let has_service = |queue: &EventQueue| queue.due.contains_key(&warning("service"));
        assert!(has_service(&queue));

        let services = (0..2 * MAX_QUEUED).map(|number| warning(&number.to_string()));
        let queue = self::queue(1, of_nodes.chain(services)).0;
        let nodes = queue
            .due
            .keys()
            .filter(|it| it.regarding.kind == Kind::Node);
        assert_eq!(nodes.count(), MAX_QUEUED / 2);
        assert_eq!(queue.due.len(), MAX_QUEUED);
    }

    #[tokio::test]
    async fn a_namespace_with_very_many_warnings_does_not_delay_or_displace_those_of_others() {
        let in_namespace = |namespace: &str, name: &str| ObjectWarning {
            regarding: ObjectId::new(Kind::Service, ObjectName::new(namespace, name)),
            ..warning(name)
        };
        let many = (0..2 * MAX_QUEUED).map(|number| in_namespace("a", &number.to_string()));
        let others = [in_namespace("b", "b-1"), in_namespace("c", "c-1")];
        let (mut queue, now) = queue(1, many.clone().chain(others.clone()));
        assert_eq!(queue.due.len(), MAX_QUEUED);
        let mut names = send_due(&mut queue, now);
        for times in 1..3 {
            names.extend(send_due(&mut queue, now + INTERVAL * times));
        }
        names.sort();
        assert_eq!(names[1..], ["b-1", "c-1"]);

        // A namespace that had its turn comes after one that had none, even with older warnings.
        let later = now + INTERVAL * 3;
        let new = in_namespace("d", "d-1");
        queue.replace(many.chain(others).chain([new]), later);
        let due = later + MIN_AGE + MAX_JITTER;
        assert_eq!(send_due(&mut queue, due), ["d-1"]);
    }

    #[tokio::test]
    async fn a_warning_that_can_not_be_sent_does_not_block_the_others() {
        let (mut queue, now) = queue(5, ["a", "b"].map(warning));
        let first = queue.next_due(now).expect("due");

        queue.failed(&first, INTERVAL, now);

        let next = queue.next_due(now + INTERVAL).expect("due");
        assert_ne!(next, first);
    }

    #[tokio::test]
    async fn warnings_about_objects_that_the_api_server_lacks_are_dropped() {
        let of_a_file = ObjectWarning {
            uid: None,
            ..warning("a")
        };
        let (mut queue, all_due) = queue(2, [of_a_file]);

        assert!(send_due(&mut queue, all_due + RESEND_INTERVAL).is_empty());
    }
}
