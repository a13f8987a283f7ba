//! Finds stale sockets, that is, connected sockets whose backend no longer serves. Does no I/O apart from
//! reading the maps.

use std::{
    collections::{HashMap, HashSet},
    io,
    sync::OnceLock,
};

use tunnel_common::{
    addr::{Address, Port, Protocol},
    origin::{Direction, Origin, OverflowKey},
    select,
    service::{Backend, BackendState, FrontendKey},
};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::net::{ListedSocket, is_connected};

/// A socket that has a translation, as returned by the BPF iterator.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, KnownLayout, PartialEq)]
#[repr(C)]
pub struct TranslatedSocket {
    /// The socket's cookie, or 0 if the kernel has not created one yet.
    pub cookie: u64,
    /// The inode number of the socket's network namespace, as in `/proc/<pid>/ns/net`.
    pub namespace: u32,
    /// The socket's state (see `net/tcp_states.h`).
    pub state: u32,
    /// The socket's last translation, or the first of its older ones.
    pub origin: Origin,
}

/// The pinned maps that hold the backends and the sockets' translations.
pub trait TranslationMaps: Send + Sync {
    /// Calls `visit` for every socket that has a translation, in all network namespaces on the node. On kernels that crash while
    /// they iterate over socket storage, sockets may be missing (see `docs/kernel-support.md`).
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't list the sockets or `visit` fails.
    fn sockets(&self, visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>) -> io::Result<()>;

    /// Returns the backend at an index, or `None` if the index is out of range.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read.
    fn backend(&self, index: u32) -> io::Result<Option<Backend>>;

    /// Returns all backends, including those that don't serve.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read.
    fn backends(&self) -> io::Result<Vec<Backend>>;

    /// Returns the id of the service port that owns a frontend, if any.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read.
    fn owner(&self, front: &FrontendKey) -> io::Result<Option<u32>>;

    /// Calls `visit` for every socket that has older translations, with the first of them. If the socket is
    /// connected by one of them, it is the first.
    ///
    /// # Errors
    ///
    /// Returns an error if the kernel can't list the sockets or `visit` fails.
    fn older_translations(
        &self,
        visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>,
    ) -> io::Result<()>;

    /// Returns an older translation that a program of layout 7 or earlier stored, if there is one for this key.
    ///
    /// # Errors
    ///
    /// Returns an error if the map can't be read.
    fn overflow(&self, key: &OverflowKey) -> io::Result<Option<Origin>>;
}

/// A search for stale sockets, with the protocols to search for and the maps to read.
pub(super) struct StaleSearch<'a, M> {
    pub(super) protocols: &'a [Protocol],
    pub(super) maps: &'a M,
    /// The service port id, address and port of each serving backend, read on first use.
    serving: OnceLock<HashSet<(u32, Address, Port)>>,
    /// The first older translation of each connected socket that has one, by cookie. Read on first use.
    older: OnceLock<HashMap<u64, Origin>>,
}

/// A first filter that selects the suspects among all sockets. It reads each backend only once.
pub(super) struct SuspectFilter<'a, M> {
    search: &'a StaleSearch<'a, M>,
    backends: HashMap<u32, Option<Backend>>,
}

impl<'a, M: TranslationMaps> SuspectFilter<'a, M> {
    pub(super) fn new(search: &'a StaleSearch<'a, M>) -> Self {
        let backends = HashMap::new();
        Self { search, backends }
    }

    /// Returns true if a socket may be stale.
    pub(super) fn may_be_stale(&mut self, socket: &TranslatedSocket) -> io::Result<bool> {
        let origin = &socket.origin;
        let protocol = origin.protocol;
        if !self.search.protocols.contains(&protocol) || !is_connected(protocol, socket.state) {
            return Ok(false);
        }
        if origin.has_older() {
            return Ok(true);
        }
        if !origin.is_of_connect() {
            return Ok(false);
        }
        let backend = match self.backends.get(&origin.index) {
            Some(known) => *known,
            None => {
                let backend = self.search.maps.backend(origin.index)?;
                self.backends.insert(origin.index, backend);
                backend
            }
        };
        self.search.backend_is_gone(backend.as_ref(), origin)
    }
}

impl<'a, M: TranslationMaps> StaleSearch<'a, M> {
    pub(super) const fn new(protocols: &'a [Protocol], maps: &'a M) -> Self {
        Self {
            protocols,
            maps,
            serving: OnceLock::new(),
            older: OnceLock::new(),
        }
    }

    /// Returns true if a connected socket is stale, that is, if its backend no longer serves its Service. A
    /// socket that connected to its peer's own address is never stale, even if it also sends to the Service.
    pub(super) fn is_stale(&self, socket: &ListedSocket, newest: &Origin) -> io::Result<bool> {
        let Some(origin) = self.translation(socket, newest)? else {
            return Ok(false);
        };
        // Re-read the backend, since its index may have been reused after the first filter ran.
        let backend = self.maps.backend(origin.index)?;
        self.backend_is_gone(backend.as_ref(), &origin)
    }

    fn backend_is_gone(&self, backend: Option<&Backend>, origin: &Origin) -> io::Result<bool> {
        // A connect() that was refused by redirecting it to another address (before Linux 6.1), or that was
        // steered to the tunnel, has no backend.
        let was_refused =
            origin.protocol == Protocol::UDP && origin.state == BackendState::default();
        if was_refused || origin.index == Origin::NO_BACKEND {
            return Ok(false);
        }
        if backend.is_some_and(|backend| serves(backend, origin)) {
            return Ok(false);
        }
        let dialled = FrontendKey::new(origin.vip, origin.vip_port, origin.protocol);
        let Some(service) = self.maps.owner(&dialled)? else {
            return Ok(true);
        };
        let has_left = backend.is_some_and(|backend| has_left(backend, origin));
        // No other backend of the Service can have this address, so the others need not be read.
        if has_left && service == origin.service {
            return Ok(true);
        }
        Ok(!self.serves_at(service, origin)?)
    }

    /// Returns true if the service port that owns the dialled frontend has a serving backend with the address
    /// and port that the socket is connected to. That backend's index may differ from the one stored in the
    /// socket: the stored index may have been reused or may come from a map with an older layout, or the
    /// frontend may have moved to another service port with the same endpoints.
    fn serves_at(&self, service: u32, origin: &Origin) -> io::Result<bool> {
        let key = (service, origin.backend, origin.backend_port);
        if let Some(serving) = self.serving.get() {
            return Ok(serving.contains(&key));
        }
        let backends = self.maps.backends()?;
        let serving = backends.iter().filter(|backend| backend.state.is_serving());
        let serving = serving.map(|backend| (backend.service, backend.address, backend.port));
        let serving = serving.collect();
        Ok(self.serving.get_or_init(|| serving).contains(&key))
    }

    /// Returns the translation by which a socket was connected to its peer, if there is one.
    fn translation(&self, socket: &ListedSocket, newest: &Origin) -> io::Result<Option<Origin>> {
        let (address, port) = socket.peer();
        let is_wanted = |origin: &Origin| origin.is_of_connect() && origin.leads_to(&address, port);
        if is_wanted(newest) {
            return Ok(Some(*newest));
        }
        if newest.flags & Origin::HAS_OLDER != 0
            && let Some(older) = self.older_translation(socket.cookie())?
            && is_wanted(&older)
        {
            return Ok(Some(older));
        }
        if newest.flags & Origin::OVERFLOWED == 0 {
            return Ok(None);
        }
        let older = self.maps.overflow(&OverflowKey::new(
            socket.cookie(),
            address,
            port,
            Direction::REVERSE,
        ))?;
        Ok(older.filter(|older| older.leads_to(&address, port)))
    }

    /// Returns the first older translation of a connected socket.
    ///
    /// A program may change the entry while the kernel copies it for the daemon, so that the copy is a mixture of
    /// two translations. All entries are therefore read twice, and those that differ are left out.
    fn older_translation(&self, cookie: u64) -> io::Result<Option<Origin>> {
        if let Some(older) = self.older.get() {
            return Ok(older.get(&cookie).copied());
        }
        let mut older = self.read_older_translations()?;
        let again = self.read_older_translations()?;
        let is_unchanged = |cookie: &u64, origin: &Origin| {
            let again = again.get(cookie);
            again.is_some_and(|again| again.is_same(origin) && again.service == origin.service)
        };
        older.retain(|cookie, origin| is_unchanged(cookie, origin));
        Ok(self.older.get_or_init(|| older).get(&cookie).copied())
    }

    fn read_older_translations(&self) -> io::Result<HashMap<u64, Origin>> {
        let mut older = HashMap::new();
        self.maps.older_translations(&mut |socket| {
            if is_connected(Protocol::UDP, socket.state) {
                older.insert(socket.cookie, socket.origin);
            }
            Ok(())
        })?;
        Ok(older)
    }
}

/// Returns true if the backend at a socket's index is still the socket's backend and is still serving.
fn serves(backend: &Backend, origin: &Origin) -> bool {
    if origin.protocol == Protocol::UDP {
        select::serves_flow(origin, backend.state)
    } else {
        select::serves_connection(origin, backend)
    }
}

/// Returns true if a UDP socket's backend has been removed and its index has not been reused yet.
///
/// The address is compared in case a program was preempted while it changed an older translation. The index and
/// state may then belong to another translation than the address.
fn has_left(backend: &Backend, origin: &Origin) -> bool {
    origin.protocol == Protocol::UDP
        && select::is_removed(origin, backend.state)
        && origin.leads_to(&backend.address, backend.port)
}

#[cfg(test)]
mod tests;
