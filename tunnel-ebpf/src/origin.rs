//! The translations of a socket: the last one in the socket storage `origin`, and the older ones of an
//! unconnected socket in `overflow`.

use aya_ebpf::programs::SockContext;
use tunnel_common::{
    addr::{Address, Port, Protocol},
    origin::{Direction, Origin, Overflow, OverflowKey},
    reason::Reason,
    service::FrontKey,
};

use crate::{context::Sock, log, maps};

/// The translations of a socket; the last one is read once.
pub(crate) struct Remembered<'a, S> {
    sock: &'a S,
    last: Option<&'static Origin>,
}

/// The outcome of storing a translation.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Memory {
    /// The socket stores it.
    Kept,
    /// TCP sockets of the kernel's own store none.
    OfKernel,
    /// Memory for the socket storage is short.
    Full,
}

impl<'a, S: Sock> Remembered<'a, S> {
    /// Reads the last translation of a socket.
    #[inline(always)]
    pub(crate) fn of(sock: &'a S) -> Self {
        let last = maps::origin(sock.context());
        Self { sock, last }
    }

    /// Returns true if an address and port are those of a backend of the socket.
    #[inline(always)]
    pub(crate) fn leads_to(&self, key: &FrontKey) -> bool {
        let Some(last) = self.last else { return false };
        last.leads_to(&key.address, key.port)
            || last.has_older()
                && self
                    .older(key.address, key.port, Direction::REVERSE)
                    .is_some()
    }

    /// Replaces the backend's address by the VIP; returns the last translation if that contained the
    /// VIP.
    #[inline(always)]
    pub(crate) fn restore(&self) -> Option<&'static Origin> {
        let last = self.last?;
        let (address, port) = (self.sock.address(), self.sock.port());
        if last.leads_to(&address, port) {
            self.sock.set(&last.vip, last.vip_port);
            log::put_back(last);
            return Some(last);
        }
        if last.has_older()
            && let Some(older) = self.older(address, port, Direction::REVERSE)
            && older.leads_to(&address, port)
        {
            self.sock.set(&older.vip, older.vip_port);
            log::put_back(&older);
        }
        None
    }

    /// Returns the translation of a VIP, the last one or an older one. If a socket has none, another
    /// thread may be replacing it at this moment, so the older ones are read too.
    #[inline(always)]
    pub(crate) fn flow(&self, key: &FrontKey) -> Option<Origin> {
        match self.last {
            Some(last) if last.is_of(key) => Some(*last),
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

    /// Stores a translation of the socket; for a UDP socket the last one moves to `overflow`.
    ///
    /// The value is replaced, not changed: a reader sees the old translation or the new one, never a
    /// mixture of both. The kernel holds the socket's lock while a connect or send hook runs
    /// (`BPF_CGROUP_RUN_SA_PROG_LOCK` of include/linux/bpf-cgroup.h; TCP's connect already has it), and
    /// the release follows the last such call: so one program at a time increments the count of the
    /// backend that it stores, and decrements that of the one that it removes.
    #[inline(always)]
    pub(crate) fn remember(self, origin: &mut Origin) -> Memory {
        let Self { sock, last } = self;
        if let Some(last) = last {
            if last.is_same(origin) {
                maps::touch(last, origin.used);
                return Memory::Kept;
            }
            if origin.protocol == Protocol::UDP {
                overflow(sock.cookie(), last);
                origin.flags |= Origin::OVERFLOWED;
            }
            drop_last(sock, last);
        }
        let is_of_kernel = sock.is_of_kernel();
        if is_of_kernel {
            if origin.protocol == Protocol::TCP {
                return Memory::OfKernel;
            }
            // Replies need the translation, but no hook runs at the close.
            origin.flags &= !Origin::COUNTED;
        }
        let Some(stored) = maps::insert_origin(sock.context(), origin) else {
            if last.is_some() && !is_of_kernel {
                maps::count(Reason::SocketReleased);
            }
            return Memory::Full;
        };
        if !stored.is_same(origin) {
            // Another thread stored its translation first: that stays, and this one goes to `overflow`.
            overflow(sock.cookie(), origin);
            maps::mark_overflowed(stored);
            return Memory::Kept;
        }
        if let Some(index) = origin.counted() {
            maps::count_opened(index);
        }
        if last.is_none() && !origin.has_older() && !is_of_kernel {
            maps::count(Reason::SocketTracked);
        }
        Memory::Kept
    }

    /// Removes the translation to an address that the socket now dials itself: getpeername must show it.
    #[inline(always)]
    pub(crate) fn forget(self, key: &FrontKey) {
        let Self { sock, last } = self;
        let Some(last) = last else { return };
        if last.has_older() {
            let (address, port) = (key.address, key.port);
            let key = OverflowKey::new(sock.cookie(), address, port, Direction::REVERSE);
            maps::remove_overflow(&key);
        }
        if last.leads_to(&key.address, key.port) {
            drop_last(sock, last);
            if !sock.is_of_kernel() {
                maps::count(Reason::SocketReleased);
            }
        }
    }
}

/// Counts the close of a socket that has a translation.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    if let Some(origin) = maps::origin_of_closed(ctx) {
        if let Some(index) = origin.counted() {
            maps::count_closed(index);
        }
        maps::count(Reason::SocketReleased);
        log::released(origin);
    }
}

/// Removes the last translation, and decrements the open connections of its backend.
#[inline(always)]
fn drop_last<S: Sock>(sock: &S, last: &Origin) {
    // Read first: the value may be reused once it is removed.
    let counted = last.counted();
    if maps::remove_origin(sock.context())
        && let Some(index) = counted
    {
        maps::count_closed(index);
    }
}

/// Stores a translation in `overflow`, under its VIP and under its backend. A function with a stack
/// frame of its own, since that of its callers lacks the room for an entry.
#[inline(never)]
fn overflow(cookie: u64, origin: &Origin) {
    // One entry, written twice, since the stack is small. Addresses are copied by halves: LLVM turns a
    // plain copy into a call of a loop, whose every iteration the verifier follows.
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
    maps::count(Reason::Overflowed);
}
