//! Ports of edge nodes: a connect to one goes to an address that stands for it, where the tunnel's
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

/// What became of a connect.
pub(crate) enum Steering {
    /// It goes to the ingress.
    Redirected,
    /// It was the daemon's probe, and is not to leave.
    Refused,
    /// It is none of the tunnel's.
    None,
    /// There is no route to the ingress, so it is to be refused.
    Closed,
    /// Each try met an index that was being replaced.
    Unstable,
}

/// Sends a connect to a port of an edge node to the ingress. Of TCP only: kubelets serve nothing
/// over UDP.
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
        // Only the daemon's socket bears the mark, so nobody else can name the host.
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

/// The record of an address and port.
#[inline(always)]
fn find(key: &SteeringKey) -> Lookup<(u32, &'static Steered)> {
    let Ok::<_, Infallible>(found) = look_up(
        key,
        |key| Ok(maps::steer_index(key)),
        |index| Ok(maps::steered(index)),
    );
    found
}

/// Whether a socket is known to be in the host's network namespace.
#[inline(always)]
pub(crate) fn is_known_host<S: Sock>(sock: &S) -> bool {
    let host = maps::host();
    host != 0 && host == sock.namespace()
}

/// Whether a socket is in the host's network namespace. There, one that is bound to a device can't
/// reach the ingress, which is reached by loopback. While the namespace is not known, any may be.
#[inline(always)]
fn is_of_host<S: Sock>(sock: &S) -> bool {
    let host = maps::host();
    host == 0 || host == sock.namespace()
}
