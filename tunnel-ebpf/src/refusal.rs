//! Refused connects and datagrams: the reason, and the result that the caller sees.

use tunnel_common::{
    addr::{Address, Port, Protocol},
    origin::Origin,
    reason::Reason,
    service::FrontKey,
};

use crate::{
    context::{self, ALLOW, DENY, Sock},
    log, maps,
    origin::{Memory, Remembered},
};

pub(crate) const ECONNREFUSED: i32 = 111;
pub(crate) const ENOMEM: i32 = 12;
pub(crate) const EHOSTUNREACH: i32 = 113;

/// The kind of a hook, which runs once for a connection or for each datagram.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum Call {
    Connect,
    Send,
}

/// The reason of a refusal, and the error that the caller sees.
pub(crate) struct Refusal {
    pub(crate) reason: Reason,
    pub(crate) error: i32,
}

/// The refusal for a record that kept changing while it was read.
pub(crate) const UNSTABLE: Refusal = Refusal {
    reason: Reason::RecordUnstable,
    error: ECONNREFUSED,
};

/// Makes the system call fail.
///
/// If the error can't be set (before Linux 6.1), a connect is redirected to an address that refuses at
/// once: TCP to port 0 of loopback, UDP to port 1 of it; TCP to an address without a route, if the
/// socket is bound to a device (so that it can't reach loopback) or the error is EHOSTUNREACH. All other
/// calls get EPERM.
#[inline(always)]
pub(crate) fn refuse<S: Sock>(sock: &S, key: &FrontKey, call: Call, refusal: &Refusal) -> i32 {
    maps::count(refusal.reason);
    log::refused(key, refusal.reason);
    if context::set_error(refusal.error) || call == Call::Send {
        return DENY;
    }
    let leads_nowhere = sock.is_bound_to_device() || refusal.error == EHOSTUNREACH;
    let v4 = key.address.is_v4();
    let loopback = if v4 {
        Address::LOOPBACK_V4
    } else {
        Address::LOOPBACK_V6
    };
    if key.protocol == Protocol::TCP {
        if leads_nowhere {
            let nowhere = if v4 {
                Address::BROADCAST_V4
            } else {
                Address::MULTICAST_V6
            };
            sock.set(&nowhere, key.port);
        } else {
            sock.set(&loopback, Port::from_host(0));
        }
        return ALLOW;
    }
    if leads_nowhere {
        return DENY;
    }
    // Port 1, unlike port 0, is refused for v4-mapped sockets too, and keeps the peer's name.
    let refusing = Port::from_host(1);
    let mut origin = Origin::new(key, loopback, refusing);
    origin.used = context::now();
    if Remembered::of(sock).remember(&mut origin) != Memory::Kept {
        return DENY;
    }
    sock.set(&loopback, refusing);
    ALLOW
}
