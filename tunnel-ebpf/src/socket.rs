//! The socket hooks: they translate the VIP of connects and datagrams to a backend, and restore it later.

use tunnel_common::{
    addr::Protocol,
    decide::{self, NoChoice, Record, Traffic},
    lookup::Lookup,
    origin::Origin,
    reason::Reason,
    service::{Front, FrontKey},
};

use crate::{
    client::Asking,
    context::{self, ALLOW, DENY, Sock},
    log,
    maps::{self, Kernel},
    origin::{Memory, Remembered},
    refusal::{Call, ECONNREFUSED, EHOSTUNREACH, ENOMEM, Refusal, UNSTABLE, refuse},
    steering::{self, Steering},
};

/// Handles `connect(2)` of TCP and UDP sockets.
#[inline(always)]
pub(crate) fn connect<S: Sock>(sock: &S) -> i32 {
    let Some(key) = sock.key() else { return ALLOW };
    let refusal = match front(sock, &key) {
        Lookup::Found(_) if sock.is_own() => return ALLOW,
        Lookup::Found(record) => match translate(sock, Remembered::of(sock), &key, record) {
            Ok(()) => return ALLOW,
            Err(refusal) => refusal,
        },
        Lookup::Unstable => UNSTABLE,
        Lookup::None => match steering::redirect(sock, &key) {
            Steering::Redirected => return ALLOW,
            Steering::Refused => return DENY,
            Steering::None => {
                log::left_alone(&key);
                Remembered::of(sock).forget(&key);
                return ALLOW;
            }
            Steering::Closed => Refusal {
                reason: Reason::SteeringNoRoute,
                error: ECONNREFUSED,
            },
            Steering::Unstable => UNSTABLE,
        },
    };
    refuse(sock, &key, Call::Connect, &refusal)
}

/// Handles `sendto(2)` and `sendmsg(2)` of UDP sockets with an address, and every `send(2)` of connected
/// v4-mapped UDP sockets.
#[inline(always)]
pub(crate) fn send<S: Sock>(sock: &S) -> i32 {
    let Some(key) = sock.key() else { return ALLOW };
    let record = match front(sock, &key) {
        Lookup::Found(record) => Some(record),
        Lookup::Unstable => None,
        Lookup::None => {
            log::left_alone(&key);
            return ALLOW;
        }
    };
    // For a connected v4-mapped socket, each send runs this hook with the address of the backend. If that
    // address is a frontend too, it must not be translated again.
    let remembered = Remembered::of(sock);
    if remembered.leads_to(&key) {
        log::goes_on(&key);
        return ALLOW;
    }
    let refusal = match record {
        Some(_) if sock.is_own() => return ALLOW,
        Some(record) => match translate(sock, remembered, &key, record) {
            Ok(()) => return ALLOW,
            Err(refusal) => refusal,
        },
        None => UNSTABLE,
    };
    refuse(sock, &key, Call::Send, &refusal)
}

/// Looks up the frontend of a key, if it serves sockets.
#[inline(always)]
fn front<S: Sock>(sock: &S, key: &FrontKey) -> Lookup<Record<'static>> {
    decide::front(&Kernel, &Asking(sock), key, Traffic::Sockets)
}

/// Handles `recvfrom(2)` and `recvmsg(2)` of UDP sockets: replaces the sender's address by the VIP.
#[inline(always)]
pub(crate) fn receive<S: Sock>(sock: &S) {
    if let Some(origin) = Remembered::of(sock).restore() {
        maps::touch(origin, context::now());
    }
}

/// Handles `getpeername(2)`: replaces the peer's address by the VIP.
#[inline(always)]
pub(crate) fn peername<S: Sock>(sock: &S) {
    Remembered::of(sock).restore();
}

/// Redirects a connect or datagram to a backend.
#[inline(always)]
fn translate<S: Sock>(
    sock: &S,
    remembered: Remembered<'_, S>,
    key: &FrontKey,
    record: Record<'_>,
) -> Result<(), Refusal> {
    // Only UDP flows have a timeout, and reading the clock costs time.
    let is_udp = key.protocol == Protocol::UDP;
    let now = if is_udp { context::now() } else { 0 };
    let kept = if is_udp {
        held(&remembered, key, record.front, now)
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
    match remembered.remember(&mut origin) {
        Memory::Kept => {}
        Memory::OfKernel => reason = Reason::TranslatedKernel,
        Memory::Full if is_udp => {
            maps::count_refused(origin.service);
            return Err(Refusal {
                reason: Reason::SocketStorageFull,
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

/// Chooses a backend of a frontend, and counts the choice or refusal for its service port.
#[inline(always)]
fn chosen<S: Sock>(
    sock: &S,
    key: &FrontKey,
    record: Record<'_>,
) -> Result<(Origin, Reason), Refusal> {
    let service = record.front.service;
    match decide::backend(&Kernel, &Asking(sock), key, record, Traffic::Sockets) {
        Ok(choice) => {
            maps::count_sent(service);
            let mut origin = Origin::new(key, choice.address, choice.port);
            (origin.index, origin.service) = (choice.index, service);
            // The backend of a TCP socket is never checked again, so its state is not stored.
            if key.protocol == Protocol::UDP {
                origin.state = decide::state(&Kernel, choice.index);
            }
            Ok((origin, choice.reason))
        }
        Err(none) => {
            maps::count_refused(service);
            Err(refusal_of(none))
        }
    }
}

/// Returns the refusal if no backend was chosen: EHOSTUNREACH where kube-proxy would drop packets.
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

/// Returns the stored translation of a UDP flow, if the flow may keep its backend.
#[inline(always)]
fn held<S: Sock>(
    remembered: &Remembered<'_, S>,
    key: &FrontKey,
    front: &Front,
    now: u64,
) -> Option<Origin> {
    let mut kept = remembered.flow(key)?;
    let backend = decide::held(&Kernel, front, &kept, now)?;
    // The kernel may have reused the hash element during the copy, which then mixes two translations. The
    // key and the backend's entry are consistent, so the addresses are taken from those.
    kept.vip = key.address;
    kept.vip_port = key.port;
    kept.backend = backend.address;
    kept.backend_port = backend.port;
    Some(kept)
}
