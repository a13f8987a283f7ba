//! Limits the open connections of an HTTP listener, and decides which connection a new one replaces.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use tokio::task::AbortHandle;

use super::client::{Client, ROOT};

/// The open connections of a listener, oldest first.
#[derive(Debug)]
pub(super) struct ConnectionLimit {
    max: usize,
    open: VecDeque<OpenConnection>,
}

/// An open connection.
#[derive(Debug)]
struct OpenConnection {
    source: Option<Client>,
    has_sent_request: SentRequest,
    task: AbortHandle,
}

/// A flag that becomes true once a client has sent a complete request over its connection.
pub(super) type SentRequest = Arc<AtomicBool>;

impl ConnectionLimit {
    /// Creates a limit of `max` connections.
    pub(super) const fn new(max: usize) -> Self {
        Self {
            max,
            open: VecDeque::new(),
        }
    }

    /// Makes room for a connection from a source by closing another one if necessary. A source may have half
    /// of all connections; beyond that, it loses one of its own. If all connections are in use, the source
    /// that has most of them loses one. A source thus can't displace the only connection of another source,
    /// unless all sources have only one. The oldest connection over which no request has been sent is closed
    /// first.
    pub(super) fn make_room(&mut self, source: Option<Client>) {
        self.open
            .retain(|connection| !connection.task.is_finished());
        let mut counts = HashMap::<_, usize>::new();
        for connection in &self.open {
            *counts.entry(connection.source).or_default() += 1;
        }
        let own = counts.get(&source).copied().unwrap_or(0);
        let loser = if source.is_some() && own >= self.max.div_ceil(2) {
            source
        } else if self.open.len() >= self.max {
            // Among equal sources, the one with the oldest connection loses. Root's processes, such as the kubelet,
            // lose no connection to others.
            let may_lose = |it: &Option<Client>| *it != Some(ROOT) || source == *it;
            let sources = self.open.iter().map(|connection| connection.source).rev();
            let sources = sources.filter(may_lose);
            let count = |source: &Option<Client>| counts.get(source).copied();
            let Some(loser) = sources.max_by_key(count) else {
                return;
            };
            loser
        } else {
            return;
        };
        let is_losing = |connection: &OpenConnection| connection.source == loser;
        let is_waiting = |connection: &OpenConnection| {
            is_losing(connection) && !connection.has_sent_request.load(Ordering::Relaxed)
        };
        let waiting = self.open.iter().position(is_waiting);
        let closed = waiting.or_else(|| self.open.iter().position(is_losing));
        if let Some(closed) = closed.and_then(|index| self.open.remove(index)) {
            closed.task.abort();
        }
    }

    /// Adds a connection that a task serves.
    pub(super) fn add(
        &mut self,
        source: Option<Client>,
        has_sent_request: SentRequest,
        task: AbortHandle,
    ) {
        self.open.push_back(OpenConnection {
            source,
            has_sent_request,
            task,
        });
    }
}

#[cfg(test)]
mod tests {
    use std::future::pending;

    use tokio::task::{JoinSet, yield_now};

    use super::*;

    /// Connections with a limit of four.
    struct Fixture {
        limit: ConnectionLimit,
        tasks: JoinSet<()>,
        connections: Vec<AbortHandle>,
    }

    impl Fixture {
        fn new() -> Self {
            Self {
                limit: ConnectionLimit::new(4),
                tasks: JoinSet::new(),
                connections: Vec::new(),
            }
        }

        /// Opens a connection from an address, and returns the numbers of the open connections.
        async fn open(&mut self, source: &'static str, has_sent_request: bool) -> Vec<usize> {
            let client = match source {
                "root" => Some(ROOT),
                "user" => Some(Client::User(1000)),
                _ => source.parse().ok().map(Client::of_address),
            };
            self.limit.make_room(client);
            let task = self.tasks.spawn(pending::<()>());
            let sent = Arc::new(AtomicBool::new(has_sent_request));
            self.limit.add(client, sent, task.clone());
            self.connections.push(task);
            // The runtime ends an aborted task at the next opportunity.
            yield_now().await;
            let numbered = self.connections.iter().enumerate();
            let open = numbered.filter(|(_, task)| !task.is_finished());
            open.map(|(number, _)| number).collect()
        }
    }

    #[tokio::test]
    async fn a_source_beyond_its_share_displaces_its_own_oldest_connection() {
        let mut fixture = Fixture::new();
        fixture.open("192.0.2.1", false).await;
        for last in 1..20 {
            let open = fixture.open("192.0.2.9", false).await;
            let wanted = if last == 1 {
                vec![0, 1]
            } else {
                vec![0, last - 1, last]
            };
            assert_eq!(open, wanted);
        }
    }

    #[tokio::test]
    async fn the_source_with_most_connections_makes_room_for_another() {
        let mut fixture = Fixture::new();
        for source in ["192.0.2.1", "192.0.2.2", "192.0.2.3", "192.0.2.3"] {
            fixture.open(source, false).await;
        }
        assert_eq!(fixture.open("192.0.2.4", false).await, [0, 1, 3, 4]);
        // All sources have one connection.
        assert_eq!(fixture.open("192.0.2.5", false).await, [1, 3, 4, 5]);
    }

    #[tokio::test]
    async fn a_connection_over_which_a_request_was_sent_is_closed_last() {
        let mut fixture = Fixture::new();
        fixture.open("192.0.2.1", true).await;
        fixture.open("192.0.2.1", false).await;
        assert_eq!(fixture.open("192.0.2.1", true).await, [0, 2]);
        assert_eq!(fixture.open("192.0.2.1", true).await, [2, 3]);
    }

    #[tokio::test]
    async fn the_addresses_of_a_64_bit_prefix_share_one_share() {
        let mut fixture = Fixture::new();
        fixture.open("2001:db8::1", false).await;
        fixture.open("2001:db8::2", false).await;
        assert_eq!(fixture.open("2001:db8::3", false).await, [1, 2]);
        assert_eq!(fixture.open("2001:db8:0:1::1", false).await, [1, 2, 3]);
        // A mapped address is an IPv4 address.
        assert_eq!(fixture.open("::ffff:192.0.2.1", false).await, [1, 2, 3, 4]);
    }

    #[tokio::test]
    async fn root_loses_no_connection_to_other_clients() {
        let mut fixture = Fixture::new();
        for source in ["root", "root", "192.0.2.1", "user"] {
            fixture.open(source, false).await;
        }
        assert_eq!(fixture.open("192.0.2.2", false).await, [0, 1, 3, 4]);
        assert_eq!(fixture.open("user", false).await, [0, 1, 4, 5]);
        // Root may have half of the connections itself.
        assert_eq!(fixture.open("root", false).await, [1, 4, 5, 6]);
    }

    #[tokio::test]
    async fn clients_without_an_address_share_all_connections() {
        let mut fixture = Fixture::new();
        for _ in 0..4 {
            fixture.open("a unix socket", false).await;
        }
        assert_eq!(fixture.open("a unix socket", false).await, [1, 2, 3, 4]);
    }
}
