//! Redirects each connection bound for a port on an edge node to that port's steering address, where the
//! tunnel's ingress listens.

use core::convert::Infallible;

use tunnel_common::{
    addr::Protocol,
    lookup::{Lookup, look_up},
    origin::Origin,
    reason::Reason,
    service::FrontendKey,
    steering::{SteeringKey, SteeringRecord},
};

use crate::{
    context::{self, Sock},
    event_log, maps,
    older::Known,
    origin::{StoreResult, Translations},
    refusal::SystemCall,
};

/// The result of [`redirect`].
pub(crate) enum SteeringResult {
    /// The connection is redirected to the ingress.
    Redirected,
    /// The connection is the daemon's probe, which must not leave the node.
    Probe,
    /// The destination is not steered.
    NotSteered,
    /// The steering prefix has no route, so the connection must be refused.
    NoRoute,
    /// Every lookup found another key's record, because the hash kept changing.
    Unstable,
}

/// Redirects a connection to the ingress if it is bound for a steered port on an edge node. Only TCP
/// connections are redirected, because kubelets serve nothing over UDP.
#[inline(always)]
pub(crate) fn redirect<S: Sock>(sock: &S, key: &FrontendKey) -> SteeringResult {
    // If nothing is steered, only the daemon's probe is looked up.
    if key.protocol != Protocol::TCP || !context::is_steering_enabled() && !sock.has_daemon_mark() {
        return SteeringResult::NotSteered;
    }
    let record = match find(&SteeringKey::new(key.address, key.port)) {
        Lookup::Found((_, record)) => record,
        Lookup::None => return SteeringResult::NotSteered,
        Lookup::Unstable => return SteeringResult::Unstable,
    };
    if record.kind == SteeringRecord::PROBE {
        // A process in a user namespace of its own can set the daemon's mark, but no process can choose the
        // cookie of its socket. So only the daemon can set the host's cookie.
        if record.probe_cookie() == sock.cookie() {
            maps::store_host_namespace(sock.namespace());
        }
        return SteeringResult::Probe;
    }
    if is_daemon_socket(sock) || sock.is_bound_to_device() && may_be_on_host(sock) {
        return SteeringResult::NotSteered;
    }
    if maps::routed_families() & SteeringRecord::routed(key.address.is_v4()) == 0 {
        return SteeringResult::NoRoute;
    }
    let mut origin = Origin::new(key, record.steering_address, record.ingress_port);
    let reason = if Translations::of(sock).store(&mut origin, Known::NOTHING, SystemCall::Connect)
        == StoreResult::Stored
    {
        Reason::Steered
    } else {
        Reason::SteeredUntracked
    };
    maps::count_reason(reason);
    sock.set(&origin.backend, origin.backend_port);
    event_log::translated(&origin, reason);
    SteeringResult::Redirected
}

/// Looks up the steering record for an address and port.
#[inline(always)]
pub(crate) fn find(key: &SteeringKey) -> Lookup<(u32, &'static SteeringRecord)> {
    let Ok::<_, Infallible>(found) = look_up(
        key,
        |key| Ok(maps::steering_index(key)),
        |index| Ok(maps::steering_record(index)),
    );
    found
}

/// Returns true if a socket is known to be in the host's network namespace.
#[inline(always)]
pub(crate) fn is_known_host<S: Sock>(sock: &S) -> bool {
    let host = maps::host_namespace();
    host != 0 && host == sock.namespace()
}

/// Returns true if a socket belongs to the daemon: it has the daemon's mark, and is in the daemon's network
/// namespace, the host's. In a pod, a process with CAP_NET_RAW or in a user namespace of its own can set the
/// mark, too.
#[inline(always)]
pub(crate) fn is_daemon_socket<S: Sock>(sock: &S) -> bool {
    sock.has_daemon_mark() && may_be_on_host(sock)
}

/// Returns true if a socket may be in the host's network namespace. Until the host's cookie is known, returns
/// true for every socket. On the host, a socket bound to a device can't reach the ingress, because the route
/// goes through the loopback device.
#[inline(always)]
fn may_be_on_host<S: Sock>(sock: &S) -> bool {
    let host = maps::host_namespace();
    host == 0 || host == sock.namespace()
}
