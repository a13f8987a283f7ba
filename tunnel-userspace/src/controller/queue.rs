//! The requests that wait for the controller.

use std::{
    collections::HashMap,
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};

use k8s_openapi::api::certificates::v1::CertificateSigningRequest;
use tokio::{sync::Notify, time::Instant};

use super::{requests, table::NODE_NAME};
use crate::identity::request::MAX_REQUEST;

/// The delay before a request is handled again whose handling has failed.
pub(super) const RETRY_DELAY: Duration = Duration::from_secs(5);

/// The user that made a request, and the Node that its token is bound to. All agents have the same account.
type Requester = (String, String);

/// A request that waits.
struct Waiting {
    request: CertificateSigningRequest,
    /// Its place in the queue: the round, and its place in that. Each requester has one request in a round, so that one that
    /// makes many delays only its own.
    place: (u64, u64),
    /// The time before which it is not handled.
    due: Instant,
}

/// The state of the queue.
#[derive(Default)]
struct State {
    waiting: HashMap<String, Waiting>,
    /// The last round in which each requester has a request.
    last_rounds: HashMap<Requester, u64>,
    /// The round of the request that was removed last.
    round: u64,
    next: u64,
}

impl State {
    /// Returns the place of a new request.
    fn next_place(&mut self, request: &CertificateSigningRequest) -> (u64, u64) {
        // Requesters without a request in this round or a later one begin anyway in this one.
        let now = self.round;
        self.last_rounds.retain(|_, last| *last >= now);
        let round = match self.last_rounds.get(&requester(request)) {
            Some(last) => last + 1,
            None => now,
        };
        self.last_rounds.insert(requester(request), round);
        self.next += 1;
        (round, self.next)
    }
}

fn requester(request: &CertificateSigningRequest) -> Requester {
    let user = request.spec.username.clone().unwrap_or_default();
    let extra = request.spec.extra.as_ref();
    let nodes = extra.and_then(|extra| extra.get(NODE_NAME));
    (user, nodes.map(|nodes| nodes.concat()).unwrap_or_default())
}

/// The requests that wait, by their names. A newer version of a request takes the place of an older one, so there are at most as
/// many as the API server has.
#[derive(Default)]
pub(super) struct Queue {
    state: Mutex<State>,
    /// Wakes the task that handles the requests once there is another one.
    pub(super) changed: Notify,
}

impl Queue {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds or replaces a request. One that is done, or has been deleted, is removed.
    pub(super) fn push(&self, mut request: CertificateSigningRequest, is_deleted: bool) {
        let name = request.metadata.name.clone().unwrap_or_default();
        let mut state = self.state();
        if is_deleted || requests::is_done(&request) {
            state.waiting.remove(&name);
            return;
        }
        // The API server keeps the field, whatever a write contains, and a larger request is denied.
        request.spec.request.0.truncate(MAX_REQUEST + 1);
        let place = match state.waiting.get(&name) {
            Some(older) => older.place,
            None => state.next_place(&request),
        };
        let due = Instant::now();
        let waiting = Waiting {
            request,
            place,
            due,
        };
        state.waiting.insert(name, waiting);
        self.changed.notify_one();
    }

    /// Puts back a request whose handling has failed, unless there is a newer version of it.
    pub(super) fn put_back(&self, request: CertificateSigningRequest) {
        let name = request.metadata.name.clone().unwrap_or_default();
        let mut state = self.state();
        if state.waiting.contains_key(&name) {
            return;
        }
        let (place, due) = (state.next_place(&request), Instant::now() + RETRY_DELAY);
        let waiting = Waiting {
            request,
            place,
            due,
        };
        state.waiting.insert(name, waiting);
    }

    /// Removes the next request, and returns it and the number of the others.
    pub(super) fn pop(&self) -> (Option<CertificateSigningRequest>, usize) {
        let mut state = self.state();
        let now = Instant::now();
        let due = state.waiting.iter().filter(|(_, it)| it.due <= now);
        let first = due.min_by_key(|(_, it)| it.place);
        let first = first.map(|(name, it)| (name.clone(), it.place));
        let request = first.and_then(|(name, (round, _))| {
            state.round = state.round.max(round);
            state.waiting.remove(&name)
        });
        (request.map(|it| it.request), state.waiting.len())
    }
}

#[cfg(test)]
mod tests {
    use k8s_openapi::{
        ByteString, api::certificates::v1::CertificateSigningRequestSpec,
        apimachinery::pkg::apis::meta::v1::ObjectMeta,
    };
    use tokio::time::advance;

    use super::*;

    /// Returns a request of the agent on a node.
    fn request(name: &str, node: &str) -> CertificateSigningRequest {
        CertificateSigningRequest {
            metadata: ObjectMeta {
                name: Some(name.to_owned()),
                ..ObjectMeta::default()
            },
            spec: CertificateSigningRequestSpec {
                username: Some("agents".to_owned()),
                extra: Some([(NODE_NAME.to_owned(), vec![node.to_owned()])].into()),
                ..CertificateSigningRequestSpec::default()
            },
            status: None,
        }
    }

    fn names(queue: &Queue) -> Vec<String> {
        let next = || {
            let request = queue.pop().0?;
            request.metadata.name
        };
        std::iter::from_fn(next).collect()
    }

    #[tokio::test]
    async fn requests_are_handled_in_order_and_a_newer_version_keeps_the_place() {
        let queue = Queue::default();
        for name in ["a", "b", "c", "d"] {
            queue.push(request(name, name), false);
        }
        let mut newer = request("b", "b");
        newer.spec.request = ByteString(vec![7; 3 * MAX_REQUEST]);
        queue.push(newer, false);
        queue.push(request("c", "c"), true);

        assert_eq!(queue.pop().1, 2);
        let (second, rest) = queue.pop();
        let second = second.expect("a request");
        assert_eq!(second.metadata.name.as_deref(), Some("b"));
        assert_eq!(second.spec.request.0.len(), MAX_REQUEST + 1);
        assert_eq!((rest, names(&queue)), (1, vec!["d".to_owned()]));
    }

    #[tokio::test]
    async fn a_requester_with_many_requests_delays_only_its_own() {
        let queue = Queue::default();
        for number in 0..100 {
            queue.push(request(&format!("flood-{number}"), "hostile"), false);
        }
        assert_eq!(queue.pop().1, 99);
        queue.push(request("a", "a"), false);
        queue.push(request("b", "b"), false);
        queue.push(request("a2", "a"), false);

        let order = names(&queue);

        let at = |name: &str| order.iter().position(|it| it == name).expect("handled");
        assert!(at("a") < 2 && at("b") < 3 && at("a2") < 5, "{order:?}");
        assert_eq!(order.len(), 102);
        assert!(queue.state().last_rounds.len() <= 3);
        queue.push(request("c", "c"), false);
        assert_eq!(
            queue.state().last_rounds.len(),
            2,
            "only rounds that matter"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn a_request_that_has_failed_waits_unless_there_is_a_newer_version() {
        let queue = Queue::default();
        queue.put_back(request("a", "a"));
        queue.push(request("b", "b"), false);
        assert_eq!(names(&queue), ["b"]);
        advance(RETRY_DELAY).await;
        assert_eq!(names(&queue), ["a"]);

        let mut newer = request("a", "a");
        newer.metadata.resource_version = Some("2".to_owned());
        queue.push(newer, false);
        queue.put_back(request("a", "a"));
        let (found, _) = queue.pop();
        let version = found.and_then(|request| request.metadata.resource_version);
        assert_eq!(version.as_deref(), Some("2"));
    }
}
