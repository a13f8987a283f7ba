//! Refuses connections and datagrams: counts the reason, and makes the system call fail.

use tunnel_common::{
    addr::{Address, Port, Protocol},
    origin::Origin,
    reason::Reason,
    service::FrontendKey,
};

use crate::{
    context::{self, ALLOW, DENY, Sock},
    event_log, maps,
    older::Known,
    origin::{StoreResult, Translations},
};

pub(crate) const ECONNREFUSED: i32 = 111;
pub(crate) const ENOMEM: i32 = 12;
pub(crate) const EHOSTUNREACH: i32 = 113;

/// The system call that a hook runs for.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum SystemCall {
    Connect,
    Send,
}

/// A refusal: the reason to count, and the `errno` for the caller.
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) error: i32,
}

/// The refusal for a record that kept changing while it was read.
pub(crate) const UNSTABLE: Refusal = Refusal {
    reason: Reason::RecordUnstable,
    error: ECONNREFUSED,
};

/// Makes the system call fail, with the given error if possible.
///
/// On kernels before Linux 6.1, programs can't set the error. There, connect() is redirected to an address
/// that refuses at once: for TCP, port 0 on loopback; for UDP, port 1 on loopback. A TCP connect() is instead
/// redirected to an address that has no route if the error is EHOSTUNREACH, or if the socket is bound to a
/// device and so can't reach loopback. All other calls fail with EPERM.
#[inline(always)]
pub(crate) fn refuse<S: Sock>(
    sock: &S,
    key: &FrontendKey,
    call: SystemCall,
    refusal: &Refusal,
) -> i32 {
    maps::count_reason(refusal.reason);
    event_log::refused(key, refusal.reason);
    if context::set_error(refusal.error) || call == SystemCall::Send {
        return DENY;
    }
    let use_unroutable = sock.is_bound_to_device() || refusal.error == EHOSTUNREACH;
    let v4 = key.address.is_v4();
    let loopback = if v4 {
        Address::LOOPBACK_V4
    } else {
        Address::LOOPBACK_V6
    };
    if key.protocol == Protocol::TCP {
        if use_unroutable {
            let unroutable = if v4 {
                Address::BROADCAST_V4
            } else {
                Address::MULTICAST_V6
            };
            sock.set(&unroutable, key.port);
        } else {
            sock.set(&loopback, Port::from_host(0));
        }
        return ALLOW;
    }
    if use_unroutable {
        return DENY;
    }
    // Unlike port 0, port 1 also refuses v4-mapped sockets, and getpeername() still returns the VIP.
    let refusing_port = Port::from_host(1);
    let mut origin = Origin::new(key, loopback, refusing_port);
    origin.last_used = context::now();
    let translations = Translations::of(sock);
    let known = Known {
        number: translations.find(key, origin.last_used),
        is_kept: false,
    };
    if translations.store(&mut origin, known, call) != StoreResult::Stored {
        return DENY;
    }
    sock.set(&loopback, refusing_port);
    ALLOW
}
