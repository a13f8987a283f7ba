//! A socket's queue of translations in the map `older_shared`.

use aya_ebpf::{bindings::bpf_sock, programs::SockContext};
use tunnel_common::{
    older::{MAX_SHARED, OlderMany, OlderShared},
    origin::{Direction, Origin},
    reason::Reason,
};

use crate::maps;

/// Removes the entries in `older_shared` of a socket that is being closed.
#[inline(always)]
pub(crate) fn release(ctx: &SockContext) {
    // MAX_SHARED bounds the loop, as the verifier requires.
    for _ in 0..MAX_SHARED {
        if release_oldest_shared(ctx.sock) == 0 {
            return;
        }
    }
}

/// Removes the oldest translation in `older_shared` of a socket that is being closed. Returns 0 if there is
/// none.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn release_oldest_shared(sock: *mut bpf_sock) -> u32 {
    let Some(many) = maps::many_of_closed(&SockContext::new(sock)) else {
        return 0;
    };
    if many.shared == 0 {
        return 0;
    }
    remove_oldest(many);
    1
}

/// Removes the socket's oldest translation in `older_shared` if the socket has the maximum number there, or if
/// the translation is no longer live.
#[inline(always)]
pub(super) fn make_room(many: &mut OlderMany, now: u64) {
    if many.shared == 0 {
        return;
    }
    let [oldest, _] = &many.queue;
    let is_live = maps::shared(oldest).is_some_and(|entry| entry.origin.is_live(now));
    if is_live {
        if many.shared < MAX_SHARED {
            return;
        }
        maps::count_reason(Reason::TranslationLost);
    }
    remove_oldest(many);
}

/// Stores the translation in `scratch` under its VIP and under its backend. Returns false if the map is full.
#[inline(always)]
pub(super) fn store(many: &mut OlderMany) -> bool {
    if let Some(entry) = maps::shared(&many.scratch.key) {
        // The socket has moved a translation of this VIP to the map before.
        remove_reverse(many, &entry.origin);
        entry.origin.copy_from(&many.scratch.origin);
    } else if maps::insert_shared(&many.scratch) {
        append_to_queue(many);
    } else {
        return false;
    }
    let OlderShared { key, origin, .. } = &mut many.scratch;
    key.set(
        key.cookie,
        &origin.backend,
        origin.backend_port,
        Direction::REVERSE,
    );
    maps::insert_shared(&many.scratch)
}

/// Appends the key in `scratch` to the socket's queue.
#[inline(always)]
fn append_to_queue(many: &mut OlderMany) {
    let key = &many.scratch.key;
    let [oldest, newest] = &mut many.queue;
    if many.shared != 0
        && let Some(last) = maps::shared(newest)
    {
        last.next.copy_from(key);
        many.shared += 1;
    } else {
        // The queue is empty, or an empty map of another size has replaced the map.
        oldest.copy_from(key);
        many.shared = 1;
    }
    newest.copy_from(key);
}

/// Removes the socket's oldest translation in `older_shared`. The queue must not be empty.
#[inline(always)]
fn remove_oldest(many: &mut OlderMany) {
    let [oldest, _] = &many.queue;
    let Some(entry) = maps::shared(oldest) else {
        // An empty map of another size has replaced the map.
        many.shared = 0;
        return;
    };
    remove_reverse(many, &entry.origin);
    // Read before the removal, because a program on another CPU may use the element at once.
    let [oldest, _] = &mut many.queue;
    many.spare.copy_from(oldest);
    oldest.copy_from(&entry.next);
    maps::remove_shared(&many.spare);
    many.shared -= 1;
}

/// Removes a translation's entry under its backend, unless the entry belongs to another VIP.
#[inline(always)]
fn remove_reverse(many: &mut OlderMany, origin: &Origin) {
    let [oldest, _] = &many.queue;
    many.spare.set(
        oldest.cookie,
        &origin.backend,
        origin.backend_port,
        Direction::REVERSE,
    );
    if let Some(entry) = maps::shared(&many.spare)
        && entry.origin.vip_port == origin.vip_port
        && entry.origin.vip == origin.vip
    {
        maps::remove_shared(&many.spare);
    }
}
