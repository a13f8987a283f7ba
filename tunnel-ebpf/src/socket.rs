//! The socket hooks: they redirect connections and datagrams from a VIP to a backend, and later restore the
//! VIP.

use tunnel_common::{
    addr::Protocol,
    decide::{self, FrontendRecord, NoChoice, Traffic},
    lookup::Lookup,
    origin::Origin,
    reason::Reason,
    service::{Frontend, FrontendKey},
};

use crate::{
    client_address::HookSocket,
    context::{self, ALLOW, DENY, Sock},
    event_log,
    maps::{self, KernelMaps},
    older::Known,
    origin::{StoreResult, Translations},
    refusal::{ECONNREFUSED, EHOSTUNREACH, ENOMEM, Refusal, SystemCall, UNSTABLE, refuse},
    steering::{self, SteeringResult},
};

/// Handles `connect(2)` on TCP and UDP sockets.
#[inline(always)]
pub(crate) fn connect<S: Sock>(sock: &S) -> i32 {
    let Some(key) = sock.frontend_key() else {
        return ALLOW;
    };
    let refusal = match find_frontend(sock, &key) {
        Lookup::Found(_) if steering::is_daemon_socket(sock) => return ALLOW,
        Lookup::Found(record) => match translate(sock, SystemCall::Connect, &key, record) {
            Ok(()) => return ALLOW,
            Err(refusal) => refusal,
        },
        Lookup::Unstable => UNSTABLE,
        Lookup::None => match steering::redirect(sock, &key) {
            SteeringResult::Redirected => return ALLOW,
            SteeringResult::Probe => return DENY,
            SteeringResult::NotSteered => {
                event_log::not_translated(&key);
                Translations::of(sock).remove(&key);
                return ALLOW;
            }
            SteeringResult::NoRoute => Refusal {
                reason: Reason::SteeringNoRoute,
                error: ECONNREFUSED,
            },
            SteeringResult::Unstable => UNSTABLE,
        },
    };
    refuse(sock, &key, SystemCall::Connect, &refusal)
}

/// Handles `sendto(2)` and `sendmsg(2)` with an address on UDP sockets, and every `send(2)` on connected
/// v4-mapped UDP sockets.
#[inline(always)]
pub(crate) fn send<S: Sock>(sock: &S) -> i32 {
    let Some(key) = sock.frontend_key() else {
        return ALLOW;
    };
    let record = match find_frontend(sock, &key) {
        Lookup::Found(record) => Some(record),
        Lookup::Unstable => None,
        Lookup::None => {
            event_log::not_translated(&key);
            return ALLOW;
        }
    };
    // For a connected v4-mapped socket, each send runs this hook with the peer's address. The peer is a backend,
    // or was no frontend yet when the socket connected to it. Replies from another address would not arrive.
    if sock.is_peer(&key.address, key.port) {
        event_log::peer_kept(&key);
        return ALLOW;
    }
    let refusal = match record {
        Some(_) if steering::is_daemon_socket(sock) => return ALLOW,
        Some(record) => match translate(sock, SystemCall::Send, &key, record) {
            Ok(()) => return ALLOW,
            Err(refusal) => refusal,
        },
        None => UNSTABLE,
    };
    refuse(sock, &key, SystemCall::Send, &refusal)
}

/// Looks up the frontend with this key, if it serves sockets.
#[inline(always)]
fn find_frontend<S: Sock>(sock: &S, key: &FrontendKey) -> Lookup<FrontendRecord<'static>> {
    decide::find_frontend(&KernelMaps, &HookSocket(sock), key, Traffic::Sockets)
}

/// Handles `recvfrom(2)` and `recvmsg(2)` on UDP sockets: replaces the sender's address with the VIP.
#[inline(always)]
pub(crate) fn receive<S: Sock>(sock: &S) {
    if let Some(origin) = Translations::of(sock).restore_sender() {
        // Otherwise, late answers would keep the translation for ever.
        if !origin.is_replaced() {
            maps::touch(origin, context::now());
        }
    }
}

/// Handles `getpeername(2)`: replaces the peer's address with the VIP.
#[inline(always)]
pub(crate) fn getpeername<S: Sock>(sock: &S) {
    Translations::of(sock).restore_peer();
}

/// Redirects a connection or datagram to a backend.
#[inline(always)]
fn translate<S: Sock>(
    sock: &S,
    call: SystemCall,
    key: &FrontendKey,
    record: FrontendRecord<'_>,
) -> Result<(), Refusal> {
    let translations = Translations::of(sock);
    // Only UDP flows have a timeout, and reading the clock takes time.
    let is_udp = key.protocol == Protocol::UDP;
    let now = if is_udp { context::now() } else { 0 };
    let mut known = Known::NOTHING;
    let kept = if is_udp {
        known.number = translations.find(key, now);
        let found = translations.found(known.number);
        found.and_then(|found| kept_translation(sock, found, record.frontend, now))
    } else {
        None
    };
    known.is_kept = kept.is_some();
    let (mut origin, mut reason) = if let Some(kept) = kept {
        (kept, Reason::TranslatedSticky)
    } else {
        choose(sock, key, record)?
    };
    origin.last_used = now;
    // A new translation has no flags.
    origin.flags = origin.flags & Origin::CONNECTED | Origin::COUNTED;
    match translations.store(&mut origin, known, call) {
        StoreResult::Stored => {}
        StoreResult::KernelSocket => reason = Reason::TranslatedKernel,
        StoreResult::NoMemory if is_udp => {
            maps::count_refused(origin.service);
            return Err(Refusal {
                reason: Reason::SocketStorageFull,
                error: ENOMEM,
            });
        }
        StoreResult::NoMemory => reason = Reason::TranslatedUntracked,
    }
    maps::count_reason(reason);
    sock.set(&origin.backend, origin.backend_port);
    event_log::translated(&origin, reason);
    Ok(())
}

/// Chooses one of the frontend's backends, and counts the choice or refusal for the service port.
#[inline(always)]
fn choose<S: Sock>(
    sock: &S,
    key: &FrontendKey,
    record: FrontendRecord<'_>,
) -> Result<(Origin, Reason), Refusal> {
    let service = record.frontend.service;
    match decide::choose_backend(
        &KernelMaps,
        &HookSocket(sock),
        key,
        record,
        Traffic::Sockets,
    ) {
        Ok(choice) => {
            maps::count_sent(service);
            let mut origin = Origin::new(key, choice.address, choice.port);
            (origin.index, origin.service) = (choice.index, service);
            // A TCP socket's backend is never checked again, so its state is not stored.
            if key.protocol == Protocol::UDP {
                origin.state = decide::state(&KernelMaps, choice.index);
            }
            Ok((origin, choice.reason))
        }
        Err(none) => {
            maps::count_refused(service);
            Err(refusal_of(none))
        }
    }
}

/// Returns the refusal to use if no backend was chosen: EHOSTUNREACH if kube-proxy would drop the packets,
/// otherwise ECONNREFUSED.
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

/// Returns a copy of a UDP flow's stored translation, if the flow may keep its backend.
#[inline(always)]
fn kept_translation<S: Sock>(
    sock: &S,
    stored: &Origin,
    frontend: &Frontend,
    now: u64,
) -> Option<Origin> {
    let mut kept = *stored;
    // The flow of a connected socket is never idle, because no hook sees most of its datagrams. The kernel would
    // drop the answers of another backend.
    if sock.is_connected_by(&kept) {
        kept.last_used = now;
    }
    let is_kept = decide::flow_backend(&KernelMaps, frontend, &kept, now).is_some();
    is_kept.then_some(kept)
}
