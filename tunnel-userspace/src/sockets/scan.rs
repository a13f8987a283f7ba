//! Scans all connected sockets and terminates the stale ones.

use std::{
    collections::{BTreeMap, BTreeSet, HashMap},
    io,
    path::Path,
    sync::Arc,
    thread,
};

use serde::{Deserialize, Serialize};
use tokio::task::spawn_blocking;
use tracing::debug;
use tunnel_common::{addr::Protocol, origin::Origin, reason::Reason};

use super::{
    TranslatedSocket, TranslationMaps, namespaces,
    stale::{StaleSearch, SuspectFilter},
};
use crate::{
    error_chain::chain,
    net::{DiagError, ListedSocket, SockDiag, SocketFilter},
};

const PROC: &str = "/proc";

/// The network namespaces in which a scan terminates sockets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ScanScope {
    /// The network namespace of this process.
    Own,
    /// All network namespaces except this process's own. The helper uses this scope because it shares its
    /// network namespace with the daemon, which terminates and counts the sockets there itself.
    Others,
    /// All network namespaces.
    All,
}

/// The result of a scan.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct ScanReport {
    /// The number of sockets that were terminated.
    pub(super) ended: u64,
    /// The number of sockets that appear to be stale but are in namespaces that were not entered.
    pub(super) left: usize,
    /// The first error, if any occurred.
    pub(super) problem: Option<String>,
    /// True if retrying the scan may succeed.
    #[serde(rename = "again")]
    pub(super) is_retryable: bool,
}

fn cannot(step: &'static str) -> impl FnOnce(io::Error) -> DiagError {
    move |source| DiagError::Step { step, source }
}

const READ_TRANSLATIONS: &str = "read the translations of sockets";
const FIND_NAMESPACES: &str = "find the network namespaces";

/// The sockets in a network namespace that may be stale.
#[derive(Default)]
struct Suspects {
    /// The translations of the sockets that have a cookie, keyed by cookie.
    by_cookie: HashMap<u64, Origin>,
    /// The protocols of the sockets that have no cookie yet. The kernel creates cookies on demand, for
    /// example when sock_diag lists a socket.
    without_cookie: Vec<Protocol>,
}

impl Suspects {
    fn insert(&mut self, socket: &TranslatedSocket) {
        if socket.cookie == 0 {
            self.without_cookie.push(socket.origin.protocol);
        } else {
            self.by_cookie.insert(socket.cookie, socket.origin);
        }
    }

    fn len(&self) -> usize {
        self.by_cookie.len() + self.without_cookie.len()
    }

    /// Returns true if any of the suspects uses the given protocol.
    fn has(&self, protocol: Protocol) -> bool {
        let mut named = self.by_cookie.values().map(|origin| origin.protocol);
        self.without_cookie.contains(&protocol) || named.any(|its| its == protocol)
    }
}

/// Scans for stale sockets and terminates them, on a blocking thread.
pub(super) async fn run<M: TranslationMaps + 'static>(
    scope: ScanScope,
    protocols: Vec<Protocol>,
    maps: Arc<M>,
) -> ScanReport {
    let ended = spawn_blocking(move || {
        scan(scope, &StaleSearch::new(&protocols, &*maps)).unwrap_or_else(|error| {
            let mut scan = ScanReport::default();
            scan.record_error(&error);
            scan
        })
    });
    ended.await.unwrap_or_else(|error| ScanReport {
        problem: Some(error.to_string()),
        is_retryable: true,
        ..ScanReport::default()
    })
}

fn scan(
    scope: ScanScope,
    search: &StaleSearch<'_, impl TranslationMaps>,
) -> Result<ScanReport, DiagError> {
    let mut scan = ScanReport::default();
    let mut suspects = search.suspects().map_err(cannot(READ_TRANSLATIONS))?;
    let own = namespaces::own().map_err(cannot(FIND_NAMESPACES))?;
    let here = suspects.remove(&own).filter(|_| scope != ScanScope::Others);
    if scope == ScanScope::Own || suspects.is_empty() {
        scan.left = suspects.values().map(Suspects::len).sum();
        if let Some(here) = here {
            scan.end_all(search, own, &here);
        }
        return Ok(scan);
    }
    thread::scope(|scope| {
        // This uses a separate thread, which never returns to its original namespace.
        let others_thread = thread::Builder::new().name("sockets".into());
        let others_thread = others_thread.spawn_scoped(scope, || search.scan_others(&suspects));
        if let Some(here) = here {
            scan.end_all(search, own, &here);
        }
        match others_thread.map(thread::ScopedJoinHandle::join) {
            Ok(Ok(others)) => scan.merge(others),
            Ok(Err(_panic)) => scan.record_error(&cannot("scan pods")(io::Error::other(
                "the thread panicked",
            ))),
            Err(error) => scan.record_error(&cannot("start a thread")(error)),
        }
    });
    Ok(scan)
}

impl<M: TranslationMaps> StaleSearch<'_, M> {
    /// Returns the sockets that may be stale, keyed by the inode number of their network namespace.
    fn suspects(&self) -> io::Result<BTreeMap<u32, Suspects>> {
        let mut filter = SuspectFilter::new(self);
        let mut suspects = BTreeMap::<u32, Suspects>::new();
        self.maps.sockets(&mut |socket| {
            if filter.may_be_stale(&socket)? {
                let there = suspects.entry(socket.namespace).or_default();
                there.insert(&socket);
            }
            Ok(())
        })?;
        Ok(suspects)
    }

    /// Enters the suspects' network namespaces one after another and terminates the stale sockets in each.
    fn scan_others(&self, suspects: &BTreeMap<u32, Suspects>) -> ScanReport {
        let mut scan = ScanReport {
            left: suspects.values().map(Suspects::len).sum(),
            ..ScanReport::default()
        };
        let numbers: BTreeSet<u32> = suspects.keys().copied().collect();
        let found = match namespaces::find(Path::new(PROC), &numbers) {
            Ok(found) => found,
            Err(error) => {
                scan.record_error(&cannot(FIND_NAMESPACES)(error));
                return scan;
            }
        };
        for (number, namespace) in found {
            let Some(there) = suspects.get(&number) else {
                continue;
            };
            match namespaces::enter(&namespace) {
                Ok(()) => {
                    scan.left -= there.len();
                    scan.end_all(self, number, there);
                }
                Err(errno) => scan.record_error(&cannot("enter a network namespace")(errno.into())),
            }
        }
        scan
    }
}

impl ScanReport {
    fn record_error(&mut self, error: &DiagError) {
        self.is_retryable |= error.is_retryable();
        self.problem.get_or_insert_with(|| chain(error));
    }

    fn merge(&mut self, other: Self) {
        self.ended += other.ended;
        self.left += other.left;
        self.is_retryable |= other.is_retryable;
        self.problem = self.problem.take().or(other.problem);
    }

    /// Terminates each suspect in the calling thread's network namespace that turns out to be stale.
    fn end_all<M: TranslationMaps>(
        &mut self,
        search: &StaleSearch<'_, M>,
        namespace: u32,
        suspects: &Suspects,
    ) {
        let mut diag = match SockDiag::open() {
            Ok(diag) => diag,
            Err(error) => return self.record_error(&error),
        };
        for protocol in search.protocols.iter().filter(|its| suspects.has(**its)) {
            let ended = if suspects.without_cookie.contains(protocol) {
                self.end_after_cookie_creation(*protocol, search, namespace, &mut diag)
            } else {
                self.end_with_cookie(*protocol, search, suspects, &mut diag)
            };
            // An error for one protocol, such as a missing kernel module, does not affect the other protocol.
            if let Err(error) = ended {
                self.record_error(&error);
            }
        }
    }

    /// Lists the sockets to make the kernel create their cookies, re-reads the translations, and terminates
    /// the stale sockets.
    fn end_after_cookie_creation<M: TranslationMaps>(
        &mut self,
        protocol: Protocol,
        search: &StaleSearch<'_, M>,
        namespace: u32,
        diag: &mut SockDiag,
    ) -> Result<(), DiagError> {
        diag.list(protocol, SocketFilter::Connected, |_socket| {})?;
        let mut named = search.suspects().map_err(cannot(READ_TRANSLATIONS))?;
        named.remove(&namespace).map_or(Ok(()), |suspects| {
            self.end_with_cookie(protocol, search, &suspects, diag)
        })
    }

    fn end_with_cookie<M: TranslationMaps>(
        &mut self,
        protocol: Protocol,
        search: &StaleSearch<'_, M>,
        suspects: &Suspects,
        diag: &mut SockDiag,
    ) -> Result<(), DiagError> {
        let mut found = Vec::new();
        diag.list(protocol, SocketFilter::Connected, |socket: ListedSocket| {
            if let Some(origin) = suspects.by_cookie.get(&socket.cookie()) {
                found.push((socket, *origin));
            }
        })?;
        for (socket, origin) in found {
            // An error with one socket does not stop the scan.
            match end(search, diag, &socket, &origin) {
                Ok(true) => self.ended += 1,
                Ok(false) => {}
                Err(error) => self.record_error(&error),
            }
        }
        Ok(())
    }
}

/// Terminates a socket if it is stale. Returns true if the socket was terminated.
fn end(
    search: &StaleSearch<'_, impl TranslationMaps>,
    diag: &mut SockDiag,
    socket: &ListedSocket,
    origin: &Origin,
) -> Result<bool, DiagError> {
    let is_stale = search
        .is_stale(socket, origin)
        .map_err(cannot(READ_TRANSLATIONS))?;
    let protocol = origin.protocol;
    if !is_stale || !diag.end(protocol, socket)? {
        return Ok(false);
    }
    let (address, port) = socket.peer();
    let (backend, port) = (address.to_ip(), port.to_host());
    let reason = Reason::SocketTerminated.label();
    debug!(%backend, port, protocol = protocol.number(), reason, "ended a socket");
    Ok(true)
}
