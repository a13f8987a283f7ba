//! Which sockets have outlived their backend. Pure but for what is asked of the maps.

use std::{collections::HashMap, io};

use tunnel_common::{
    addr::Protocol,
    origin::{Direction, Origin, OverflowKey},
    service::{Backend, State},
};

use crate::net::{Place, is_connected};

/// A socket that remembers a translation.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct Remembered {
    /// Its cookie.
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

    /// An older translation of a socket.
    fn older(&self, key: &OverflowKey) -> io::Result<Option<Origin>>;
}

/// Tells sockets that must be looked at more closely from the many that need not, and asks for each
/// backend once.
pub(super) struct Sieve<'a, M> {
    protocols: &'a [Protocol],
    memory: &'a M,
    backends: HashMap<u32, Option<Backend>>,
}

impl<'a, M: Memory> Sieve<'a, M> {
    pub(super) fn new(protocols: &'a [Protocol], memory: &'a M) -> Self {
        Self {
            protocols,
            memory,
            backends: HashMap::new(),
        }
    }

    /// Whether a socket may have outlived its backend.
    pub(super) fn holds(&mut self, socket: &Remembered) -> io::Result<bool> {
        let origin = &socket.origin;
        let protocol = origin.protocol;
        if !self.protocols.contains(&protocol) || !is_connected(protocol, socket.state) {
            return Ok(false);
        }
        if origin.flags & Origin::OVERFLOWED != 0 {
            return Ok(true);
        }
        let backend = match self.backends.get(&origin.index) {
            Some(known) => *known,
            None => {
                let backend = self.memory.backend(origin.index)?;
                self.backends.insert(origin.index, backend);
                backend
            }
        };
        Ok(is_gone(backend.as_ref(), origin))
    }
}

/// Whether the backend that a connected socket was given serves its Service no more. A socket that
/// is connected elsewhere than to where a translation of its own led never has: what it remembers
/// is then of datagrams that it sent besides.
pub(super) fn has_outlived(
    place: &Place,
    newest: &Origin,
    memory: &impl Memory,
) -> io::Result<bool> {
    let Some(origin) = translation(place, newest, memory)? else {
        return Ok(false);
    };
    // Asked anew: the index may have come to another use since the sockets were told apart.
    Ok(is_gone(memory.backend(origin.index)?.as_ref(), &origin))
}

fn is_gone(backend: Option<&Backend>, origin: &Origin) -> bool {
    // A connect that was refused by being sent where nobody is (Linux before 6.1) had no backend.
    let was_refused = origin.protocol == Protocol::UDP && origin.state == State::default();
    // Nor had a connect to the tunnel, whose index none can have.
    backend.is_some_and(|backend| !was_refused && !serves(backend, origin))
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
    let older = memory.older(&OverflowKey {
        cookie: place.cookie(),
        address,
        port,
        direction: Direction::REVERSE,
        reserved: [0; 5],
    })?;
    Ok(older.filter(|older| older.leads_to(&address, port)))
}

/// Whether a backend still is what a socket was given. UDP sockets note in which use of the index
/// that was. TCP sockets don't, so that the index in a later use counts as the same if it leads to
/// the same place for the same service port.
fn serves(backend: &Backend, origin: &Origin) -> bool {
    let is_same_use = if origin.protocol == Protocol::UDP {
        backend.state == origin.state
    } else {
        leads_alike(backend, origin)
    };
    backend.state.is_serving() && is_same_use
}

fn leads_alike(backend: &Backend, origin: &Origin) -> bool {
    backend.service == origin.service && origin.leads_to(&backend.address, backend.port)
}

#[cfg(test)]
mod tests;
