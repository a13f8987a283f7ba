//! What the socket hooks do: translate, remember, and put the VIP back.

use aya_ebpf::programs::SockContext;
use tunnel_common::{
    addr::{Address, Protocol},
    decide::{self, Choice, NoChoice},
    lookup::Lookup,
    origin::{Direction, ORIGIN_VERSION, Origin, Overflow, OverflowKey},
    reason::Reason,
    service::{Front, FrontKey, State},
    tables::{Record, Traffic},
};

use crate::{
    context::{self, ALLOW, DENY, Sock},
    log, maps,
    refusal::{Call, ECONNREFUSED, EHOSTUNREACH, ENOMEM, Refusal, UNSTABLE, refuse},
    steering::{self, Steering},
    tables::{Asking, Maps},
};

/// `connect(2)` of TCP and UDP sockets.
#[inline(always)]
pub(crate) fn connect<S: Sock>(sock: &S) -> i32 {
    let Some(key) = sock.key() else { return ALLOW };
    let refusal = match front(sock, &key) {
        Lookup::Found(record) => match translate(sock, &key, record) {
            Ok(()) => return ALLOW,
            Err(refusal) => refusal,
        },
        Lookup::Unstable => UNSTABLE,
        Lookup::None => match steering::redirect(sock, &key) {
            Steering::Redirected => return ALLOW,
            Steering::Refused => return DENY,
            Steering::None => {
                log::left_alone(&key);
                forget(sock, &key);
                return ALLOW;
            }
            Steering::Closed => Refusal {
                reason: Reason::SteeringClosed,
                error: ECONNREFUSED,
            },
            Steering::Unstable => UNSTABLE,
        },
    };
    refuse(sock, &key, Call::Connect, &refusal)
}

/// `sendto(2)` and `sendmsg(2)` of UDP sockets with an address, and every `send(2)` of a connected
/// v4-mapped one.
#[inline(always)]
pub(crate) fn send<S: Sock>(sock: &S) -> i32 {
    let Some(key) = sock.key() else { return ALLOW };
    // A connected v4-mapped socket comes here with the backend's address on each send. If that
    // were looked up, a backend that is itself a front would be translated twice.
    if leads_back(sock, &key) {
        log::goes_on(&key);
        return ALLOW;
    }
    let refusal = match front(sock, &key) {
        Lookup::Found(record) => match translate(sock, &key, record) {
            Ok(()) => return ALLOW,
            Err(refusal) => refusal,
        },
        Lookup::Unstable => UNSTABLE,
        Lookup::None => {
            log::left_alone(&key);
            return ALLOW;
        }
    };
    refuse(sock, &key, Call::Send, &refusal)
}

/// The front of an address, if it is one for sockets.
#[inline(always)]
fn front<S: Sock>(sock: &S, key: &FrontKey) -> Lookup<Record<'static>> {
    decide::front(&Maps, &Asking(sock), key, Traffic::Sockets)
}

/// `recvfrom(2)` and `recvmsg(2)` of UDP sockets: the sender's address becomes the VIP again.
#[inline(always)]
pub(crate) fn receive<S: Sock>(sock: &S) {
    if let Some(origin) = restore(sock) {
        maps::touch(origin, context::now());
    }
}

/// `getpeername(2)`: the peer's address becomes the VIP again.
#[inline(always)]
pub(crate) fn peername<S: Sock>(sock: &S) {
    restore(sock);
}

/// The close of a socket.
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

/// Whether an address is that of a backend which the socket was given.
#[inline(always)]
fn leads_back<S: Sock>(sock: &S, key: &FrontKey) -> bool {
    let Some(origin) = maps::origin(sock.context()) else {
        return false;
    };
    if origin.leads_to(&key.address, key.port) {
        return true;
    }
    let reverse = |cookie| OverflowKey::new(cookie, key.address, key.port, Direction::REVERSE);
    origin.flags & Origin::OVERFLOWED != 0 && maps::overflow(&reverse(sock.cookie())).is_some()
}

/// Puts the VIP in the place of the backend; gives what the socket remembers if that is where the
/// VIP was found.
#[inline(always)]
fn restore<S: Sock>(sock: &S) -> Option<&'static Origin> {
    let origin = maps::origin(sock.context())?;
    let (address, port) = (sock.address(), sock.port());
    if origin.leads_to(&address, port) {
        sock.set(&origin.vip, origin.vip_port);
        log::put_back(origin);
        return Some(origin);
    }
    if origin.flags & Origin::OVERFLOWED != 0 {
        let key = OverflowKey::new(sock.cookie(), address, port, Direction::REVERSE);
        if let Some(older) = maps::overflow(&key)
            && older.leads_to(&address, port)
        {
            sock.set(&older.vip, older.vip_port);
            log::put_back(&older);
        }
    }
    None
}

/// Sends a connect or datagram on to a backend.
#[inline(always)]
fn translate<S: Sock>(sock: &S, key: &FrontKey, record: Record<'_>) -> Result<(), Refusal> {
    if sock.is_own() {
        return Ok(());
    }
    let current = maps::origin(sock.context());
    // Only UDP flows age, and the clock has its price.
    let is_udp = key.protocol == Protocol::UDP;
    let now = if is_udp { context::now() } else { 0 };
    let kept = if is_udp {
        sticky(sock, current, key, record.front, now)
    } else {
        None
    };
    let (mut origin, mut reason) = if let Some(kept) = kept {
        (kept, Reason::TranslatedSticky)
    } else {
        chosen(sock, key, record)?
    };
    origin.used = now;
    origin.flags |= Origin::COUNTED;
    match remember(sock, current, &mut origin) {
        Memory::Kept => {}
        Memory::OfKernel => reason = Reason::TranslatedKernel,
        Memory::Full if is_udp => {
            maps::count_refused(origin.service);
            return Err(Refusal {
                reason: Reason::StorageFull,
                error: ENOMEM,
            });
        }
        Memory::Full => reason = Reason::TranslatedUntracked,
    }
    maps::count(reason);
    sock.set(&origin.backend, origin.backend_port);
    log::translated(&origin, reason);
    Ok(())
}

/// A new choice for a front, which is counted there.
#[inline(always)]
fn chosen<S: Sock>(
    sock: &S,
    key: &FrontKey,
    record: Record<'_>,
) -> Result<(Origin, Reason), Refusal> {
    let service = record.front.service;
    match decide::backend(&Maps, &Asking(sock), key, record, Traffic::Sockets) {
        Ok(choice) => {
            maps::count_sent(service);
            Ok((origin_of(key, service, &choice), choice.reason))
        }
        Err(none) => {
            maps::count_refused(service);
            Err(refusal_of(none))
        }
    }
}

/// The refusal where there is no choice. One that is dropped elsewhere finds no way.
#[inline(always)]
const fn refusal_of(none: NoChoice) -> Refusal {
    let error = if none.is_drop() {
        EHOSTUNREACH
    } else {
        ECONNREFUSED
    };
    Refusal {
        reason: none.reason(),
        error,
    }
}

/// The choice that a UDP flow already has, if it still holds. A socket that remembers nothing may
/// be one whose value another thread is replacing at this moment, so its older ones are asked too.
#[inline(always)]
fn sticky<S: Sock>(
    sock: &S,
    current: Option<&'static Origin>,
    key: &FrontKey,
    front: &Front,
    now: u64,
) -> Option<Origin> {
    let mut kept = match current {
        Some(current) if current.is_of(key) => *current,
        Some(current) if current.flags & Origin::OVERFLOWED == 0 => return None,
        Some(_) | None => {
            let forward =
                OverflowKey::new(sock.cookie(), key.address, key.port, Direction::FORWARD);
            let mut older = maps::overflow(&forward)?;
            older.flags |= Origin::OVERFLOWED;
            older
        }
    };
    let backend = decide::held(&Maps, front, &kept, now)?;
    // The copy of an element that is reused meanwhile may be a mixture. The entry of a backend
    // that is in the same use is not.
    kept.vip = key.address;
    kept.vip_port = key.port;
    kept.backend = backend.address;
    kept.backend_port = backend.port;
    Some(kept)
}

/// What became of a translation that a socket was to remember.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Memory {
    /// It is remembered.
    Kept,
    /// A TCP socket of the kernel's own remembers nothing.
    OfKernel,
    /// There is no memory for it.
    Full,
}

/// Makes the socket remember a translation; what it remembered moves to `overflow` if it is a UDP
/// socket.
///
/// The value is replaced, not changed: a reader sees the old translation or the new one, never a
/// mixture of two. The kernel holds the socket's lock while a connect or send hook runs
/// (`BPF_CGROUP_RUN_SA_PROG_LOCK` of include/linux/bpf-cgroup.h; TCP's connect has it already), and
/// the close comes when no call is left that could: so one program at a time counts a socket up
/// with the value that it puts there, and down with the one that it takes away.
#[inline(always)]
pub(crate) fn remember<S: Sock>(
    sock: &S,
    current: Option<&'static Origin>,
    origin: &mut Origin,
) -> Memory {
    let ctx = sock.context();
    if let Some(old) = current {
        if is_same(old, origin) {
            maps::touch(old, origin.used);
            return Memory::Kept;
        }
        if origin.protocol == Protocol::UDP {
            overflow(sock.cookie(), old);
            origin.flags |= Origin::OVERFLOWED;
        }
        drop_origin(sock, old);
    }
    let is_of_kernel = sock.is_of_kernel();
    if is_of_kernel {
        if origin.protocol == Protocol::TCP {
            return Memory::OfKernel;
        }
        // Its datagrams must come back, but nobody sees it close.
        origin.flags &= !Origin::COUNTED;
    }
    let Some(stored) = maps::insert_origin(ctx, origin) else {
        if current.is_some() && !is_of_kernel {
            maps::count(Reason::SocketReleased);
        }
        return Memory::Full;
    };
    if !is_same(stored, origin) {
        // Another thread was quicker: its translation stays, and this one is kept beside it.
        overflow(sock.cookie(), origin);
        maps::mark_overflowed(stored);
        return Memory::Kept;
    }
    if let Some(index) = origin.counted() {
        maps::count_opened(index);
    }
    if current.is_none() && origin.flags & Origin::OVERFLOWED == 0 && !is_of_kernel {
        maps::count(Reason::SocketTracked);
    }
    Memory::Kept
}

/// Makes a socket forget what it remembers, and counts it no more at that backend.
#[inline(always)]
fn drop_origin<S: Sock>(sock: &S, old: &Origin) {
    // Read before: the value may be reused once it is gone.
    let counted = old.counted();
    if maps::remove_origin(sock.context())
        && let Some(index) = counted
    {
        maps::count_closed(index);
    }
}

/// Whether two translations lead from the same VIP to the same backend.
#[inline(always)]
fn is_same(one: &Origin, other: &Origin) -> bool {
    one.index == other.index
        && one.state == other.state
        && one.leads_to(&other.backend, other.backend_port)
        && one.vip_port == other.vip_port
        && one.vip == other.vip
}

/// Keeps a translation beside the socket, under its VIP and under its backend.
#[inline(always)]
fn overflow(cookie: u64, origin: &Origin) {
    // One entry, written twice: there is little room on the stack. Addresses go by their halves: of a
    // plain copy LLVM makes a call of a loop, which the verifier follows step by step.
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

/// A socket that now dials the backend itself must show the backend.
#[inline(always)]
fn forget<S: Sock>(sock: &S, key: &FrontKey) {
    let Some(origin) = maps::origin(sock.context()) else {
        return;
    };
    if origin.flags & Origin::OVERFLOWED != 0 {
        let key = OverflowKey::new(sock.cookie(), key.address, key.port, Direction::REVERSE);
        maps::remove_overflow(&key);
    }
    if origin.leads_to(&key.address, key.port) {
        drop_origin(sock, origin);
        if !sock.is_of_kernel() {
            maps::count(Reason::SocketReleased);
        }
    }
}

#[inline(always)]
fn origin_of(key: &FrontKey, service: u32, choice: &Choice) -> Origin {
    // A TCP socket never asks whether its choice still holds, so the look is spared.
    let state = if key.protocol == Protocol::UDP {
        decide::state(&Maps, choice.index)
    } else {
        State::default()
    };
    Origin {
        used: 0,
        vip: key.address,
        backend: choice.address,
        index: choice.index,
        state,
        service,
        vip_port: key.port,
        backend_port: choice.port,
        protocol: key.protocol,
        version: ORIGIN_VERSION,
        flags: 0,
        reserved: 0,
    }
}
