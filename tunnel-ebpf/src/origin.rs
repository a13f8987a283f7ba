//! Stores a socket's translations, and restores the VIP from them. The last translation is in the socket
//! storage `origin`; an unconnected socket's older ones are in `overflow`.

use aya_ebpf::programs::SockContext;
use tunnel_common::{
    addr::{Address, Port, Protocol},
    origin::{Direction, Origin, Overflow, OverflowKey},
    reason::Reason,
    service::FrontendKey,
};

use crate::{context::Sock, event_log, maps};

/// A socket's translations. The last one is read only once, when this value is created.
pub(crate) struct Translations<'a, S> {
    sock: &'a S,
    last: Option<&'static Origin>,
}

/// The result of storing a translation.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum StoreResult {
    /// The translation is stored.
    Stored,
    /// The translation is not stored, because the socket is a kernel TCP socket.
    KernelSocket,
    /// The translation is not stored, because there is no memory for socket storage.
    NoMemory,
}

impl<'a, S: Sock> Translations<'a, S> {
    /// Reads a socket's last translation.
    #[inline(always)]
    pub(crate) fn of(sock: &'a S) -> Self {
        let last = maps::origin(sock.context());
        Self { sock, last }
    }

    /// Returns true if one of the socket's backends has this address and port.
    #[inline(always)]
    pub(crate) fn leads_to(&self, key: &FrontendKey) -> bool {
        let Some(last) = self.last else { return false };
        last.leads_to(&key.address, key.port)
            || last.has_older()
                && self
                    .older(key.address, key.port, Direction::REVERSE)
                    .is_some()
    }

    /// Replaces the backend's address with the VIP. Returns the last translation if the VIP came from it, but
    /// not if it came from an older one.
    #[inline(always)]
    pub(crate) fn restore(&self) -> Option<&'static Origin> {
        let last = self.last?;
        let (address, port) = (self.sock.address(), self.sock.port());
        if last.leads_to(&address, port) {
            self.sock.set(&last.vip, last.vip_port);
            event_log::vip_restored(last);
            return Some(last);
        }
        if last.has_older()
            && let Some(older) = self.older(address, port, Direction::REVERSE)
            && older.leads_to(&address, port)
        {
            self.sock.set(&older.vip, older.vip_port);
            event_log::vip_restored(&older);
        }
        None
    }

    /// Returns the socket's translation of a VIP: either the last translation or an older one. If the socket
    /// has no last translation, another thread may be replacing it at this moment, so the older ones are read
    /// too.
    #[inline(always)]
    pub(crate) fn translation_of(&self, key: &FrontendKey) -> Option<Origin> {
        match self.last {
            Some(last) if last.is_for(key) => Some(*last),
            Some(last) if !last.has_older() => None,
            Some(_) | None => {
                let mut older = self.older(key.address, key.port, Direction::FORWARD)?;
                older.flags |= Origin::OVERFLOWED;
                Some(older)
            }
        }
    }

    #[inline(always)]
    fn older(&self, address: Address, port: Port, direction: Direction) -> Option<Origin> {
        maps::overflow(&OverflowKey::new(
            self.sock.cookie(),
            address,
            port,
            direction,
        ))
    }

    /// Stores a translation of the socket. If it is a UDP socket, its previous translation moves to
    /// `overflow`.
    ///
    /// The value is replaced, not changed in place, so that readers see either the old translation or the new
    /// one, but never a mixture.
    ///
    /// The kernel holds the socket's lock while a connect or send hook runs (`BPF_CGROUP_RUN_SA_PROG_LOCK` in
    /// include/linux/bpf-cgroup.h; a TCP connect() already holds it), and runs the release hook after the
    /// last of these hooks. Only one program at a time can therefore change the counts of open connections on
    /// behalf of a socket: it increments the new backend's count and decrements the old backend's.
    #[inline(always)]
    pub(crate) fn store(self, origin: &mut Origin) -> StoreResult {
        let Self { sock, last } = self;
        if let Some(last) = last {
            if last.is_same(origin) {
                maps::touch(last, origin.last_used);
                return StoreResult::Stored;
            }
            if origin.protocol == Protocol::UDP {
                store_overflow(sock.cookie(), last);
                origin.flags |= Origin::OVERFLOWED;
            }
            remove_last(sock, last);
        }
        let is_kernel_socket = sock.is_kernel_socket();
        if is_kernel_socket {
            if origin.protocol == Protocol::TCP {
                return StoreResult::KernelSocket;
            }
            // Replies need the translation, but it is not counted, because no hook runs when the socket is
            // closed.
            origin.flags &= !Origin::COUNTED;
        }
        let Some(stored) = maps::insert_origin(sock.context(), origin) else {
            if last.is_some() && !is_kernel_socket {
                maps::count_reason(Reason::SocketReleased);
            }
            return StoreResult::NoMemory;
        };
        if !stored.is_same(origin) {
            // Another thread stored its translation first. That one stays, and this one moves to `overflow`.
            store_overflow(sock.cookie(), origin);
            maps::mark_overflowed(stored);
            return StoreResult::Stored;
        }
        if let Some(index) = origin.counted_index() {
            maps::count_opened(index);
        }
        if last.is_none() && !origin.has_older() && !is_kernel_socket {
            maps::count_reason(Reason::SocketTracked);
        }
        StoreResult::Stored
    }

    /// Removes the translation to an address that the socket now dials directly, so that getpeername() shows
    /// this address instead of the VIP.
    #[inline(always)]
    pub(crate) fn remove(self, key: &FrontendKey) {
        let Self { sock, last } = self;
        let Some(last) = last else { return };
        if last.has_older() {
            let (address, port) = (key.address, key.port);
            let key = OverflowKey::new(sock.cookie(), address, port, Direction::REVERSE);
            maps::remove_overflow(&key);
        }
        if last.leads_to(&key.address, key.port) {
            remove_last(sock, last);
            if !sock.is_kernel_socket() {
                maps::count_reason(Reason::SocketReleased);
            }
        }
    }
}

/// Handles the close of a socket, and counts it if the socket has a translation.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    if let Some(origin) = maps::origin_of_closed(ctx) {
        if let Some(index) = origin.counted_index() {
            maps::count_closed(index);
        }
        maps::count_reason(Reason::SocketReleased);
        event_log::socket_closed(origin);
    }
}

/// Removes the last translation, and decrements its backend's count of open connections.
#[inline(always)]
fn remove_last<S: Sock>(sock: &S, last: &Origin) {
    // Read before the removal, because the kernel may reuse the value afterwards.
    let counted_index = last.counted_index();
    if maps::remove_origin(sock.context())
        && let Some(index) = counted_index
    {
        maps::count_closed(index);
    }
}

/// Stores a translation in `overflow` twice: under its VIP, and under its backend. Not inlined, because the
/// callers' stack frames have no room for an entry.
#[inline(never)]
fn store_overflow(cookie: u64, origin: &Origin) {
    // The two writes use one entry, because the stack is small. Addresses are copied in halves, because LLVM
    // compiles a plain copy into a call to a loop, and the verifier follows every iteration of that loop.
    let by_halves = |address: Address| Address::from_halves(address.halves());
    let vip = by_halves(origin.vip);
    let mut entry = Overflow {
        key: OverflowKey::new(cookie, vip, origin.vip_port, Direction::FORWARD),
        origin: *origin,
    };
    maps::insert_overflow(&entry);
    entry.key.address = by_halves(origin.backend);
    entry.key.port = origin.backend_port;
    entry.key.direction = Direction::REVERSE;
    maps::insert_overflow(&entry);
    maps::count_reason(Reason::Overflowed);
}
