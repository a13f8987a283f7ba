//! Which sockets have outlived their backend. Pure but for what is asked of the maps.

use std::{
    collections::{HashMap, HashSet},
    io,
    sync::OnceLock,
};

use tunnel_common::{
    addr::{Address, Port, Protocol},
    origin::{Direction, Origin, OverflowKey},
    select,
    service::{Backend, FrontKey, State},
};
use zerocopy::{FromBytes, Immutable, KnownLayout};

use crate::net::{Place, is_connected};

/// A socket that remembers a translation, as a program of the kernel writes it.
#[derive(Clone, Copy, Debug, Eq, FromBytes, Immutable, KnownLayout, PartialEq)]
#[repr(C)]
pub struct Remembered {
    /// Its cookie; 0 if nobody asked for one yet.
    pub cookie: u64,
    /// The number of its network namespace, as the inode of `/proc/<pid>/ns/net`.
    pub namespace: u32,
    /// Its state, as in the kernel's `net/tcp_states.h`.
    pub state: u32,
    /// The translation: the last one, if there were several.
    pub origin: Origin,
}

/// What sockets remember, and the backends there are.
pub trait Memory: Send + Sync {
    /// Shows every socket of the machine that remembers a translation, in every network namespace.
    ///
    /// # Errors
    ///
    /// The kernel can't tell, or `show` failed. For the others: the map can't be read.
    fn sockets(&self, show: &mut dyn FnMut(Remembered) -> io::Result<()>) -> io::Result<()>;

    /// A backend by its index; nothing if no backend can have it.
    fn backend(&self, index: u32) -> io::Result<Option<Backend>>;

    /// Every backend, whether it serves or not.
    fn backends(&self) -> io::Result<Vec<Backend>>;

    /// The id of the service port that has a front.
    fn owner(&self, front: &FrontKey) -> io::Result<Option<u32>>;

    /// An older translation of a socket.
    fn older(&self, key: &OverflowKey) -> io::Result<Option<Origin>>;
}

/// What is searched for, and the backends there are, as far as they were asked for in a scan.
pub(super) struct Search<'a, M> {
    pub(super) protocols: &'a [Protocol],
    pub(super) memory: &'a M,
    /// Where the backends that serve are, with the id of their service port.
    serving: OnceLock<HashSet<(u32, Address, Port)>>,
}

/// Tells sockets that must be looked at more closely from the many that need not, and asks for each
/// backend once.
pub(super) struct Sieve<'a, M> {
    search: &'a Search<'a, M>,
    backends: HashMap<u32, Option<Backend>>,
}

impl<'a, M: Memory> Sieve<'a, M> {
    pub(super) fn new(search: &'a Search<'a, M>) -> Self {
        let backends = HashMap::new();
        Self { search, backends }
    }

    /// Whether a socket may have outlived its backend.
    pub(super) fn holds(&mut self, socket: &Remembered) -> io::Result<bool> {
        let origin = &socket.origin;
        let protocol = origin.protocol;
        if !self.search.protocols.contains(&protocol) || !is_connected(protocol, socket.state) {
            return Ok(false);
        }
        if origin.flags & Origin::OVERFLOWED != 0 {
            return Ok(true);
        }
        let backend = match self.backends.get(&origin.index) {
            Some(known) => *known,
            None => {
                let backend = self.search.memory.backend(origin.index)?;
                self.backends.insert(origin.index, backend);
                backend
            }
        };
        self.search.is_gone(backend.as_ref(), origin)
    }
}

impl<'a, M: Memory> Search<'a, M> {
    pub(super) const fn new(protocols: &'a [Protocol], memory: &'a M) -> Self {
        Self {
            protocols,
            memory,
            serving: OnceLock::new(),
        }
    }

    /// Whether the backend that a connected socket was given serves its Service no more. A socket
    /// that is connected elsewhere than to where a translation of its own led never has: what it
    /// remembers is then of datagrams that it sent besides.
    pub(super) fn has_gone(&self, place: &Place, newest: &Origin) -> io::Result<bool> {
        let Some(origin) = translation(place, newest, self.memory)? else {
            return Ok(false);
        };
        // Asked anew: the index may have come to another use since the sockets were told apart.
        let backend = self.memory.backend(origin.index)?;
        self.is_gone(backend.as_ref(), &origin)
    }

    fn is_gone(&self, backend: Option<&Backend>, origin: &Origin) -> io::Result<bool> {
        // A connect that was refused by being sent where nobody is (Linux before 6.1) had no backend,
        // nor had one to the tunnel.
        let was_refused = origin.protocol == Protocol::UDP && origin.state == State::default();
        if was_refused || origin.index == Origin::NOBODY {
            return Ok(false);
        }
        if backend.is_some_and(|backend| serves(backend, origin)) {
            return Ok(false);
        }
        let dialled = FrontKey::new(origin.vip, origin.vip_port, origin.protocol);
        let Some(service) = self.memory.owner(&dialled)? else {
            return Ok(true);
        };
        let has_left = backend.is_some_and(|backend| has_left(backend, origin));
        // Nothing else can have taken its place then, which spares a look at all backends.
        if has_left && service == origin.service {
            return Ok(true);
        }
        Ok(!self.serves_at(service, origin)?)
    }

    /// Whether the service port that has what was dialled has a backend that serves in the place that
    /// a socket was sent to: the index may have come to another use since, or be that of an older
    /// layout's map, and the address may have gone over to another port with the same endpoints.
    fn serves_at(&self, service: u32, origin: &Origin) -> io::Result<bool> {
        let place = (service, origin.backend, origin.backend_port);
        if let Some(serving) = self.serving.get() {
            return Ok(serving.contains(&place));
        }
        let backends = self.memory.backends()?;
        let serving = backends.iter().filter(|backend| backend.state.is_serving());
        let serving = serving.map(|backend| (backend.service, backend.address, backend.port));
        let serving = serving.collect();
        Ok(self.serving.get_or_init(|| serving).contains(&place))
    }
}

/// The translation that a socket's connection came from.
fn translation(place: &Place, newest: &Origin, memory: &impl Memory) -> io::Result<Option<Origin>> {
    let (address, port) = place.peer();
    if newest.leads_to(&address, port) {
        return Ok(Some(*newest));
    }
    if newest.flags & Origin::OVERFLOWED == 0 {
        return Ok(None);
    }
    let older = memory.older(&OverflowKey::new(
        place.cookie(),
        address,
        port,
        Direction::REVERSE,
    ))?;
    Ok(older.filter(|older| older.leads_to(&address, port)))
}

/// Whether the backend that a socket was given serves, as its index says.
fn serves(backend: &Backend, origin: &Origin) -> bool {
    if origin.protocol == Protocol::UDP {
        select::serves_flow(origin, backend.state)
    } else {
        select::serves_connection(origin, backend)
    }
}

/// Whether the backend that a UDP socket was given is gone, and its index in no other use yet.
fn has_left(backend: &Backend, origin: &Origin) -> bool {
    origin.protocol == Protocol::UDP && select::has_left(origin, backend.state)
}

#[cfg(test)]
mod tests;
