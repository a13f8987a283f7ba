//! A scan of all connected sockets, which ends the stale ones.

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
    Memory, Remembered, namespaces,
    stale::{Search, Sieve},
};
use crate::{
    failure::chain,
    net::{Diag, DiagError, Filter, Place},
};

const PROC: &str = "/proc";

/// The network namespaces in which a scan ends sockets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Reach {
    /// The network namespace of this process.
    Own,
    /// All others. For the helper, whose daemon ends the sockets in their common namespace itself; if both
    /// did, sockets would be counted twice.
    Others,
    /// All network namespaces.
    All,
}

/// The result of a scan.
#[derive(Clone, Debug, Default, Deserialize, Eq, PartialEq, Serialize)]
pub(super) struct Scan {
    /// The number of sockets that were ended.
    pub(super) ended: u64,
    /// The number of sockets that seem to be stale, in namespaces that were not entered.
    pub(super) left: usize,
    /// The first error.
    pub(super) problem: Option<String>,
    /// True if the scan may succeed on a retry.
    #[serde(rename = "again")]
    pub(super) is_retryable: bool,
}

fn cannot(step: &'static str) -> impl FnOnce(io::Error) -> DiagError {
    move |source| DiagError::Step { step, source }
}

const READ: &str = "read the translations of sockets";
const FIND: &str = "find the network namespaces";

/// The sockets of a network namespace that may be stale.
#[derive(Default)]
struct Suspects {
    /// The translations of sockets with a cookie, by cookie.
    by_cookie: HashMap<u64, Origin>,
    /// The protocols of sockets without a cookie. The kernel creates cookies on demand, such as when
    /// sock_diag lists a socket.
    unnamed: Vec<Protocol>,
}

impl Suspects {
    fn insert(&mut self, socket: &Remembered) {
        if socket.cookie == 0 {
            self.unnamed.push(socket.origin.protocol);
        } else {
            self.by_cookie.insert(socket.cookie, socket.origin);
        }
    }

    fn len(&self) -> usize {
        self.by_cookie.len() + self.unnamed.len()
    }

    /// Returns true if there is a suspect of a protocol.
    fn has(&self, protocol: Protocol) -> bool {
        let mut named = self.by_cookie.values().map(|origin| origin.protocol);
        self.unnamed.contains(&protocol) || named.any(|its| its == protocol)
    }
}

/// Scans for stale sockets and ends them, in a blocking thread.
pub(super) async fn run<M: Memory + 'static>(
    reach: Reach,
    protocols: Vec<Protocol>,
    memory: Arc<M>,
) -> Scan {
    let ended = spawn_blocking(move || {
        scan(reach, &Search::new(&protocols, &*memory)).unwrap_or_else(|error| {
            let mut scan = Scan::default();
            scan.fail(&error);
            scan
        })
    });
    ended.await.unwrap_or_else(|error| Scan {
        problem: Some(error.to_string()),
        is_retryable: true,
        ..Scan::default()
    })
}

fn scan(reach: Reach, search: &Search<'_, impl Memory>) -> Result<Scan, DiagError> {
    let mut scan = Scan::default();
    let mut suspects = search.suspects().map_err(cannot(READ))?;
    let own = namespaces::own().map_err(cannot(FIND))?;
    let here = suspects.remove(&own).filter(|_| reach != Reach::Others);
    if reach == Reach::Own || suspects.is_empty() {
        scan.left = suspects.values().map(Suspects::len).sum();
        if let Some(here) = here {
            scan.end_all(search, own, &here);
        }
        return Ok(scan);
    }
    thread::scope(|scope| {
        // Uses a separate thread, which never returns to its original namespace.
        let around = thread::Builder::new().name("sockets".into());
        let around = around.spawn_scoped(scope, || search.around(&suspects));
        if let Some(here) = here {
            scan.end_all(search, own, &here);
        }
        match around.map(thread::ScopedJoinHandle::join) {
            Ok(Ok(others)) => scan.merge(others),
            Ok(Err(_panic)) => {
                scan.fail(&cannot("scan pods")(io::Error::other("the thread panicked")))
            }
            Err(error) => scan.fail(&cannot("start a thread")(error)),
        }
    });
    Ok(scan)
}

impl<M: Memory> Search<'_, M> {
    /// Returns the sockets that may be stale, by the inode number of their network namespace.
    fn suspects(&self) -> io::Result<BTreeMap<u32, Suspects>> {
        let mut sieve = Sieve::new(self);
        let mut suspects = BTreeMap::<u32, Suspects>::new();
        self.memory.sockets(&mut |socket| {
            if sieve.holds(&socket)? {
                let there = suspects.entry(socket.namespace).or_default();
                there.insert(&socket);
            }
            Ok(())
        })?;
        Ok(suspects)
    }

    /// Enters the namespaces of the suspects, one after the other, and ends the stale sockets.
    fn around(&self, suspects: &BTreeMap<u32, Suspects>) -> Scan {
        let mut scan = Scan {
            left: suspects.values().map(Suspects::len).sum(),
            ..Scan::default()
        };
        let numbers: BTreeSet<u32> = suspects.keys().copied().collect();
        let found = match namespaces::find(Path::new(PROC), &numbers) {
            Ok(found) => found,
            Err(error) => {
                scan.fail(&cannot(FIND)(error));
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
                Err(errno) => scan.fail(&cannot("enter a network namespace")(errno.into())),
            }
        }
        scan
    }
}

impl Scan {
    fn fail(&mut self, error: &DiagError) {
        self.is_retryable |= error.is_retryable();
        self.problem.get_or_insert_with(|| chain(error));
    }

    fn merge(&mut self, other: Self) {
        self.ended += other.ended;
        self.left += other.left;
        self.is_retryable |= other.is_retryable;
        self.problem = self.problem.take().or(other.problem);
    }

    /// Ends those suspects in the namespace of the calling thread that are stale.
    fn end_all<M: Memory>(&mut self, search: &Search<'_, M>, namespace: u32, suspects: &Suspects) {
        let mut diag = match Diag::open() {
            Ok(diag) => diag,
            Err(error) => return self.fail(&error),
        };
        for protocol in search.protocols.iter().filter(|its| suspects.has(**its)) {
            let ended = if suspects.unnamed.contains(protocol) {
                self.name_and_end(*protocol, search, namespace, &mut diag)
            } else {
                self.end_some(*protocol, search, suspects, &mut diag)
            };
            // An error for one protocol, such as a missing module, does not affect the other.
            if let Err(error) = ended {
                self.fail(&error);
            }
        }
    }

    /// Makes the kernel create cookies by listing the sockets, reads the translations again, and ends the
    /// stale sockets.
    fn name_and_end<M: Memory>(
        &mut self,
        protocol: Protocol,
        search: &Search<'_, M>,
        namespace: u32,
        diag: &mut Diag,
    ) -> Result<(), DiagError> {
        diag.list(protocol, Filter::Connected, |_place| {})?;
        let mut named = search.suspects().map_err(cannot(READ))?;
        named.remove(&namespace).map_or(Ok(()), |suspects| {
            self.end_some(protocol, search, &suspects, diag)
        })
    }

    fn end_some<M: Memory>(
        &mut self,
        protocol: Protocol,
        search: &Search<'_, M>,
        suspects: &Suspects,
        diag: &mut Diag,
    ) -> Result<(), DiagError> {
        let mut found = Vec::new();
        diag.list(protocol, Filter::Connected, |place: Place| {
            if let Some(origin) = suspects.by_cookie.get(&place.cookie()) {
                found.push((place, *origin));
            }
        })?;
        for (place, origin) in found {
            // An error at one socket does not stop the scan.
            match end(search, diag, &place, &origin) {
                Ok(true) => self.ended += 1,
                Ok(false) => {}
                Err(error) => self.fail(&error),
            }
        }
        Ok(())
    }
}

/// Ends a socket if it is stale; returns true if the socket was ended.
fn end(
    search: &Search<'_, impl Memory>,
    diag: &mut Diag,
    place: &Place,
    origin: &Origin,
) -> Result<bool, DiagError> {
    let has_gone = search.has_gone(place, origin).map_err(cannot(READ))?;
    let protocol = origin.protocol;
    if !has_gone || !diag.end(protocol, place)? {
        return Ok(false);
    }
    let (address, port) = place.peer();
    let (backend, port) = (address.to_ip(), port.to_host());
    let reason = Reason::SocketTerminated.label();
    debug!(%backend, port, protocol = protocol.number(), reason, "ended a socket");
    Ok(true)
}
