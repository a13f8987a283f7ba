//! Decides which Event is sent next, and when.

use std::{collections::BTreeMap, time::Duration};

use tokio::time::Instant;

use crate::model::{Concern, Kind};

/// The minimum age of a warning when its Event is sent.
const SETTLED: Duration = Duration::from_secs(2);

/// The maximum random delay beyond that age, so that not all nodes send the same Event at once.
const SPREAD: Duration = Duration::from_secs(8);

/// The interval at which an unresolved warning is sent again, as Events expire after an hour
/// (kube-apiserver `--event-ttl`).
const AGAIN: Duration = Duration::from_secs(20 * 60);

/// The maximum number of queued warnings.
const MOST: usize = 1000;

/// The warnings to send as Events, at a limited rate.
#[derive(Debug)]
pub(super) struct Queue {
    /// The time when each warning is due.
    due: BTreeMap<Concern, Instant>,
    burst: u32,
    every: Duration,
    /// The number of Events that may be sent now.
    tokens: u32,
    /// The start of the interval after which the next token is added.
    since: Instant,
    /// The end of the delay after a failure; no Event is sent before.
    waiting: Option<Instant>,
}

impl Queue {
    /// Creates an empty queue that permits `burst` Events at once, and then one per interval.
    pub(super) const fn new(burst: u32, every: Duration, now: Instant) -> Self {
        Self {
            due: BTreeMap::new(),
            burst,
            every,
            tokens: burst,
            since: now,
            waiting: None,
        }
    }

    /// Replaces the queued warnings. Those that were already queued keep their due time. Warnings about
    /// objects that the API server doesn't have are dropped.
    pub(super) fn take(&mut self, concerns: impl IntoIterator<Item = Concern>, now: Instant) {
        let mut last = std::mem::take(&mut self.due);
        let is_of_node = |concern: &Concern| concern.about.kind == Kind::Node;
        // Nodes come first, since a problem of a node may cause problems of very many Services.
        let (of_nodes, others): (Vec<_>, Vec<_>) = concerns.into_iter().partition(is_of_node);
        let others = others.into_iter().filter(|concern| concern.uid.is_some());
        for concern in of_nodes.into_iter().chain(others).take(MOST) {
            let spread = SPREAD.mul_f64(fastrand::f64());
            let due = last
                .remove(&concern)
                .unwrap_or_else(|| now + SETTLED + spread);
            self.due.insert(concern, due);
        }
    }

    /// Returns the warning to send next, if one is due and the rate limit permits it.
    pub(super) fn due(&mut self, now: Instant) -> Option<Concern> {
        if self.waiting.is_some_and(|until| now < until) {
            return None;
        }
        while self.tokens < self.burst && now.duration_since(self.since) >= self.every {
            self.tokens += 1;
            self.since += self.every;
        }
        if self.tokens == self.burst {
            self.since = now;
        }
        let due = self.due.iter().filter(|(_, due)| **due <= now);
        // The longest overdue warning comes first, so that none starves; at a tie, a Node comes before a
        // Service.
        let is_service = |concern: &Concern| concern.about.kind != Kind::Node;
        let (concern, _) = due
            .filter(|_| self.tokens > 0)
            .min_by_key(|(concern, due)| (**due, is_service(concern)))?;
        Some(concern.clone())
    }

    /// Records that an Event was sent.
    pub(super) fn told(&mut self, concern: &Concern, now: Instant) {
        self.tokens -= 1;
        if let Some(due) = self.due.get_mut(concern) {
            *due = now + AGAIN;
        }
    }

    /// Records that an Event could not be sent. Nothing is sent during the pause. After it, other Events
    /// come first, since the failure may concern only this one's namespace.
    pub(super) fn failed(&mut self, concern: &Concern, pause: Duration, now: Instant) {
        self.waiting = Some(now + pause);
        if let Some(due) = self.due.get_mut(concern) {
            *due = now + pause;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        events::tests::claimed as concern,
        model::{ObjectId, ObjectName},
    };

    const EVERY: Duration = Duration::from_secs(30);

    /// Returns a queue with these warnings, and the time when all of them are due.
    fn queue(burst: u32, concerns: impl IntoIterator<Item = Concern>) -> (Queue, Instant) {
        let start = Instant::now();
        let mut queue = Queue::new(burst, EVERY, start);
        queue.take(concerns, start);
        (queue, start + SETTLED + SPREAD)
    }

    fn told(queue: &mut Queue, now: Instant) -> Vec<String> {
        let mut names = Vec::new();
        while let Some(concern) = queue.due(now) {
            queue.told(&concern, now);
            names.push(concern.about.name.name.to_string());
        }
        names
    }

    #[tokio::test]
    async fn what_lasts_is_told_once_and_again_before_it_is_forgotten() {
        let (mut queue, settled) = queue(5, [concern("a")]);
        let second = Duration::from_secs(1);
        assert!(told(&mut queue, settled - SETTLED - SPREAD + second).is_empty());
        assert_eq!(told(&mut queue, settled), ["a"]);

        queue.take([concern("a"), concern("b")], settled);

        let later = settled + SETTLED + SPREAD;
        assert_eq!(told(&mut queue, later), ["b"]);
        assert!(told(&mut queue, settled + AGAIN - second).is_empty());
        assert_eq!(told(&mut queue, settled + AGAIN), ["a"]);
    }

    #[tokio::test]
    async fn what_is_over_before_it_was_told_is_not_told() {
        let (mut queue, settled) = queue(5, [concern("a")]);

        queue.take([], settled);

        assert!(told(&mut queue, settled + AGAIN).is_empty());
    }

    #[tokio::test]
    async fn only_so_many_are_told_at_a_time() {
        let (mut queue, now) = queue(2, ["a", "b", "c", "d"].map(concern));

        let mut names = told(&mut queue, now);
        assert_eq!(names.len(), 2);
        names.extend(told(&mut queue, now + EVERY));
        assert_eq!(names.len(), 3);
        assert!(told(&mut queue, now + EVERY).is_empty());
        names.extend(told(&mut queue, now + EVERY * 2));
        names.sort();
        assert_eq!(names, ["a", "b", "c", "d"]);
    }

    #[tokio::test]
    async fn of_very_many_each_has_its_turn_and_nodes_come_first() {
        let services = (0..2 * MOST).map(|number| concern(&number.to_string()));
        let of_node = Concern {
            about: ObjectId::new(Kind::Node, ObjectName::new("", "edge-1")),
            uid: None,
            ..concern("a")
        };
        let (mut queue, mut now) = queue(1, services.chain([of_node]));

        let mut names = std::collections::BTreeSet::new();
        for _ in 0..MOST {
            names.extend(told(&mut queue, now));
            now += EVERY;
        }

        assert_eq!(names.len(), MOST);
        assert!(names.contains("edge-1"));
    }

    #[tokio::test]
    async fn what_can_not_be_told_does_not_keep_the_rest_from_it() {
        let (mut queue, now) = queue(5, ["a", "b"].map(concern));
        let first = queue.due(now).expect("due");

        queue.failed(&first, EVERY, now);

        let next = queue.due(now + EVERY).expect("due");
        assert_ne!(next, first);
    }

    #[tokio::test]
    async fn objects_that_the_api_server_does_not_have_are_not_told_of() {
        let of_a_file = Concern {
            uid: None,
            ..concern("a")
        };
        let (mut queue, settled) = queue(2, [of_a_file]);

        assert!(told(&mut queue, settled + AGAIN).is_empty());
    }
}
