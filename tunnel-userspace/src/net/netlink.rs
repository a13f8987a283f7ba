//! Queries links, addresses and routes through rtnetlink(7), and changes routes.

use std::{io, path::PathBuf, pin::pin};

use futures_util::{Stream, StreamExt as _, TryStreamExt as _};
use rtnetlink::{
    Handle, MulticastGroup, new_multicast_connection,
    packet_core::{NLM_F_DUMP, NLM_F_DUMP_INTR, NLM_F_REQUEST, NetlinkMessage, NetlinkPayload},
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

/// The number of times that a list is requested because it changes meanwhile.
const MAX_LISTS: u32 = 5;

/// A list of links, addresses or routes.
struct List {
    entries: Vec<RouteNetlinkMessage>,
    /// False if entries may be missing, because the list changed meanwhile (`NLM_F_DUMP_INTR` in the kernel's
    /// `include/uapi/linux/netlink.h`). The kernel reports that for links and addresses.
    is_complete: bool,
}

/// Collects the entries of a list from the kernel's responses.
async fn collect(
    responses: impl Stream<Item = NetlinkMessage<RouteNetlinkMessage>>,
) -> Result<List, rtnetlink::Error> {
    let mut responses = pin!(responses);
    let (mut entries, mut is_complete) = (Vec::new(), true);
    while let Some(response) = responses.next().await {
        is_complete &= response.header.flags & NLM_F_DUMP_INTR == 0;
        if let NetlinkPayload::InnerMessage(entry) = response.payload {
            entries.push(entry);
        } else if let NetlinkPayload::Error(error) = response.payload {
            return Err(rtnetlink::Error::NetlinkError(error));
        } else {
            return Err(rtnetlink::Error::UnexpectedMessage(response));
        }
    }
    Ok(List {
        entries,
        is_complete,
    })
}

/// Requests a list until it is complete, at most [`MAX_LISTS`] times. Returns the last one.
async fn request_list<F: Future<Output = Result<List, rtnetlink::Error>>>(
    mut request: impl FnMut() -> F,
) -> Result<Vec<RouteNetlinkMessage>, rtnetlink::Error> {
    let mut list = request().await?;
    for _ in 1..MAX_LISTS {
        if list.is_complete {
            break;
        }
        list = request().await?;
    }
    // Another list follows in any case, since the kernel has sent a notification of the change.
    Ok(list.entries)
}

fn link_in(entry: RouteNetlinkMessage) -> Option<LinkMessage> {
    if let RouteNetlinkMessage::NewLink(link) = entry {
        Some(link)
    } else {
        None
    }
}

fn address_in(entry: RouteNetlinkMessage) -> Option<AddressMessage> {
    if let RouteNetlinkMessage::NewAddress(address) = entry {
        Some(address)
    } else {
        None
    }
}

fn route_in(entry: RouteNetlinkMessage) -> Option<RouteMessage> {
    if let RouteNetlinkMessage::NewRoute(route) = entry {
        Some(route)
    } else {
        None
    }
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
        let links = RouteNetlinkMessage::GetLink(LinkMessage::default());
        let links = self.list("the links", links, link_in).await?;
        let addresses = RouteNetlinkMessage::GetAddress(AddressMessage::default());
        let addresses = self.list("the addresses", addresses, address_in).await?;
        let mut routes = Vec::new();
        let families = [AddressFamily::Inet, AddressFamily::Inet6].into_iter();
        for family in families.filter(|_| with_routes) {
            let mut request = RouteMessage::default();
            request.header.address_family = family;
            let request = RouteNetlinkMessage::GetRoute(request);
            routes.extend(self.list("the routes", request, route_in).await?);
        }
        Ok(Snapshot::of(&links, &addresses, routes))
    }

    /// Lists all entries of a kind. If the list changes meanwhile, the kernel may leave out entries that didn't change, so the
    /// list is then requested again.
    async fn list<T>(
        &self,
        name: &'static str,
        request: RouteNetlinkMessage,
        parse: fn(RouteNetlinkMessage) -> Option<T>,
    ) -> Result<Vec<T>, NetError> {
        let list = request_list(|| {
            let mut message = NetlinkMessage::from(request.clone());
            message.header.flags = NLM_F_REQUEST | NLM_F_DUMP;
            let mut handle = self.handle.clone();
            async move { collect(handle.request(message)?).await }
        });
        let list = list.await.map_err(failed(format!("list {name}")))?;
        Ok(list.into_iter().filter_map(parse).collect())
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

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, stream};
    use rtnetlink::packet_core::{ErrorMessage, NetlinkHeader};

    use super::*;

    type Response = NetlinkMessage<RouteNetlinkMessage>;

    fn response(payload: NetlinkPayload<RouteNetlinkMessage>, flags: u16) -> Response {
        let mut header = NetlinkHeader::default();
        header.flags = flags;
        NetlinkMessage::new(header, payload)
    }

    /// Returns the response that describes a link.
    fn link(index: u32, is_interrupted: bool) -> Response {
        let mut link = LinkMessage::default();
        link.header.index = index;
        let payload = NetlinkPayload::InnerMessage(RouteNetlinkMessage::NewLink(link));
        response(payload, if is_interrupted { NLM_F_DUMP_INTR } else { 0 })
    }

    /// Requests a list of links from a kernel that responds with these lists in turn, and then with none.
    fn listed(lists: Vec<Vec<Response>>) -> Result<Vec<u32>, rtnetlink::Error> {
        let mut lists = lists.into_iter();
        let entries = request_list(|| collect(stream::iter(lists.next().unwrap_or_default())));
        let entries = entries.now_or_never().expect("all responses are there")?;
        let links = entries.into_iter().filter_map(link_in);
        Ok(links.map(|link| link.header.index).collect())
    }

    #[test]
    fn a_list_that_changed_meanwhile_is_requested_again() {
        let changed = |index| vec![link(1, false), link(index, true), link(9, false)];
        let complete = || vec![link(1, false), link(2, false)];

        let first = listed(vec![complete(), changed(3)]).expect("a list");
        assert_eq!(first, [1, 2]);
        let third = listed(vec![changed(3), changed(4), complete()]).expect("a list");
        assert_eq!(third, [1, 2]);
        let last = listed((3..=8).map(changed).collect()).expect("a list");
        assert_eq!(last, [1, 7, 9]);
    }

    #[test]
    fn an_error_of_the_kernel_ends_a_list() {
        let error = || response(NetlinkPayload::Error(ErrorMessage::default()), 0);
        for lists in [
            vec![vec![error()]],
            vec![vec![link(1, true)], vec![error()]],
        ] {
            let result = listed(lists);
            assert!(matches!(result, Err(rtnetlink::Error::NetlinkError(_))));
        }
    }
}
