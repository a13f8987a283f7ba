//! Stores a socket's translations, and restores the VIP from them. The last translation is in the socket
//! storage `origin`; `older` stores the others.
//!
//! The kernel holds the socket's lock while any of these hooks runs (`BPF_CGROUP_RUN_SA_PROG_LOCK` in
//! include/linux/bpf-cgroup.h; TCP's connect() and, from Linux 5.17 on, getpeername() take it before the hook),
//! and runs the release hook after the last of them. Hooks of the same socket therefore never run at the same
//! time.

use aya_ebpf::programs::SockContext;
use tunnel_common::{
    addr::{Address, Port, Protocol},
    origin::Origin,
    reason::Reason,
    service::FrontendKey,
};

use crate::{
    context::{self, Sock},
    event_log, maps,
    older::{self, Known},
    refusal::SystemCall,
};

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

    /// Replaces the address of the backend that has sent a datagram with the VIP. Returns the translation, if there
    /// is one.
    #[inline(always)]
    pub(crate) fn restore_sender(&self) -> Option<&'static Origin> {
        let last = self.last?;
        let (address, port) = (self.sock.address(), self.sock.port());
        if last.leads_to(&address, port) {
            self.sock.set(&last.vip, last.vip_port);
            event_log::vip_restored(last);
            return Some(last);
        }
        if !last.has_older() {
            return None;
        }
        let older = older::with_backend(self.sock, &address, port)?;
        if older.is_replaced() && !older.is_live(context::now()) {
            return None;
        }
        self.sock.set(&older.vip, older.vip_port);
        event_log::vip_restored(older);
        Some(older)
    }

    /// Replaces the address of the backend that the socket is connected to with the VIP, if connect() was called
    /// with the VIP.
    #[inline(always)]
    pub(crate) fn restore_peer(&self) {
        let Some(last) = self.last else { return };
        let (address, port) = (self.sock.address(), self.sock.port());
        let origin = if last.is_of_connect() && last.leads_to(&address, port) {
            last
        } else if last.has_older()
            && let Some(older) = older::of_connect(self.sock, last)
        {
            older
        } else {
            return;
        };
        self.sock.set(&origin.vip, origin.vip_port);
        event_log::vip_restored(origin);
    }

    /// Finds the socket's translation of a VIP. Returns [`older::LAST`], the number of an entry in `older_few`, or
    /// [`older::NONE`].
    #[inline(always)]
    pub(crate) fn find(&self, key: &FrontendKey, now: u64) -> u32 {
        match self.last {
            Some(last) if last.is_for(key) => older::LAST,
            Some(last) if last.has_older() => {
                older::recall(self.sock.context(), &key.address, key.port, now)
            }
            Some(_) | None => older::NONE,
        }
    }

    /// Returns a translation that [`Translations::find`] has found.
    #[inline(always)]
    pub(crate) fn found(&self, number: u32) -> Option<&'static Origin> {
        if number == older::LAST {
            self.last
        } else {
            older::recalled(self.sock.context(), number)
        }
    }

    /// Stores a translation of the socket. If it is a UDP socket, its previous translation moves to the older
    /// ones. `known` is the translation that the socket has for the same VIP. The translation has the flag
    /// [`Origin::CONNECTED`] if the system call is a connect().
    ///
    /// The value in `origin` is replaced, not changed in place, so that the daemon sees either the old
    /// translation or the new one, but never a mixture.
    #[inline(always)]
    pub(crate) fn store(self, origin: &mut Origin, known: Known, call: SystemCall) -> StoreResult {
        let Self { sock, last } = self;
        if call == SystemCall::Connect {
            origin.flags |= Origin::CONNECTED;
        }
        if let Some(last) = last {
            if call == SystemCall::Connect {
                forget_connect(sock, last, &origin.backend, origin.backend_port);
            }
            if last.is_same(origin) {
                maps::set_flags(last, last.flags | origin.flags & Origin::CONNECTED);
                maps::touch(last, origin.last_used);
                return StoreResult::Stored;
            }
            if origin.protocol == Protocol::UDP {
                origin.flags |= last.flags & Origin::LASTING_FLAGS;
                if known.number == older::LAST {
                    maps::set_flags(last, last.flags | Origin::REPLACED);
                }
                if older::keep_last(sock.context(), known, origin.last_used) {
                    origin.flags |= Origin::HAS_OLDER;
                }
            }
            origin.tracked_by = last.tracked_by;
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
        } else if last.is_none() {
            origin.tracked_by = Origin::TRACKED;
        }
        if !maps::insert_origin(sock.context(), origin) {
            if last.is_some() && origin.is_tracked() {
                maps::count_reason(Reason::SocketReleased);
            }
            return StoreResult::NoMemory;
        }
        if let Some(index) = origin.counted_index() {
            maps::count_opened(index);
        }
        if last.is_none() && origin.is_tracked() {
            maps::count_reason(Reason::SocketTracked);
        }
        StoreResult::Stored
    }

    /// Removes the translations to an address that the socket now dials directly, so that getpeername() shows
    /// this address instead of the VIP.
    #[inline(always)]
    pub(crate) fn remove(self, key: &FrontendKey) {
        let Self { sock, last } = self;
        let Some(last) = last else { return };
        let (flags, tracked_by) = (last.flags & Origin::LASTING_FLAGS, last.tracked_by);
        forget_connect(sock, last, &key.address, key.port);
        if flags != 0 {
            older::remove(sock.context(), &key.address, key.port);
        }
        if !last.leads_to(&key.address, key.port) {
            return;
        }
        remove_last(sock, last);
        if flags != 0 {
            let mut empty = Origin::without_translation();
            (empty.flags, empty.tracked_by) = (flags, tracked_by);
            if maps::insert_origin(sock.context(), &mut empty) {
                return;
            }
        }
        if tracked_by == Origin::TRACKED {
            maps::count_reason(Reason::SocketReleased);
        }
    }
}

/// Clears [`Origin::CONNECTED`] in a socket's translations that lead to the address that it now connects to. The
/// others keep it, because the connect() may fail, and the socket then keeps its peer.
#[inline(always)]
fn forget_connect<S: Sock>(sock: &S, last: &'static Origin, address: &Address, port: Port) {
    if last.leads_to(address, port) {
        maps::set_flags(last, last.flags & !Origin::CONNECTED);
    }
    if last.has_older() {
        older::forget_connect(sock.context(), address, port);
    }
}

/// Handles the close of a socket, and counts it if the socket is tracked.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    if let Some(origin) = maps::origin_of_closed(ctx) {
        if let Some(index) = origin.counted_index() {
            maps::count_closed(index);
        }
        if origin.is_tracked() {
            maps::count_reason(Reason::SocketReleased);
        }
        event_log::socket_closed(origin);
    }
    // A socket can have entries in `older_shared` even without a last translation, if there was no memory to
    // replace it.
    older::release(ctx);
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
