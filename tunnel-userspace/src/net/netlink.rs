//! Queries links, addresses and routes through rtnetlink(7), and changes routes.

use std::{io, path::PathBuf};

use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use rtnetlink::{
    Handle, MulticastGroup, new_multicast_connection,
    packet_core::NetlinkMessage,
    packet_route::{
        AddressFamily, RouteNetlinkMessage, address::AddressMessage, link::LinkMessage,
        route::RouteMessage, tc::TcMessage,
    },
};
use tokio::task::JoinSet;
use tracing::warn;

use super::{snapshot::Snapshot, steering_route::Route};

/// An error from querying or changing the node's network.
#[derive(Debug, thiserror::Error)]
pub enum NetError {
    /// The netlink socket can't be opened.
    #[error("cannot open a netlink socket")]
    Open(#[source] io::Error),
    /// The file that records Culvert's routes can't be read or written.
    #[error("cannot use the record of routes, {path}")]
    Record {
        /// The path of the file.
        path: PathBuf,
        /// The operating system's error.
        #[source]
        source: io::Error,
    },
    /// The recorded routes are in another network namespace.
    #[error(
        "the routes in the record {path} are in another network namespace ({namespace}) than this \
        process; run this command there, or remove the file if that namespace no longer exists"
    )]
    OtherNamespace {
        /// The path of the file.
        path: PathBuf,
        /// The inode of the routes' network namespace, as shown by `lsns`.
        namespace: u64,
    },
    /// Steering can't be disabled, or a guard can't be removed from a link.
    #[error("cannot disable steering, or remove a guard from a link")]
    Guard(#[source] Box<dyn std::error::Error + Send + Sync>),
    /// The kernel refused an operation.
    #[error("cannot {step}")]
    Step {
        /// The operation that failed.
        step: String,
        /// The kernel's error.
        #[source]
        source: rtnetlink::Error,
    },
}

fn failed(step: impl Into<String>) -> impl FnOnce(rtnetlink::Error) -> NetError {
    let step = step.into();
    move |source| NetError::Step { step, source }
}

type Messages = Box<dyn Stream<Item = NetlinkMessage<RouteNetlinkMessage>> + Send + Sync + Unpin>;

/// A netlink socket that is subscribed to network changes.
pub(super) struct NetworkMonitor {
    kernel: RouteSocket,
    with_routes: bool,
    messages: Messages,
}

/// A netlink socket for querying the network and changing routes.
pub(super) struct RouteSocket {
    handle: Handle,
    /// The task that drives the socket. It is aborted on drop.
    _connection: JoinSet<()>,
}

const LINKS_AND_ADDRESSES: [MulticastGroup; 3] = [
    MulticastGroup::Link,
    MulticastGroup::Ipv4Ifaddr,
    MulticastGroup::Ipv6Ifaddr,
];
const ROUTES: [MulticastGroup; 2] = [MulticastGroup::Ipv4Route, MulticastGroup::Ipv6Route];

impl NetworkMonitor {
    /// Opens a socket that is subscribed to changes to links and addresses, and to routes if `with_routes` is
    /// true.
    pub(super) fn open(with_routes: bool) -> Result<Self, NetError> {
        let mut groups = LINKS_AND_ADDRESSES.to_vec();
        if with_routes {
            groups.extend(ROUTES);
        }
        let (kernel, messages) = RouteSocket::connect(&groups)?;
        Ok(Self {
            kernel,
            with_routes,
            messages,
        })
    }

    /// Reopens the socket after it was closed. If that fails, the old socket is kept.
    pub(super) fn reopen(&mut self) {
        match Self::open(self.with_routes) {
            Ok(netlink) => *self = netlink,
            Err(error) => warn!(
                error = &error as &dyn std::error::Error,
                "cannot reopen the netlink socket"
            ),
        }
    }

    /// Queries the current links and addresses, and the routes if the socket is subscribed to them.
    pub(super) async fn snapshot(&self) -> Result<Snapshot, NetError> {
        self.kernel.snapshot(self.with_routes).await
    }

    /// Waits for a change. Returns false if the socket was closed.
    pub(super) async fn changed(&mut self) -> bool {
        self.messages.next().await.is_some()
    }
}

impl RouteSocket {
    /// Opens a socket without subscriptions.
    pub(super) fn open() -> Result<Self, NetError> {
        Self::connect(&[]).map(|(kernel, _)| kernel)
    }

    fn connect(groups: &[MulticastGroup]) -> Result<(Self, Messages), NetError> {
        let (connection, handle, messages) =
            new_multicast_connection(groups).map_err(NetError::Open)?;
        let mut task = JoinSet::new();
        task.spawn(connection);
        let kernel = Self {
            handle,
            _connection: task,
        };
        let messages = messages.map(|(message, _)| message);
        Ok((kernel, Box::new(messages)))
    }

    /// Queries the routes that a request selects.
    pub(super) fn routes(
        &self,
        request: RouteMessage,
    ) -> impl Stream<Item = Result<RouteMessage, rtnetlink::Error>> {
        self.handle.route().get(request).execute()
    }

    /// Queries the filters at tc ingress or egress of a link.
    pub(super) async fn filters(
        &self,
        link: u32,
        is_ingress: bool,
    ) -> Result<Vec<TcMessage>, NetError> {
        let link = i32::try_from(link).unwrap_or(i32::MAX);
        let request = self.handle.traffic_filter(link).get();
        let request = if is_ingress {
            request.ingress()
        } else {
            request.egress()
        };
        let filters = request.execute().try_collect().await;
        filters.map_err(failed("list the filters"))
    }

    /// Queries the current links and addresses, and the routes if `with_routes` is true.
    pub(super) async fn snapshot(&self, with_routes: bool) -> Result<Snapshot, NetError> {
        let links = self.handle.link().get().execute().try_collect().await;
        let links: Vec<LinkMessage> = links.map_err(failed("list the links"))?;
        let addresses = self.handle.address().get().execute().try_collect().await;
        let addresses: Vec<AddressMessage> = addresses.map_err(failed("list the addresses"))?;
        let mut routes = Vec::new();
        let families = [AddressFamily::Inet, AddressFamily::Inet6].into_iter();
        for family in families.filter(|_| with_routes) {
            let mut request = RouteMessage::default();
            request.header.address_family = family;
            let found = self
                .handle
                .route()
                .get(request)
                .execute()
                .try_collect()
                .await;
            let found: Vec<RouteMessage> = found.map_err(failed("list the routes"))?;
            routes.extend(found);
        }
        Ok(Snapshot::of(&links, &addresses, routes))
    }

    /// Adds a route, or replaces an existing one to the same destination.
    pub(super) async fn add(&self, route: &Route) -> Result<(), NetError> {
        let step = format!("add the route {route}");
        let request = self.handle.route().add(route.message());
        request.replace().execute().await.map_err(failed(step))
    }

    pub(super) async fn remove(&self, route: &RouteMessage) -> Result<(), NetError> {
        let removed = self.handle.route().del(route.clone()).execute().await;
        removed.map_err(failed("remove an old route of Culvert"))
    }
}
