//! Stores and restores the translations of a socket: the last one is in the socket storage `origin`, older
//! ones of an unconnected socket are in `overflow`.

use aya_ebpf::programs::SockContext;
use tunnel_common::{
    addr::{Address, Port, Protocol},
    origin::{Direction, Origin, Overflow, OverflowKey},
    reason::Reason,
    service::FrontendKey,
};

use crate::{context::Sock, event_log, maps};

/// The translations of a socket. The last one is read once, at creation.
pub(crate) struct Translations<'a, S> {
    sock: &'a S,
    last: Option<&'static Origin>,
}

/// The result of storing a translation.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum StoreResult {
    /// The translation is stored.
    Stored,
    /// The translation is not stored, since the socket is a TCP socket of the kernel.
    KernelSocket,
    /// The translation is not stored, since there is no memory for socket storage.
    NoMemory,
}

impl<'a, S: Sock> Translations<'a, S> {
    /// Reads the last translation of a socket.
    #[inline(always)]
    pub(crate) fn of(sock: &'a S) -> Self {
        let last = maps::origin(sock.context());
        Self { sock, last }
    }

    /// Returns true if a backend of the socket has this address and port.
    #[inline(always)]
    pub(crate) fn leads_to(&self, key: &FrontendKey) -> bool {
        let Some(last) = self.last else { return false };
        last.leads_to(&key.address, key.port)
            || last.has_older()
                && self
                    .older(key.address, key.port, Direction::REVERSE)
                    .is_some()
    }

    /// Replaces the backend's address by the VIP. Returns the last translation if the VIP was taken from
    /// there, and not from an older one.
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

    /// Returns the last or an older translation of a VIP. If the socket has no last one, another thread may
    /// be replacing it at this moment, so the older ones are read too.
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

    /// Stores a translation of the socket. For a UDP socket, the last one moves to `overflow`.
    ///
    /// The value is replaced, not changed in place, so readers see either the old translation or the new
    /// one, never a mixture.
    ///
    /// The kernel holds the socket's lock while a connect or send hook runs (`BPF_CGROUP_RUN_SA_PROG_LOCK`
    /// of include/linux/bpf-cgroup.h; connects of TCP already have it), and runs the release hook after the
    /// last of them. So only one program at a time changes the counts of open connections for a socket: it
    /// increments the count of the new backend, and decrements that of the old one.
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
            // Replies need the translation, but it is not counted, since no hook runs at the close.
            origin.flags &= !Origin::COUNTED;
        }
        let Some(stored) = maps::insert_origin(sock.context(), origin) else {
            if last.is_some() && !is_kernel_socket {
                maps::count_reason(Reason::SocketReleased);
            }
            return StoreResult::NoMemory;
        };
        if !stored.is_same(origin) {
            // Another thread stored its translation first. That one stays, this one moves to `overflow`.
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

    /// Removes the translation to an address that the socket now dials directly, so that getpeername shows
    /// this address and not the VIP.
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

/// Handles the close of a socket: if it has a translation, counts the close.
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

/// Removes the last translation, and decrements the count of open connections of its backend.
#[inline(always)]
fn remove_last<S: Sock>(sock: &S, last: &Origin) {
    // Read before the removal, since the kernel may reuse the value afterwards.
    let counted_index = last.counted_index();
    if maps::remove_origin(sock.context())
        && let Some(index) = counted_index
    {
        maps::count_closed(index);
    }
}

/// Stores a translation in `overflow` twice, with its VIP as key and with its backend as key. Not inlined:
/// the stack frames of the callers have no room for an entry.
#[inline(never)]
fn store_overflow(cookie: u64, origin: &Origin) {
    // The same entry is written twice, since the stack is small. Addresses are copied by halves: LLVM
    // compiles a plain copy to a call of a loop, and the verifier follows every iteration.
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
