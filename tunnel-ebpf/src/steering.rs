//! Ports of edge nodes: a connect to one is redirected to its steering address, on which the tunnel's
//! ingress listens.

use core::convert::Infallible;

use tunnel_common::{
    addr::Protocol,
    lookup::{Lookup, look_up},
    origin::Origin,
    reason::Reason,
    service::FrontKey,
    steering::{Steered, SteeringKey},
};

use crate::{
    context::{self, Sock},
    log, maps,
    origin::{Memory, Remembered},
};

/// The outcome of a connect.
pub(crate) enum Steering {
    /// It is redirected to the ingress.
    Redirected,
    /// It is the daemon's probe, which must not leave the node.
    Refused,
    /// Its destination is not steered.
    None,
    /// The ingress has no route, so the connect is to be refused.
    Closed,
    /// Every lookup read an index that was being replaced.
    Unstable,
}

/// Redirects a connect to a port of an edge node to the ingress. TCP only: kubelets serve nothing over
/// UDP.
#[inline(always)]
pub(crate) fn redirect<S: Sock>(sock: &S, key: &FrontKey) -> Steering {
    if key.protocol != Protocol::TCP || !context::is_steering() && !sock.is_own() {
        return Steering::None;
    }
    let steered = match find(&SteeringKey::new(key.address, key.port)) {
        Lookup::Found((_, steered)) => steered,
        Lookup::None => return Steering::None,
        Lookup::Unstable => return Steering::Unstable,
    };
    if steered.kind == Steered::CANARY {
        // Only the daemon's socket has the mark, so no other process can set the host's cookie.
        if sock.is_own() {
            maps::note_host(sock.namespace());
        }
        return Steering::Refused;
    }
    if sock.is_own() || sock.is_bound_to_device() && is_of_host(sock) {
        return Steering::None;
    }
    let family = if key.address.is_v4() {
        Steered::ROUTED_V4
    } else {
        Steered::ROUTED_V6
    };
    if maps::routed() & family == 0 {
        return Steering::Closed;
    }
    let mut origin = Origin::new(key, steered.to, steered.to_port);
    let reason = if Remembered::of(sock).remember(&mut origin) == Memory::Kept {
        Reason::Steered
    } else {
        Reason::SteeredUntracked
    };
    maps::count(reason);
    sock.set(&origin.backend, origin.backend_port);
    log::translated(&origin, reason);
    Steering::Redirected
}

/// Returns the record of an address and port.
#[inline(always)]
fn find(key: &SteeringKey) -> Lookup<(u32, &'static Steered)> {
    let Ok::<_, Infallible>(found) = look_up(
        key,
        |key| Ok(maps::steer_index(key)),
        |index| Ok(maps::steered(index)),
    );
    found
}

/// Returns true if a socket is known to be in the host's network namespace.
#[inline(always)]
pub(crate) fn is_known_host<S: Sock>(sock: &S) -> bool {
    let host = maps::host();
    host != 0 && host == sock.namespace()
}

/// Returns true if a socket may be in the host's network namespace, as any may until its cookie is
/// known. A socket there that is bound to a device can't reach the ingress, whose route leads over
/// loopback.
#[inline(always)]
fn is_of_host<S: Sock>(sock: &S) -> bool {
    let host = maps::host();
    host == 0 || host == sock.namespace()
}
