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
//! Packets of this host arrive on no link, and replies to it leave by none, so [`host`] does both at the link that there is.
//!
//! A flow gets all of its entries or none. An entry that expires, or whose flow is replaced, is marked as ended, and
//! removed by the daemon or when its key is needed again.
//!
//! Each decision is a sequence of [`steps`], which share a [`Run`] and otherwise take and return numbers. In the kernel
//! each step is a separate function, because the verifier checks such a function only once.

pub mod errors;
pub mod fragments;
pub mod host;
pub mod lifetime;
pub mod ports;
pub mod reclaim;
pub mod redirect;
mod run;
pub mod sender;
pub mod steering;
pub mod steps;

pub use self::{
    reclaim::RECENT_FLOWS_OF_CPU,
    run::{End, Insertion, Run, Step},
    steering::{MAX_FORWARD_RANGES, Steering},
};
use crate::{
    addr::{Address, Port, Protocol},
    decide,
    flow::{Endpoint, Flow, FlowKey, Role, Seen, Timeouts},
    locality::Locality,
    packet::Packet,
    packet_link::PacketLink,
    reason::Reason,
    service::SourceRange,
    service_range::ServiceRange,
};

/// The maps, the clock and the node, as [`arrive`] and [`leave`] need them.
pub trait Flows: decide::Maps + Steering {
    /// Calls a function with the state of this run, or returns `None` if there is none. No other method may be called
    /// meanwhile that uses the state, such as a step.
    fn with_run<R>(&self, work: impl FnOnce(&mut Run) -> R) -> Option<R>;

    /// Returns the entry with this key. During a concurrent write, it may be another flow's. The reference may only be used
    /// for [`Self::copy_flow`], [`Self::touch_flow`] and [`Self::end_flow`].
    fn flow(&self, key: &FlowKey) -> Option<&Flow>;

    /// Copies an entry.
    fn copy_flow(&self, flow: &Flow, copy: &mut Flow);

    /// Inserts an entry under its own key. If `is_new` is false, replaces the entry with this key.
    fn insert_flow(&self, flow: &Flow, is_new: bool) -> Insertion;

    /// Records that a packet has used an entry. Writes only what has changed.
    fn touch_flow(&self, flow: &Flow, seen: Seen, now: u32);

    /// Stores [`Flow::expected`] in an entry.
    fn expect(&self, flow: &Flow, number: u16);

    /// Marks an entry as ended.
    fn end_flow(&self, flow: &Flow);

    /// Removes the entry with this key. Returns true if there was one.
    fn remove_flow(&self, key: &FlowKey) -> bool;

    /// Returns the key of a recent flow.
    fn recent_flow(&self, index: u32) -> Option<&FlowKey>;

    /// Returns the index of a recent flow of this CPU or of one chosen at random. The last one has age 0.
    fn recent_index(&self, is_of_this_cpu: bool, age: u32) -> u32;

    /// Stores the key of a new flow as the last one of this CPU.
    fn record_recent_flow(&self, key: &FlowKey);

    /// Counts a reason other than the one in the run.
    fn count(&self, reason: Reason);

    /// Returns the time in seconds of the monotonic clock.
    fn seconds(&self) -> u32;

    /// Returns true if no flow may begin, because the flows are being moved to another map.
    fn is_frozen(&self) -> bool;

    /// Returns the timeouts.
    fn timeouts(&self) -> Timeouts;

    /// Returns an entry of the array `local_ranges`.
    fn local_range(&self, index: u32) -> Option<&SourceRange>;

    /// Returns what is known about a link.
    fn packet_link(&self, link: u32) -> Option<&PacketLink>;

    /// Returns true if packets to cluster IPs are masqueraded whoever sends them (`service.masqueradeAll`).
    fn masquerades_all(&self) -> bool;

    /// Returns true if a client's port may also be the port that stands for it.
    fn may_keep_port(&self, port: Port) -> bool;

    /// Returns the port that may stand for a client at a place in their range, from 0 for the first one to [`u32::MAX`] for
    /// the last one.
    fn port_at(&self, place: u32) -> Port;

    /// Calls [`ports::port_for`].
    #[inline(always)]
    fn port_for(&self, client: Port, place: u32) -> Port {
        ports::port_for(self, client, place)
    }

    /// Calls [`steps::find_arriving`].
    #[inline(always)]
    fn find_arriving(&self) -> Step {
        steps::find_arriving(self)
    }

    /// Calls [`lifetime::is_over`].
    #[inline(always)]
    fn is_over(&self) -> bool {
        lifetime::is_over(self)
    }

    /// Calls [`lifetime::is_moved`].
    #[inline(always)]
    fn is_moved(&self) -> bool {
        lifetime::is_moved(self)
    }

    /// Calls [`lifetime::proven`].
    #[inline(always)]
    fn proven(&self) -> Seen {
        lifetime::proven(self)
    }

    /// Calls [`steps::end_others`].
    #[inline(always)]
    fn end_others(&self) {
        steps::end_others(self);
    }

    /// Calls [`sender::locality`].
    #[inline(always)]
    fn locality(&self) -> Locality {
        sender::locality(self)
    }

    /// Calls [`sender::relation_to_range`].
    #[inline(always)]
    fn relation_to_range(&self, index: u32) -> u32 {
        sender::relation_to_range(self, index)
    }

    /// Calls [`steps::choose`].
    #[inline(always)]
    fn choose(&self) -> Step {
        steps::choose(self)
    }

    /// Returns an entry of the array `service_ranges`.
    fn service_range(&self, index: u32) -> Option<&ServiceRange>;

    /// Calls [`steps::relation_to_service_range`].
    #[inline(always)]
    fn relation_to_service_range(&self, index: u32) -> u32 {
        steps::relation_to_service_range(self, index)
    }

    /// Calls [`steps::without_frontend`].
    #[inline(always)]
    fn without_frontend(&self) -> Step {
        steps::without_frontend(self)
    }

    /// Calls [`steering::steer`].
    #[inline(always)]
    fn steer(&self) -> Step {
        steering::steer(self)
    }

    /// Calls [`steering::may_be_forwarded`].
    #[inline(always)]
    fn may_be_forwarded(&self) -> bool {
        steering::may_be_forwarded(self)
    }

    /// Calls [`steering::relation_to_forwarded_range`].
    #[inline(always)]
    fn relation_to_forwarded_range(&self, index: u32) -> u32 {
        steering::relation_to_forwarded_range(self, index)
    }

    /// Calls [`steps::claim`].
    #[inline(always)]
    fn claim(&self, role: Role, from_closing: bool) -> Insertion {
        steps::claim(self, role, from_closing)
    }

    /// Calls [`steps::insert`].
    #[inline(always)]
    fn insert(&self, role: Role, is_new: bool) -> Insertion {
        steps::insert(self, role, is_new)
    }

    /// Calls [`steps::is_unused`].
    #[inline(always)]
    fn is_unused(&self, from_closing: bool) -> bool {
        steps::is_unused(self, from_closing)
    }

    /// Calls [`reclaim::make_room`].
    #[inline(always)]
    fn make_room(&self) -> bool {
        reclaim::make_room(self)
    }

    /// Calls [`reclaim::better_candidate`].
    #[inline(always)]
    fn better_candidate(&self, number: u32, best: u64) -> u64 {
        reclaim::better_candidate(self, number, best)
    }

    /// Calls [`steps::find_leaving`].
    #[inline(always)]
    fn find_leaving(&self) -> Step {
        steps::find_leaving(self)
    }

    /// Calls [`steps::end_entry`].
    #[inline(always)]
    fn end_entry(&self, role: Role) {
        steps::end_entry(self, role);
    }
}

/// Returns the step, or leaves the packet alone if there is no state of the run.
fn or_pass(step: Option<Step>) -> Step {
    step.unwrap_or(Step::Pass)
}

/// Decides about a packet that arrives on a link, at tc ingress. The result is never [`Step::Next`].
#[inline(always)]
pub fn arrive<T: Flows>(maps: &T, packet: &Packet, link: u32) -> Step {
    match find(maps, packet, FlowKey::set_arriving) {
        Some(entry) => {
            start(maps, packet, (link, false));
            if steps::continues_arriving(maps, entry) {
                return Step::Translate;
            }
            lifetime::check_frontend(maps);
            let step = maps.find_arriving();
            if step != Step::Next {
                return step;
            }
        }
        // The packets of other connections belong to a flow that began before the programs were attached, or to nobody's.
        None if packet.continues() => return Step::Pass,
        None => start(maps, packet, (link, false)),
    }
    let mut step = maps.choose();
    if step == Step::Pass {
        step = maps.without_frontend();
    }
    if step == Step::Pass && maps.is_steering_enabled() {
        step = maps.steer();
    }
    if step == Step::Next {
        return insert_entries(maps, ports::MAX_TRIES);
    }
    step
}

/// Returns the entry of a packet, before anything else is known about it: most packets have none. `set_key` sets the key for
/// the packet's ends.
#[inline(always)]
fn find<'a, T: Flows>(
    maps: &'a T,
    packet: &Packet,
    set_key: impl FnOnce(&mut FlowKey, &Endpoint, &Endpoint, Protocol),
) -> Option<&'a Flow> {
    let (source, destination) = (packet.source_endpoint(), packet.destination_endpoint());
    let entry = maps.with_run(|run| {
        set_key(&mut run.key, &source, &destination, packet.protocol);
        maps.flow(&run.key)
    });
    entry.flatten()
}

/// Stores the packet for the steps, and the link that it uses, with true if it leaves by the link that it has arrived on.
#[inline(always)]
fn start<T: Flows>(maps: &T, packet: &Packet, (link, returns): (u32, bool)) {
    let now = maps.seconds();
    maps.with_run(|run| {
        run.start(packet, now);
        (run.link, run.returns) = (link, returns.into());
    });
}

/// Inserts the entries of a new flow. If another flow has the same key between the two programs, tries other ports for
/// the client.
#[inline(always)]
fn insert_entries<T: Flows>(maps: &T, max_tries: u32) -> Step {
    for tries in 0..max_tries {
        match claim(maps, Role::FORWARDED, tries) {
            Insertion::Inserted => return insert_dialled(maps),
            Insertion::Exists => {}
            failed @ (Insertion::Full | Insertion::NoMemory) => return not_inserted(maps, failed),
        }
        let port = maps.port_at(maps.random());
        maps.with_run(|run| run.flow.forwarded_port = port);
    }
    refuse(maps, Reason::PortsFull)
}

/// Inserts the entry by which the client's next packets are found. An entry with its key has ended, or is replaced.
#[inline(always)]
fn insert_dialled<T: Flows>(maps: &T) -> Step {
    let insertion = replace(maps, Role::DIALLED);
    if insertion != Insertion::Inserted {
        maps.end_others();
        return not_inserted(maps, insertion);
    }
    or_pass(maps.with_run(|run| {
        run.replace(run.flow.backend, run.flow.forwarded_port);
        Step::Begin
    }))
}

/// Stores the reason, and returns the verdict.
#[inline(always)]
fn refuse<T: Flows>(maps: &T, reason: Reason) -> Step {
    maps.with_run(|run| run.set_reason(reason));
    Step::Refuse
}

/// Stores the reason why an entry was not inserted, and returns the verdict. If the kernel had no memory at hand, the packet is
/// dropped, because the client sends it again, and memory is there soon.
#[inline(always)]
fn not_inserted<T: Flows>(maps: &T, insertion: Insertion) -> Step {
    if insertion == Insertion::NoMemory {
        maps.with_run(|run| run.set_reason(Reason::FlowUnallocated));
        return Step::Drop;
    }
    refuse(maps, Reason::FlowsFull)
}

/// Inserts an entry of the run's flow, unless another flow uses its key. After half of the tries, also takes the key of a
/// connection that both ends have closed.
#[inline(always)]
fn claim<T: Flows>(maps: &T, role: Role, tries: u32) -> Insertion {
    let from_closing = tries >= ports::MAX_TRIES / 2;
    let insertion = maps.claim(role, from_closing);
    if can_try_again(maps, insertion) {
        return maps.claim(role, from_closing);
    }
    insertion
}

/// Inserts or replaces an entry of the run's flow.
#[inline(always)]
fn replace<T: Flows>(maps: &T, role: Role) -> Insertion {
    let insertion = maps.insert(role, false);
    if can_try_again(maps, insertion) {
        return maps.insert(role, false);
    }
    insertion
}

/// Makes room if the map is full. Returns true if an entry that could not be inserted can be tried again. Each CPU has some
/// memory at hand for entries, and gets more of it right after an attempt for which there was none.
#[inline(always)]
fn can_try_again<T: Flows>(maps: &T, insertion: Insertion) -> bool {
    match insertion {
        Insertion::Inserted | Insertion::Exists => false,
        Insertion::Full => maps.make_room(),
        Insertion::NoMemory => true,
    }
}

/// Decides about a packet that leaves by a link, at tc egress. The result is never [`Step::Next`], and `None` if the packet
/// belongs to no flow. `returns` is true if the packet has arrived on the same link. `is_free` returns true if no socket of
/// this node would receive packets from the run's backend to its masquerade address.
#[inline(always)]
pub fn leave<T: Flows>(
    maps: &T,
    packet: &Packet,
    (link, returns): (u32, bool),
    is_free: impl Fn() -> bool,
) -> Option<Step> {
    let entry = find(maps, packet, FlowKey::set_forwarded)?;
    start(maps, packet, (link, returns));
    let step = match steps::continue_leaving(maps, entry) {
        Some(step) => step,
        None => maps.find_leaving(),
    };
    if step != Step::Next {
        return Some(step);
    }
    let link = maps.packet_link(link);
    let unknown = PacketLink::LEADS_TO_PODS | PacketLink::KNOWN_FLOWS_ONLY;
    let flags = link.map_or(unknown, |link| link.flags);
    if maps.with_run(|run| begins_masquerade(run, flags)) != Some(true) {
        return Some(Step::Pass);
    }
    let step = match link.and_then(|link| link.address(packet.source.is_v4())) {
        Some(own) => masquerade(maps, own, is_free),
        None => refuse(maps, Reason::PortsFull),
    };
    if step == Step::Translate {
        return Some(step);
    }
    // The client's next packet begins another flow. This one has a port already if its forwarded entry could not be replaced.
    for role in [Role::DIALLED, Role::FORWARDED, Role::MASQUERADED] {
        maps.end_entry(role);
    }
    Some(Step::Drop)
}

/// Returns true if the client of the run's flow, which no address of the node stands for yet, is masqueraded on a link with
/// these flags. On links that lead to pods, only the first packet of a flow decides, because the backend knows the client
/// from then on; and the client is also masqueraded if the packet returns by the link that it has arrived on, because the
/// replies might not pass this node otherwise.
#[inline(always)]
fn begins_masquerade(run: &mut Run, flags: u32) -> bool {
    if flags & PacketLink::LEADS_TO_PODS == 0 {
        return run.flow.flags & Flow::MUST_MASQUERADE != 0;
    }
    run.flow.flags |= Flow::ON_POD_LINKS;
    let is_first = run.flow.seen == Seen::NOTHING && !run.continues();
    is_first && flags & PacketLink::KNOWN_FLOWS_ONLY == 0
}

/// Finds a port of the node that stands for the client, preferably the client's own, and stores it in the flow.
#[inline(always)]
fn masquerade<T: Flows>(maps: &T, own: Address, is_free: impl Fn() -> bool) -> Step {
    let mut place = maps.random();
    maps.with_run(|run| {
        let port = ports::preferred(run.flow.client.port, run.source.port);
        run.flow.masquerade = Endpoint::new(own, port);
        if !ports::keeps_port(maps, port) {
            run.flow.masquerade.port = maps.port_for(port, place);
        }
    });
    for tries in 0..ports::MAX_TRIES {
        if is_free() {
            match claim(maps, Role::MASQUERADED, tries) {
                Insertion::Inserted => return replace_forwarded(maps),
                Insertion::Exists => {}
                failed @ (Insertion::Full | Insertion::NoMemory) => {
                    return not_inserted(maps, failed);
                }
            }
        }
        place = place.wrapping_add(ports::STEP);
        maps.with_run(|run| {
            run.flow.masquerade.port = maps.port_for(run.flow.client.port, place);
        });
    }
    refuse(maps, Reason::PortsFull)
}

/// Stores the endpoint that stands for the client in the forwarded entry.
#[inline(always)]
fn replace_forwarded<T: Flows>(maps: &T) -> Step {
    let insertion = replace(maps, Role::FORWARDED);
    if insertion != Insertion::Inserted {
        return not_inserted(maps, insertion);
    }
    or_pass(maps.with_run(|run| {
        run.replace(run.flow.masquerade, run.destination.port);
        Step::Translate
    }))
}

#[cfg(test)]
mod tests;
