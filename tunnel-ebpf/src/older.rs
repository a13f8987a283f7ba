//! Finds, stores and moves the older translations of UDP sockets (see `tunnel_common::older`).
//!
//! The steps are global functions, because the verifier checks each of these only once, and need not distinguish
//! their results. All arguments are scalars or the context, because Linux 5.10 permits no others.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

mod shared;

use aya_ebpf::{bindings::bpf_sock_addr, programs::SockAddrContext};
use tunnel_common::{
    addr::{Address, Port},
    older::{FEW, MANY, OlderFew, OlderMany, tags},
    origin::{Direction, Origin, OverflowKey},
    reason::Reason,
};

pub(crate) use self::shared::release;
use crate::{
    context::{Sock, Sock4},
    maps::{self, in_register},
};

/// No entry.
pub(crate) const NONE: u32 = u32::MAX;
/// The last translation, which is in `origin`.
pub(crate) const LAST: u32 = u32::MAX - 1;
/// The translation is in `older_shared`. Smaller numbers are entries of `older_few`, and of `older_many` from [`FEW`].
const SHARED: u32 = FEW + MANY;
/// The translation is in `overflow`.
const OVERFLOW: u32 = SHARED + 1;

/// The translation that a socket had for a VIP before it stores one.
#[derive(Clone, Copy)]
pub(crate) struct Known {
    /// [`LAST`], the number of an entry in `older_few`, or [`NONE`].
    pub(crate) number: u32,
    /// True if the socket keeps the backend, and false if it has chosen again.
    pub(crate) is_kept: bool,
}

impl Known {
    /// The socket had no translation for the VIP.
    pub(crate) const NOTHING: Self = Self {
        number: NONE,
        is_kept: false,
    };
}

/// Directions, as scalars.
const FORWARD: u32 = 0;
const REVERSE: u32 = 1;

/// Finds the older translation of a VIP, and moves it to `older_few` if it is elsewhere. Returns the number of
/// its entry in `older_few`, or [`NONE`].
#[inline(always)]
pub(crate) fn recall(ctx: &SockAddrContext, vip: &Address, port: Port, now: u64) -> u32 {
    let [upper, lower] = vip.halves();
    recall_to_few(ctx.sock_addr, upper, lower, port.to_network().into(), now)
}

/// Returns an entry in `older_few`.
#[inline(always)]
pub(crate) fn recalled(ctx: &SockAddrContext, number: u32) -> Option<&'static Origin> {
    let few: &'static OlderFew = maps::few(ctx)?;
    few.entries.get(in_register(number))
}

/// Moves a socket's last translation to the older ones. `known` is the translation that the socket had for the VIP
/// of the new last translation. Returns true if the socket has a value in `older_few`.
#[inline(always)]
pub(crate) fn keep_last(ctx: &SockAddrContext, known: Known, now: u64) -> bool {
    move_last_to_few(ctx.sock_addr, known.number, known.is_kept.into(), now) != 0
}

/// Returns the older translation that leads to a backend.
#[inline(always)]
pub(crate) fn with_backend<S: Sock>(
    sock: &S,
    backend: &Address,
    port: Port,
) -> Option<&'static Origin> {
    let ctx = sock.context();
    let [upper, lower] = backend.halves();
    let number = find_backend(ctx.sock_addr, upper, lower, port.to_network().into());
    if number < FEW {
        let few: &'static OlderFew = maps::few(ctx)?;
        return few.entries.get(in_register(number));
    }
    if number < SHARED {
        let many: &'static OlderMany = maps::many(ctx)?;
        return many.entries.get(in_register(number - FEW));
    }
    let key = OverflowKey::new(sock.cookie(), *backend, port, Direction::REVERSE);
    if number == SHARED {
        return maps::shared(&key).map(|entry| &entry.origin);
    }
    if number == OVERFLOW {
        return maps::overflow(&key);
    }
    None
}

/// Returns the older translation that the socket's last connect() used, if it leads to the address in the context.
#[inline(always)]
pub(crate) fn of_connect<S: Sock>(sock: &S, last: &Origin) -> Option<&'static Origin> {
    let (address, port) = (sock.address(), sock.port());
    if let Some(few) = maps::few(sock.context()) {
        let [front, ..]: &'static [Origin; _] = &few.entries;
        if front.last_used != 0 && front.is_of_connect() && front.leads_to(&address, port) {
            return Some(front);
        }
    }
    if last.flags & Origin::OVERFLOWED == 0 {
        return None;
    }
    let key = OverflowKey::new(sock.cookie(), address, port, Direction::REVERSE);
    maps::overflow(&key)
}

/// Clears [`Origin::CONNECTED`] in the older translation that leads to an address. Only the first one can have this
/// flag.
#[inline(always)]
pub(crate) fn forget_connect(ctx: &SockAddrContext, address: &Address, port: Port) {
    if let Some(few) = maps::few(ctx) {
        let [front, ..] = &mut few.entries;
        if front.leads_to(address, port) {
            front.flags &= !Origin::CONNECTED;
        }
    }
}

/// Removes all older translations that lead to an address.
#[inline(always)]
pub(crate) fn remove(ctx: &SockAddrContext, backend: &Address, port: Port) {
    let [upper, lower] = backend.halves();
    remove_backend(ctx.sock_addr, upper, lower, port.to_network().into());
}

#[inline(always)]
fn port_of(word: u32) -> Port {
    #[expect(clippy::cast_possible_truncation, reason = "a port")]
    Port::from_network(word as u16)
}

#[inline(always)]
fn direction_of(number: u32) -> Direction {
    if number == FORWARD {
        Direction::FORWARD
    } else {
        Direction::REVERSE
    }
}

/// Searches `older_few`. Returns the number of the entry, or [`NONE`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn find_few(
    ctx: *mut bpf_sock_addr,
    upper: u64,
    lower: u64,
    port: u32,
    direction: u32,
) -> u32 {
    let Some(few) = maps::few(&SockAddrContext::new(ctx)) else {
        return NONE;
    };
    let address = Address::from_halves([upper, lower]);
    let found = few.find(&address, port_of(port), direction_of(direction));
    found.unwrap_or(NONE)
}

/// Searches `older_many`. Returns the number of the entry, or [`NONE`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn find_many(
    ctx: *mut bpf_sock_addr,
    upper: u64,
    lower: u64,
    port: u32,
    direction: u32,
) -> u32 {
    let Some(many) = maps::many(&SockAddrContext::new(ctx)) else {
        return NONE;
    };
    let address = Address::from_halves([upper, lower]);
    let is_match = |number| matches_many(ctx, number, upper, lower, port << 1 | direction) != 0;
    let found = many.find(
        &address,
        port_of(port),
        direction_of(direction),
        in_register,
        is_match,
    );
    found.unwrap_or(NONE)
}

/// Calls [`OlderMany::matches`]. The lowest bit of `port` is the direction. Returns 1 for true.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn matches_many(
    ctx: *mut bpf_sock_addr,
    number: u32,
    upper: u64,
    lower: u64,
    port: u32,
) -> u32 {
    let Some(many) = maps::many(&SockAddrContext::new(ctx)) else {
        return 0;
    };
    let address = Address::from_halves([upper, lower]);
    let direction = direction_of(port & 1);
    let is_match = many.matches(in_register(number), &address, port_of(port >> 1), direction);
    is_match.into()
}

/// Returns the number of the entry in `older_few` to reuse, from `first` on.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn least_recent_few(ctx: *mut bpf_sock_addr, first: u32) -> u32 {
    let few = maps::few(&SockAddrContext::new(ctx));
    few.map_or(NONE, |few| few.least_recent(first, in_register))
}

/// Returns the number of the entry in `older_many` to reuse.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn least_recent_many(ctx: *mut bpf_sock_addr) -> u32 {
    let many = maps::many(&SockAddrContext::new(ctx));
    many.map_or(NONE, |many| many.least_recent(in_register))
}

/// Returns the number of the first entry in `older_few` that may move: the first entry stays if the socket is
/// connected to its backend.
#[inline(always)]
fn first_movable(ctx: &SockAddrContext, few: &OlderFew) -> u32 {
    let [front, ..] = &few.entries;
    (front.last_used != 0 && Sock4::new(ctx).is_connected_by(front)).into()
}

/// Finds the older translation of a VIP, and moves it to `older_few` if it is elsewhere.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn recall_to_few(
    ctx: *mut bpf_sock_addr,
    upper: u64,
    lower: u64,
    port: u32,
    now: u64,
) -> u32 {
    let number = find_few(ctx, upper, lower, port, FORWARD);
    if number != NONE {
        return number;
    }
    let context = SockAddrContext::new(ctx);
    let Some(few) = maps::few(&context) else {
        return NONE;
    };
    let first = first_movable(&context, few);
    let from = find_many(ctx, upper, lower, port, FORWARD);
    if from != NONE {
        let to = least_recent_few(ctx, first);
        exchange(&context, from, to);
        return to;
    }
    let vip = Address::from_halves([upper, lower]);
    let cookie = Sock4::new(&context).cookie();
    let Some(many) = maps::many(&context) else {
        return NONE;
    };
    // The key is in the socket's storage, because the stack is small.
    many.spare
        .set(cookie, &vip, port_of(port), Direction::FORWARD);
    if maps::shared(&many.spare).is_none() {
        return NONE;
    }
    let to = least_recent_few(ctx, first);
    move_few_to_many(ctx, to, now);
    // If the translation was the socket's oldest one in `older_shared`, it may just have been removed.
    many.spare
        .set(cookie, &vip, port_of(port), Direction::FORWARD);
    let Some(shared) = maps::shared(&many.spare) else {
        return NONE;
    };
    if let Some(entry) = few.entries.get_mut(in_register(to)) {
        // The entry in `older_shared` stays in the socket's queue.
        entry.copy_from(&shared.origin);
    }
    to
}

/// Exchanges an entry in `older_many` with one in `older_few`.
#[inline(always)]
fn exchange(ctx: &SockAddrContext, from: u32, to: u32) {
    let (Some(few), Some(many)) = (maps::few(ctx), maps::many(ctx)) else {
        return;
    };
    let index = in_register(from);
    if let Some(one) = few.entries.get_mut(in_register(to))
        && let Some(other) = many.entries.get_mut(index)
        && let Some(tag) = many.tags.get_mut(index)
    {
        one.flags &= !Origin::CONNECTED;
        *tag = tags(one);
        many.scratch.origin.copy_from(one);
        one.copy_from(other);
        other.copy_from(&many.scratch.origin);
    }
}

/// Moves the last translation to `older_few`. Returns 0 if there is no memory for a value there. If the VIP of the
/// new last translation has an entry in `older_few`, `known` is its number, and the entry becomes unused or
/// replaced.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn move_last_to_few(ctx: *mut bpf_sock_addr, known: u32, is_kept: u32, now: u64) -> u32 {
    let context = SockAddrContext::new(ctx);
    let Some(last) = maps::origin(&context) else {
        return 0;
    };
    let Some(few) = maps::few_or_new(&context) else {
        maps::count_reason(Reason::TranslationLost);
        return 0;
    };
    if let Some(entry) = few.entries.get_mut(in_register(known)) {
        if is_kept == 0 {
            entry.flags |= Origin::REPLACED;
        } else {
            entry.last_used = 0;
        }
    }
    if last.last_used == 0 {
        return 1;
    }
    let sock = Sock4::new(&context);
    // The daemon identifies the socket by its cookie, which the kernel creates on demand.
    let _cookie = sock.cookie();
    // The translation by which the socket is connected belongs into the first entry.
    let is_connected = sock.is_connected_by(last);
    let first = if is_connected {
        1
    } else {
        first_movable(&context, few)
    };
    let [front, ..] = &few.entries;
    if !is_connected || front.is_live(now) {
        let to = least_recent_few(ctx, first);
        move_few_to_many(ctx, to, now);
        if is_connected {
            copy_within_few(ctx, to);
        } else if let Some(entry) = few.entries.get_mut(in_register(to)) {
            entry.copy_from(last);
            entry.flags &= !Origin::CONNECTED;
        }
    }
    if is_connected {
        let [front, ..] = &mut few.entries;
        front.copy_from(last);
    }
    1
}

/// Copies the first entry in `older_few` to another one. Returns 0.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn copy_within_few(ctx: *mut bpf_sock_addr, to: u32) -> u32 {
    if let Some(few) = maps::few(&SockAddrContext::new(ctx)) {
        let [front, others @ ..] = &mut few.entries;
        if let Some(entry) = others.get_mut(in_register(to.wrapping_sub(1))) {
            entry.copy_from(front);
        }
    }
    0
}

/// Copies an entry in `older_few` to `older_many`, if it is live. Returns 1 if it was copied.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn move_few_to_many(ctx: *mut bpf_sock_addr, from: u32, now: u64) -> u32 {
    let context = SockAddrContext::new(ctx);
    let Some(moved) = recalled(&context, from) else {
        return 0;
    };
    if !moved.is_live(now) {
        return 0;
    }
    if maps::many_or_new(&context).is_none() {
        maps::count_reason(Reason::TranslationLost);
        return 0;
    }
    let to = least_recent_many(ctx);
    move_many_to_shared(ctx, to, now);
    let Some(many) = maps::many(&context) else {
        return 0;
    };
    let index = in_register(to);
    if let Some(entry) = many.entries.get_mut(index)
        && let Some(tag) = many.tags.get_mut(index)
    {
        entry.copy_from(moved);
        entry.flags &= !Origin::CONNECTED;
        *tag = tags(moved);
        many.used = many.used.max(to.wrapping_add(1));
    }
    1
}

/// Copies an entry in `older_many` to `older_shared`, if it is live. Returns 1 if it was copied.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn move_many_to_shared(ctx: *mut bpf_sock_addr, from: u32, now: u64) -> u32 {
    let context = SockAddrContext::new(ctx);
    let Some(many) = maps::many(&context) else {
        return 0;
    };
    let Some(moved) = many.entries.get(in_register(from)) else {
        return 0;
    };
    if !moved.is_live(now) {
        return 0;
    }
    let scratch = &mut many.scratch;
    scratch.origin.copy_from(moved);
    let sock = Sock4::new(&context);
    scratch.key = OverflowKey::new(sock.cookie(), moved.vip, moved.vip_port, Direction::FORWARD);
    // No hook runs when a kernel socket is closed, so its entries would never be removed. A replaced translation
    // would take the place of the one that the VIP has now.
    let is_storable = !moved.is_replaced() && !sock.is_kernel_socket();
    let is_stored = is_storable && {
        shared::make_room(many, now);
        shared::store(many)
    };
    maps::count_reason(if is_stored {
        Reason::Overflowed
    } else {
        Reason::TranslationLost
    });
    is_stored.into()
}

/// Searches all older translations for one that leads to a backend. Returns the number of the entry, or
/// [`NONE`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn find_backend(ctx: *mut bpf_sock_addr, upper: u64, lower: u64, port: u32) -> u32 {
    let few = find_few(ctx, upper, lower, port, REVERSE);
    if few != NONE {
        return few;
    }
    let many = find_many(ctx, upper, lower, port, REVERSE);
    if many != NONE {
        return many + FEW;
    }
    let context = SockAddrContext::new(ctx);
    let address = Address::from_halves([upper, lower]);
    let cookie = Sock4::new(&context).cookie();
    let key = OverflowKey::new(cookie, address, port_of(port), Direction::REVERSE);
    if maps::many(&context).is_some_and(|many| many.shared != 0) && maps::shared(&key).is_some() {
        return SHARED;
    }
    let has_overflow =
        maps::origin(&context).is_some_and(|last| last.flags & Origin::OVERFLOWED != 0);
    if has_overflow && maps::overflow(&key).is_some() {
        return OVERFLOW;
    }
    NONE
}

/// Removes the older translations that lead to an address. Returns 0.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn remove_backend(ctx: *mut bpf_sock_addr, upper: u64, lower: u64, port: u32) -> u32 {
    let context = SockAddrContext::new(ctx);
    // Several VIPs may lead to the same backend. Each round removes one translation.
    for _ in 0..FEW {
        let number = find_few(ctx, upper, lower, port, REVERSE);
        let Some(few) = maps::few(&context) else {
            break;
        };
        let Some(entry) = few.entries.get_mut(in_register(number)) else {
            break;
        };
        entry.last_used = 0;
    }
    for _ in 0..MANY {
        let number = find_many(ctx, upper, lower, port, REVERSE);
        let Some(many) = maps::many(&context) else {
            break;
        };
        let Some(entry) = many.entries.get_mut(in_register(number)) else {
            break;
        };
        entry.last_used = 0;
    }
    let address = Address::from_halves([upper, lower]);
    let cookie = Sock4::new(&context).cookie();
    let key = OverflowKey::new(cookie, address, port_of(port), Direction::REVERSE);
    maps::remove_shared(&key);
    maps::remove_overflow(&key);
    0
}
