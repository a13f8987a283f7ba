//! The connections and streams that clients hold, and the limits on how many one client may hold. A client that
//! opens many connections takes no room from the others, and none from the host itself, where the API server runs.

use std::{cmp::Reverse, collections::HashMap, net::IpAddr, sync::Arc};

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use tunnel_common::reason::Reason;

use crate::listen::source_of;

/// The part of a limit that only clients on the host may use: one of this many parts.
const HOST_PART: usize = 4;
/// The maximum number of a pod's streams while memory is scarce.
const MAX_IF_SCARCE: usize = 16;
/// The maximum number of clients in a view.
const MAX_IN_VIEW: usize = 5;

/// The origin of a client's connections.
#[derive(Clone, Copy, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub(super) enum Client {
    /// The host's network namespace.
    Host,
    /// A pod: its IPv4 address, or the /64 prefix of its IPv6 address.
    Pod(IpAddr),
}

impl Client {
    /// Returns the client that connects from an address, over the loopback interface or a pod's link.
    pub(super) fn new(address: IpAddr, is_loopback: bool) -> Self {
        if is_loopback {
            return Self::Host;
        }
        Self::Pod(source_of(address))
    }
}

/// The JSON view of a client that holds streams.
#[derive(Clone, Debug, Deserialize, Eq, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct ClientView {
    /// The pod's address, or `host` for all processes in the host's network namespace.
    pub client: String,
    /// The number of streams that it holds.
    pub streams: usize,
}

/// The connections that clients hold, and their streams: in all, and on each node.
#[derive(Debug, Default)]
pub(super) struct ClientShares {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// All connections, also those that have no stream yet.
    connections: Pool,
    streams: Pool,
    nodes: HashMap<Arc<str>, Pool>,
}

/// A number of connections or streams that clients share.
#[derive(Debug, Default)]
struct Pool {
    clients: HashMap<Client, usize>,
    total: usize,
}

/// A client's right to one connection, and later to one stream, released on drop.
#[derive(Debug)]
pub(super) struct ClientPermit {
    shares: Arc<ClientShares>,
    client: Client,
    /// The node of the stream, or `None` if the connection has no stream yet.
    node: Option<Arc<str>>,
}

/// The limits for a new stream.
#[derive(Clone, Copy, Debug)]
pub(super) struct StreamLimits {
    /// The maximum number of streams on the node.
    pub(super) of_node: usize,
    /// True if streams have buffered so many bytes that pods with many streams get no more.
    pub(super) is_memory_scarce: bool,
}

/// The error for a client that holds its share already.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub(super) enum ShareExceeded {
    #[error("the client holds {held} of the {limit} {whole}, and may hold no more")]
    Streams {
        held: usize,
        limit: usize,
        whole: &'static str,
    },
    #[error(
        "the client holds {0} streams, and slow receivers use up tunnel.session.maxBufferedBytes"
    )]
    Memory(usize),
}

impl ShareExceeded {
    pub(super) const fn reason(&self) -> Reason {
        match self {
            Self::Streams { .. } => Reason::ClientShareExceeded,
            Self::Memory(_) => Reason::MemoryLimit,
        }
    }
}

impl ClientShares {
    /// Admits a client's new connection to the ingress, of whose connections there are at most `limit`.
    ///
    /// A pod may hold half of what other clients leave free, and all pods together three quarters, so that
    /// the host always has room. The same holds for the streams of a node.
    pub(super) fn admit(
        self: &Arc<Self>,
        client: Client,
        limit: usize,
    ) -> Result<ClientPermit, ShareExceeded> {
        let connections = &mut self.state.lock().connections;
        connections.check(client, limit, "connections of the ingress")?;
        connections.add(client);
        Ok(ClientPermit {
            shares: Arc::clone(self),
            client,
            node: None,
        })
    }

    /// Returns the number of streams that all clients hold.
    pub(super) fn total(&self) -> usize {
        self.state.lock().streams.total
    }

    /// Returns the clients that hold the most streams on a node.
    pub(super) fn of_node(&self, node: &str) -> Vec<ClientView> {
        let state = self.state.lock();
        let clients = state.nodes.get(node).map(|pool| &pool.clients);
        let mut clients: Vec<_> = clients.into_iter().flatten().collect();
        clients.sort_by_key(|(client, streams)| (Reverse(**streams), **client));
        let view = |(client, streams): (&Client, &usize)| ClientView {
            client: match client {
                Client::Host => "host".to_owned(),
                Client::Pod(address) => address.to_string(),
            },
            streams: *streams,
        };
        clients.into_iter().take(MAX_IN_VIEW).map(view).collect()
    }
}

impl Pool {
    fn check(
        &self,
        client: Client,
        limit: usize,
        whole: &'static str,
    ) -> Result<(), ShareExceeded> {
        let held = self.held(client);
        let has_room = match client {
            // The limits of the sessions and of the ingress are enough.
            Client::Host => true,
            Client::Pod(_) => {
                let host = self.clients.get(&Client::Host).copied().unwrap_or(0);
                // The pods lack what the host uses beyond its part.
                let for_pods = limit - (limit / HOST_PART).max(host.min(limit));
                let free = for_pods.saturating_sub(self.total - host - held);
                held < free.div_ceil(2)
            }
        };
        has_room
            .then_some(())
            .ok_or(ShareExceeded::Streams { held, limit, whole })
    }

    fn held(&self, client: Client) -> usize {
        self.clients.get(&client).copied().unwrap_or(0)
    }

    fn add(&mut self, client: Client) {
        self.total += 1;
        *self.clients.entry(client).or_default() += 1;
    }

    fn remove(&mut self, client: Client) {
        if let Some(held) = self.clients.get_mut(&client) {
            self.total -= 1;
            *held -= 1;
            if *held == 0 {
                self.clients.remove(&client);
            }
        }
    }
}

impl ClientPermit {
    /// Takes a stream on `node` for the connection. While memory is scarce, a pod may hold a few streams.
    pub(super) fn take_stream(
        &mut self,
        node: &Arc<str>,
        limits: StreamLimits,
    ) -> Result<(), ShareExceeded> {
        let client = self.client;
        let state = &mut *self.shares.state.lock();
        let held = state.streams.held(client);
        if limits.is_memory_scarce && client != Client::Host && held >= MAX_IF_SCARCE {
            return Err(ShareExceeded::Memory(held));
        }
        let pool = state.nodes.entry(Arc::clone(node)).or_default();
        pool.check(client, limits.of_node, "streams of the node")?;
        pool.add(client);
        state.streams.add(client);
        self.node = Some(Arc::clone(node));
        Ok(())
    }
}

impl Drop for ClientPermit {
    fn drop(&mut self) {
        let state = &mut *self.shares.state.lock();
        state.connections.remove(self.client);
        let Some(node) = &self.node else {
            return;
        };
        state.streams.remove(self.client);
        if let Some(pool) = state.nodes.get_mut(node) {
            pool.remove(self.client);
            if pool.total == 0 {
                state.nodes.remove(node);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pod(last: u8) -> Client {
        Client::Pod([10, 0, 0, last].into())
    }

    /// A limit on connections that is never reached.
    const MANY: usize = 1_000_000;

    const fn limits(of_node: usize) -> StreamLimits {
        StreamLimits {
            of_node,
            is_memory_scarce: false,
        }
    }

    /// Admits a client's connection, and takes a stream on a node for it.
    fn take(
        shares: &Arc<ClientShares>,
        client: Client,
        node: &str,
        limits: StreamLimits,
    ) -> Result<ClientPermit, ShareExceeded> {
        let mut permit = shares.admit(client, MANY)?;
        permit.take_stream(&node.into(), limits)?;
        Ok(permit)
    }

    /// Takes as many streams on a node as a client can get.
    fn take_all(
        shares: &Arc<ClientShares>,
        held: &mut Vec<ClientPermit>,
        client: Client,
        limits: StreamLimits,
    ) -> usize {
        let before = held.len();
        let permits = std::iter::from_fn(|| take(shares, client, "edge-7", limits).ok());
        // The host has no limit here.
        held.extend(permits.take(limits.of_node.saturating_sub(before)));
        held.len() - before
    }

    #[test]
    fn a_pod_gets_half_of_what_is_free_and_the_host_has_the_rest() {
        let (shares, mut held) = (Arc::<ClientShares>::default(), Vec::new());
        let limits = limits(500);
        let mut take = |client| take_all(&shares, &mut held, client, limits);

        assert_eq!([pod(1), pod(2), pod(3)].map(&mut take), [188, 94, 47]);
        assert_eq!(take(pod(1)), 0, "no more than before");
        assert_eq!(take(Client::Host), 500 - 188 - 94 - 47);
        assert_eq!(take(pod(4)), 0, "the host has all of it");

        let view: Vec<_> = shares
            .of_node("edge-7")
            .into_iter()
            .map(|it| (it.client, it.streams))
            .collect();
        let own = |client: &str, streams| (client.to_owned(), streams);
        let most = [
            own("10.0.0.1", 188),
            own("host", 171),
            own("10.0.0.2", 94),
            own("10.0.0.3", 47),
        ];
        assert_eq!(view, most);
        held.clear();
        let state = shares.state.lock();
        assert!(state.connections.clients.is_empty() && state.connections.total == 0);
        assert!(
            state.nodes.is_empty() && state.streams.clients.is_empty() && state.streams.total == 0
        );
    }

    #[test]
    fn connections_without_a_stream_are_shared_likewise() {
        let shares = Arc::<ClientShares>::default();
        let admit = |client, most| {
            let permits = std::iter::from_fn(|| shares.admit(client, 40).ok());
            permits.take(most).collect::<Vec<_>>()
        };

        let pods: Vec<_> = (0..=255).map(|last| admit(pod(last), MANY)).collect();
        assert_eq!(
            pods.iter().map(Vec::len).take(3).collect::<Vec<_>>(),
            [15, 8, 4]
        );
        assert_eq!(pods.iter().map(Vec::len).sum::<usize>(), 30);
        assert_eq!(admit(Client::Host, 10).len(), 10);
        assert_eq!(shares.total(), 0, "no connection has a stream");

        let refused = shares.admit(pod(0), 40).expect_err("no room");
        assert_eq!(
            refused.to_string(),
            "the client holds 15 of the 40 connections of the ingress, and may hold no more"
        );
        drop(pods);
        drop(shares.admit(pod(0), 40).expect("room"));
    }

    #[test]
    fn a_refused_stream_names_the_limit_of_the_node() {
        let (shares, mut held) = (Arc::<ClientShares>::default(), Vec::new());
        assert_eq!(take_all(&shares, &mut held, pod(1), limits(40)), 15);
        let refused = take(&shares, pod(1), "edge-7", limits(4)).expect_err("no room");
        assert_eq!(
            refused.to_string(),
            "the client holds 15 of the 4 streams of the node, and may hold no more"
        );
    }

    #[test]
    fn a_pod_with_many_streams_gets_no_more_while_memory_is_scarce() {
        let (shares, mut held) = (Arc::<ClientShares>::default(), Vec::new());
        let scarce = StreamLimits {
            is_memory_scarce: true,
            ..limits(500)
        };

        assert_eq!(take_all(&shares, &mut held, pod(1), scarce), 16);
        assert_eq!(take_all(&shares, &mut held, pod(2), scarce), 16);
        assert_eq!(take_all(&shares, &mut held, Client::Host, scarce), 468);
        let refused = take(&shares, pod(1), "edge-8", scarce);
        let refused = refused.expect_err("too many");
        assert_eq!(refused.reason(), Reason::MemoryLimit);
        let again = take(&shares, pod(1), "edge-8", limits(500));
        assert!(again.is_ok(), "memory is no longer scarce");
    }

    #[test]
    fn many_pods_leave_a_quarter_to_the_host() {
        let (shares, mut held) = (Arc::<ClientShares>::default(), Vec::new());
        for last in 0..=255 {
            take_all(&shares, &mut held, pod(last), limits(500));
        }
        assert_eq!(held.len(), 375);
        assert_eq!(take_all(&shares, &mut held, Client::Host, limits(500)), 125);
    }

    #[test]
    fn a_client_is_the_host_or_an_address_or_a_prefix_of_64_bits() {
        let client = |address: &str, is_loopback| {
            Client::new(address.parse().expect("an address"), is_loopback)
        };
        assert_eq!(client("10.0.0.1", true), Client::Host);
        assert_eq!(client("::ffff:10.0.0.1", false), pod(1));
        assert_eq!(client("fd00::1:2", false), client("fd00::3:4", false));
        assert_ne!(client("fd00::1:2", false), client("fd00:0:0:1::2", false));
    }
}
