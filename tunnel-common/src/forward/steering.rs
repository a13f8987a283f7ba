//! Sends forwarded connections to edge nodes' kubelets to the ingress of the tunnel, as the socket hooks do with those that
//! begin on this node.

use super::{Flows, Step, or_pass, run::NewBackend, sender};
use crate::{
    addr::{Address, Port, Protocol},
    decide,
    flow::{Endpoint, Flow},
    locality,
    lookup::Lookup,
    packet_link::PacketLink,
    reason::Reason,
    service::SourceRange,
    steering::{SteeringKey, SteeringRecord},
};

/// The number of entries in the array `forward_ranges`.
pub const MAX_FORWARD_RANGES: u32 = 16;

/// The steering maps. Without these methods, nothing is steered.
pub trait Steering {
    /// Returns true if connections to edge nodes are steered.
    fn is_steering_enabled(&self) -> bool {
        false
    }

    /// Returns the steering record for an edge node's address and port.
    fn steering_record(&self, _key: &SteeringKey) -> Lookup<&SteeringRecord> {
        Lookup::None
    }

    /// Returns the families whose steering prefix is routed to this node, as a combination of `SteeringRecord::ROUTED_*`.
    fn routed_families(&self) -> u64 {
        0
    }

    /// Returns an entry of the array `forward_ranges`.
    fn forwarded_range(&self, _index: u32) -> Option<&SourceRange> {
        None
    }
}

/// Decides about a packet that begins a connection and is for no Service. Returns [`Step::Next`] if the connection goes to
/// the ingress, and [`Step::Pass`] if its destination is not steered, or its sender may not use the ingress.
#[inline(always)]
pub fn steer<T: Flows + ?Sized>(maps: &T) -> Step {
    let key = maps.with_run(|run| {
        let to = &run.destination;
        (run.protocol == Protocol::TCP && run.opens())
            .then(|| SteeringKey::new(to.address, to.port))
    });
    let Some(Some(key)) = key else {
        return Step::Pass;
    };
    let record = match maps.steering_record(&key) {
        Lookup::Found(record) => record,
        Lookup::None => return Step::Pass,
        Lookup::Unstable => return stop(maps, Reason::RecordUnstable, Step::Drop),
    };
    let link_flags = sender::flags_of_link(maps);
    if record.kind != SteeringRecord::NODE || link_flags & PacketLink::KNOWN_FLOWS_ONLY != 0 {
        return Step::Pass;
    }
    // Pods of this node may use the ingress, which applies `tunnel.steering.allow`.
    let is_pod_here = link_flags & PacketLink::OF_PODS_HERE != 0;
    if !is_pod_here && !maps.may_be_forwarded() {
        return Step::Pass;
    }
    if maps.routed_families() & SteeringRecord::routed(key.address.is_v4()) == 0 {
        return stop(maps, Reason::SteeringNoRoute, Step::Refuse);
    }
    if maps.is_frozen() {
        return Step::Defer;
    }
    begin(maps, (record.steering_address, record.ingress_port))
}

/// Stores the reason why the packet goes nowhere, and returns the verdict.
#[inline(always)]
fn stop<T: Flows + ?Sized>(maps: &T, reason: Reason, verdict: Step) -> Step {
    maps.with_run(|run| run.stop(Flow::NO_SERVICE, reason));
    verdict
}

/// Stores the new flow in the run. The ingress is its backend.
#[inline(always)]
fn begin<T: Flows + ?Sized>(maps: &T, (address, port): (Address, Port)) -> Step {
    let flags = if sender::flags_of_link(maps) & PacketLink::LEADS_TO_PODS != 0 {
        Flow::ON_POD_LINKS
    } else {
        0
    };
    let backend = NewBackend {
        endpoint: Endpoint::new(address, port),
        index: Flow::NO_BACKEND,
        state: decide::state(maps, Flow::NO_BACKEND),
        service: Flow::NO_SERVICE,
    };
    or_pass(maps.with_run(|run| {
        run.begin(backend, flags, Reason::Steered);
        Step::Next
    }))
}

/// Returns true if the sender's connections to edge nodes are forwarded to the ingress (`tunnel.steering.forwarded`).
#[inline(always)]
pub fn may_be_forwarded<T: Flows + ?Sized>(maps: &T) -> bool {
    // Without branches, so that the verifier need not follow each combination.
    let contained = (0..MAX_FORWARD_RANGES).fold(0, |all, index| {
        all | maps.relation_to_forwarded_range(index)
    });
    contained & locality::CONTAINED != 0
}

/// Returns the relation of the sender of the packet to an entry of `forward_ranges`.
#[inline(always)]
pub fn relation_to_forwarded_range<T: Flows + ?Sized>(maps: &T, index: u32) -> u32 {
    let Some(range) = maps.forwarded_range(index) else {
        return 0;
    };
    let relation = maps.with_run(|run| locality::relation(&run.source.address, range));
    relation.unwrap_or(0)
}
