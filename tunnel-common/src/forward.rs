//! Decides how the tc programs translate a packet, using any implementation of the maps.
//!
//! - [`arrive`] runs at tc ingress and changes destinations: from the frontend to the backend, and from the node's
//!   address that stands for a client to the client.
//! - [`leave`] runs at tc egress and changes sources: from the backend to the frontend, and from the client to the
//!   node's address.
//!
//! In between, the network stack routes the packet from the client to the backend, and back. One exception: if a client
//! uses one port for two frontends with the same backend, both flows would be the same in between. [`arrive`] then
//! replaces the client's port, but not its address, and [`leave`] puts the port back into the replies.
//!
//! A flow gets all of its entries or none. An entry that expires, or whose flow is replaced, is marked as ended, and
//! removed by the daemon or when its key is needed again.

use crate::{
    addr::{Address, Port},
    decide::{self, ClientContext, NoChoice, Traffic},
    flow::{Endpoint, Flow, FlowKey, Phase, Role, Seen, Timeouts},
    lookup::Lookup,
    packet::Packet,
    reason::Reason,
    service::{Frontend, FrontendKey},
};

/// The maximum number of ports that are tried for a flow.
pub const MAX_PORT_TRIES: u32 = 16;

/// The reason why an entry was not inserted.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum NotInserted {
    /// There is an entry with this key.
    Exists,
    /// The map is full.
    Full,
}

/// The maps, the clock and the node, as [`arrive`] and [`leave`] need them.
pub trait Flows: decide::Maps {
    /// Returns the entry with this key. During a concurrent write, it may be another flow's.
    fn flow(&self, key: &FlowKey) -> Option<&Flow>;

    /// Inserts an entry under its own key. If `is_new` is false, replaces the entry with this key.
    ///
    /// # Errors
    ///
    /// Returns an error if the entry can't be inserted.
    fn insert_flow(&self, flow: &Flow, is_new: bool) -> Result<(), NotInserted>;

    /// Records that a packet has used an entry. Writes only what has changed.
    fn touch_flow(&self, flow: &Flow, seen: Seen, now: u32);

    /// Marks an entry as ended.
    fn end_flow(&self, flow: &Flow);

    /// Makes room for an entry, if a flow can be spared. Returns false otherwise.
    fn make_room(&self) -> bool;

    /// Returns the time in seconds since boot.
    fn seconds(&self) -> u32;

    /// Returns the timeouts.
    fn timeouts(&self) -> Timeouts;

    /// Returns true if packets of this client to this backend must leave with the node's address.
    fn must_masquerade(&self, frontend: &Frontend, client: Endpoint, backend: Endpoint) -> bool;

    /// Returns a port that may stand for a client, chosen at random.
    fn random_port(&self) -> Port;

    /// Returns true if no socket of this node uses an endpoint for packets to a backend.
    fn is_free(&self, own: Endpoint, backend: Endpoint) -> bool;
}

/// The decision about a packet at tc ingress.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Arrival {
    /// The packet is left alone.
    Pass,
    /// The packet gets another destination, and the client's port if that differs.
    Translate {
        /// The new destination.
        destination: Endpoint,
        /// The source port.
        source_port: Port,
        /// The reason under which the packet is counted, if it is the first of a flow.
        reason: Option<Reason>,
    },
    /// The packet is refused.
    Refuse(Refused),
}

/// The decision about a packet at tc egress.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Departure {
    /// The packet is left alone.
    Pass,
    /// The packet gets another source, and the client's port if that differs.
    Translate {
        /// The new source.
        source: Endpoint,
        /// The destination port.
        destination_port: Port,
    },
    /// The packet is dropped, because no port can stand for its client.
    Drop(Refused),
}

/// The reason why a packet is not translated, although it is for a frontend, or belongs to a flow.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub enum Refused {
    /// No backend could be chosen.
    NoChoice(NoChoice),
    /// The frontend's record changed during every attempt to read it.
    Unstable,
    /// The map of flows is full, and no flow can be spared.
    FlowsFull,
    /// No port can stand for the client.
    PortsFull,
}

impl Refused {
    /// Returns true if the packet is dropped silently, as kube-proxy does. Otherwise the client gets a reset, or an ICMP
    /// error.
    #[inline(always)]
    #[must_use]
    pub const fn is_drop(self) -> bool {
        match self {
            Self::NoChoice(none) => none.is_drop(),
            Self::Unstable => true,
            Self::FlowsFull | Self::PortsFull => false,
        }
    }
}

/// Decides about a packet at tc ingress. `draft` is memory for the entries of a new flow, which would not fit into the stack
/// of a kernel program.
#[inline(always)]
pub fn arrive<T: Flows>(
    maps: &T,
    context: &impl ClientContext,
    packet: &Packet,
    draft: &mut Flow,
) -> Arrival {
    let (source, destination) = (packet.source_endpoint(), packet.destination_endpoint());
    let key = FlowKey::arriving(source, destination, packet.protocol);
    let now = maps.seconds();
    if let Some(flow) = find(maps, &key) {
        if flow.role == Role::MASQUERADED {
            maps.touch_flow(flow, Seen::from_backend(packet.flags), now);
            return Arrival::Translate {
                destination: flow.forwarded_client(),
                source_port: source.port,
                reason: None,
            };
        }
        if may_continue(maps, flow, packet, now) {
            maps.touch_flow(flow, Seen::from_client(packet.flags), now);
            return Arrival::Translate {
                destination: flow.backend,
                source_port: flow.forwarded_port,
                reason: None,
            };
        }
        end_others(maps, flow);
    }
    // The packets of other connections belong to a flow that began before the programs were attached, or to nobody's.
    if packet.protocol.is_tcp() && !packet.flags.opens() {
        return Arrival::Pass;
    }
    begin(maps, context, packet, now, draft)
}

/// Returns the entry with this key, unless it has ended.
#[inline(always)]
fn find<'a, T: Flows>(maps: &'a T, key: &FlowKey) -> Option<&'a Flow> {
    let flow = maps.flow(key)?;
    (flow.key() == *key && flow.flags & Flow::ENDED == 0).then_some(flow)
}

/// Returns true if a packet from the client belongs to the flow, and doesn't begin another one.
#[inline(always)]
fn may_continue<T: Flows>(maps: &T, flow: &Flow, packet: &Packet, now: u32) -> bool {
    let opens = packet.protocol.is_tcp() && packet.flags.opens();
    let is_udp = !packet.protocol.is_tcp();
    // Datagrams leave a backend that no longer serves at once. TCP stays with its backend to the end.
    if is_udp && decide::state(maps, flow.backend_index) != flow.backend_state {
        return false;
    }
    let timeouts = maps.timeouts();
    if !opens && !flow.is_expired(&timeouts, now) {
        return true;
    }
    // The replies use another entry, which may be more recent, and which shows whether the backend has closed.
    let (mut seen, mut last_used) = (flow.seen, flow.last_used);
    if let Some(forwarded) = find(maps, &flow.key_of(Role::FORWARDED))
        && forwarded.client == flow.client
    {
        seen = seen.union(forwarded.seen);
        last_used = last_used.max(forwarded.last_used);
    }
    let phase = seen.phase(flow.protocol);
    let is_over = timeouts.is_over(phase, last_used, now);
    let is_ending = matches!(phase, Phase::Closed | Phase::Closing | Phase::HalfClosed);
    !(is_over || opens && is_ending)
}

/// Begins a flow.
#[inline(always)]
fn begin<T: Flows>(
    maps: &T,
    context: &impl ClientContext,
    packet: &Packet,
    now: u32,
    flow: &mut Flow,
) -> Arrival {
    let key = FrontendKey::new(packet.destination, packet.destination_port, packet.protocol);
    let record = match decide::find_frontend(maps, context, &key, Traffic::Packets) {
        Lookup::Found(record) => record,
        Lookup::None => return Arrival::Pass,
        Lookup::Unstable => return Arrival::Refuse(Refused::Unstable),
    };
    let choice = match decide::choose_backend(maps, context, &key, record, Traffic::Packets) {
        Ok(choice) => choice,
        Err(none) => return Arrival::Refuse(Refused::NoChoice(none)),
    };
    let (client, backend) = (
        packet.source_endpoint(),
        Endpoint::new(choice.address, choice.port),
    );
    let flags = if maps.must_masquerade(record.frontend, client, backend) {
        Flow::MUST_MASQUERADE
    } else {
        0
    };
    *flow = Flow {
        client,
        frontend: packet.destination_endpoint(),
        backend,
        masquerade: Endpoint::NONE,
        backend_index: choice.index,
        backend_state: decide::state(maps, choice.index),
        service: record.frontend.service,
        last_used: now,
        forwarded_port: client.port,
        protocol: packet.protocol,
        role: Role::FORWARDED,
        seen: Seen::NOTHING,
        flags,
        reserved: 0,
    };
    if let Err(refused) = insert_forwarded(maps, flow) {
        return Arrival::Refuse(refused);
    }
    // An entry with this key has ended, or is replaced.
    flow.role = Role::DIALLED;
    if insert_with_room(maps, flow, false).is_err() {
        end(maps, &flow.key_of(Role::FORWARDED));
        return Arrival::Refuse(Refused::FlowsFull);
    }
    Arrival::Translate {
        destination: flow.backend,
        source_port: flow.forwarded_port,
        reason: Some(choice.reason),
    }
}

/// Ends the entries of a flow other than the dialled one, which is about to be replaced.
#[inline(always)]
fn end_others<T: Flows>(maps: &T, dialled: &Flow) {
    let Some(forwarded) = find(maps, &dialled.key_of(Role::FORWARDED)) else {
        return;
    };
    if forwarded.client != dialled.client || forwarded.frontend != dialled.frontend {
        return;
    }
    if forwarded.masquerade != Endpoint::NONE {
        end(maps, &forwarded.key_of(Role::MASQUERADED));
    }
    maps.end_flow(forwarded);
}

/// Ends the entry with this key, if there is one.
#[inline(always)]
fn end<T: Flows>(maps: &T, key: &FlowKey) {
    if let Some(flow) = find(maps, key) {
        maps.end_flow(flow);
    }
}

/// Inserts the entry for packets between the client and the backend. If another flow has the same key, tries other
/// ports for the client.
#[inline(always)]
fn insert_forwarded<T: Flows>(maps: &T, flow: &mut Flow) -> Result<(), Refused> {
    for _ in 0..MAX_PORT_TRIES {
        match claim(maps, flow) {
            Ok(()) => return Ok(()),
            Err(NotInserted::Full) => return Err(Refused::FlowsFull),
            Err(NotInserted::Exists) => {}
        }
        flow.forwarded_port = maps.random_port();
    }
    Err(Refused::PortsFull)
}

/// Inserts an entry, unless another flow uses its key.
#[inline(always)]
fn claim<T: Flows>(maps: &T, flow: &Flow) -> Result<(), NotInserted> {
    match insert_with_room(maps, flow, true) {
        // Two flows of one client port can replace the entry at once. Only one of them then gets answers.
        Err(NotInserted::Exists) if is_unused(maps, flow) => insert_with_room(maps, flow, false),
        inserted => inserted,
    }
}

/// Returns true if the entry with this flow's key has ended or expired, or belongs to an earlier flow with the same client
/// and frontend.
#[inline(always)]
fn is_unused<T: Flows>(maps: &T, flow: &Flow) -> bool {
    let key = flow.key();
    match maps.flow(&key) {
        Some(other) if other.key() == key => {
            other.flags & Flow::ENDED != 0
                || other.is_expired(&maps.timeouts(), maps.seconds())
                || other.client == flow.client && other.frontend == flow.frontend
        }
        Some(_) | None => false,
    }
}

/// Inserts an entry. If the map is full, makes room once.
#[inline(always)]
fn insert_with_room<T: Flows>(maps: &T, flow: &Flow, is_new: bool) -> Result<(), NotInserted> {
    match maps.insert_flow(flow, is_new) {
        Err(NotInserted::Full) if maps.make_room() => maps.insert_flow(flow, is_new),
        inserted => inserted,
    }
}

/// Decides about a packet at tc egress. `own` is the address of this node that stands for clients on this link, in the
/// packet's family. `draft` is memory, as for [`arrive`].
#[inline(always)]
pub fn leave<T: Flows>(
    maps: &T,
    packet: &Packet,
    own: Option<Address>,
    draft: &mut Flow,
) -> Departure {
    let (source, destination) = (packet.source_endpoint(), packet.destination_endpoint());
    let key = FlowKey::forwarded(source, destination, packet.protocol);
    let Some(flow) = find(maps, &key) else {
        return Departure::Pass;
    };
    let now = maps.seconds();
    if source == flow.backend {
        maps.touch_flow(flow, Seen::from_backend(packet.flags), now);
        return Departure::Translate {
            source: flow.frontend,
            destination_port: flow.client.port,
        };
    }
    maps.touch_flow(flow, Seen::from_client(packet.flags), now);
    if flow.flags & Flow::MUST_MASQUERADE == 0 {
        return Departure::Pass;
    }
    if flow.masquerade != Endpoint::NONE {
        return Departure::Translate {
            source: flow.masquerade,
            destination_port: destination.port,
        };
    }
    *draft = *flow;
    let masqueraded = own
        .ok_or(Refused::PortsFull)
        .and_then(|own| masquerade(maps, draft, Endpoint::new(own, source.port)));
    match masqueraded {
        Ok(source) => Departure::Translate {
            source,
            destination_port: destination.port,
        },
        Err(refused) => {
            // The client's next packet begins another flow.
            end(maps, &flow.key_of(Role::DIALLED));
            maps.end_flow(flow);
            Departure::Drop(refused)
        }
    }
}

/// Finds a port of the node that stands for the client, preferably the client's own, and stores it in the flow.
#[inline(always)]
fn masquerade<T: Flows>(maps: &T, flow: &mut Flow, first: Endpoint) -> Result<Endpoint, Refused> {
    flow.masquerade = first;
    for _ in 0..MAX_PORT_TRIES {
        if maps.is_free(flow.masquerade, flow.backend) {
            flow.role = Role::MASQUERADED;
            match claim(maps, flow) {
                Ok(()) => {
                    flow.role = Role::FORWARDED;
                    insert_with_room(maps, flow, false).map_err(|_full| Refused::FlowsFull)?;
                    return Ok(flow.masquerade);
                }
                Err(NotInserted::Full) => return Err(Refused::FlowsFull),
                Err(NotInserted::Exists) => {}
            }
        }
        flow.masquerade = first.with_port(maps.random_port());
    }
    Err(Refused::PortsFull)
}

#[cfg(test)]
mod tests;
