//! Redirects connects to ports of edge nodes: to the steering address of the port, on which the tunnel's
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

/// The result of [`redirect`].
pub(crate) enum Steering {
    /// The connect is redirected to the ingress.
    Redirected,
    /// The connect is the daemon's probe, which must not leave the node.
    Refused,
    /// The destination is not steered.
    None,
    /// The steering prefix has no route, so the connect must be refused.
    Closed,
    /// Every lookup found the record of another key, since the hash kept changing.
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
        // Only sockets of the daemon have the mark, so no other process can set the host's cookie.
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

/// Looks up the steering record of an address and port.
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

/// Returns true if a socket may be in the host's network namespace: until the host's cookie is known, any
/// socket may. On the host, a socket that is bound to a device can't reach the ingress, since the route
/// leads over loopback.
#[inline(always)]
fn is_of_host<S: Sock>(sock: &S) -> bool {
    let host = maps::host();
    host == 0 || host == sock.namespace()
}
