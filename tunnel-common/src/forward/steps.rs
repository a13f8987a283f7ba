//! The steps of [`arrive`](super::arrive) and [`leave`](super::leave).

use super::{
    Flows, Insertion, Run, Step,
    lifetime::{ANSWER_TIME, expect_of_client, is_backend_gone, may_open_again},
    or_pass,
    run::NewBackend,
    sender::{self, Sender},
};
use crate::{
    decide::{self, NoChoice, Traffic},
    flow::{Endpoint, Flow, FlowKey, Phase, Role, Seen, Timeouts},
    locality::Locality,
    lookup::Lookup,
    packet_link::PacketLink,
    reason::Reason,
    service::{Frontend, FrontendKey},
    service_range::{self, Unserved},
};

/// The maximum number of attempts to read an entry while it is being replaced.
const MAX_READS: u32 = 3;

/// Copies the entry with this key, unless it has ended.
#[inline(always)]
pub(super) fn find<'a, T: Flows + ?Sized>(
    maps: &'a T,
    key: &FlowKey,
    copy: &mut Flow,
) -> Option<&'a Flow> {
    for _ in 0..MAX_READS {
        let entry = maps.flow(key)?;
        maps.copy_flow(entry, copy);
        if copy.belongs_to(key) {
            return (copy.flags & Flow::ENDED == 0).then_some(entry);
        }
    }
    None
}

/// Copies the entry with this key, even if it has ended. Returns false if there is none, or if it is being replaced.
#[inline(always)]
pub(super) fn copy_entry<T: Flows + ?Sized>(maps: &T, key: &FlowKey, copy: &mut Flow) -> bool {
    let Some(entry) = maps.flow(key) else {
        return false;
    };
    maps.copy_flow(entry, copy);
    copy.belongs_to(key)
}

/// Handles a packet at tc ingress that simply continues the flow with this entry, whose key is in the run. Returns false, and
/// does nothing, if there is more to decide.
#[inline(always)]
pub(super) fn continues_arriving<T: Flows + ?Sized>(maps: &T, entry: &Flow) -> bool {
    let continues = maps.with_run(|run| {
        maps.copy_flow(entry, &mut run.flow);
        run.flow.is_met_by(&run.key) && known(maps, run, entry) == Known::Continues
    });
    continues == Some(true)
}

/// Handles a packet at tc egress that simply belongs to the flow with this entry, whose key is in the run. Returns `None`, and
/// does nothing, if there is more to decide.
#[inline(always)]
pub(super) fn continue_leaving<T: Flows + ?Sized>(maps: &T, entry: &Flow) -> Option<Step> {
    let step = maps.with_run(|run| {
        maps.copy_flow(entry, &mut run.flow);
        let is_simple = run.flow.is_met_by(&run.key) && !may_begin_namesake(run, &maps.timeouts());
        is_simple.then(|| leaving(maps, run, entry))
    });
    step.flatten()
}

/// Looks up the flow of a packet at tc ingress. Returns [`Step::Next`] if the packet begins a flow.
#[inline(always)]
pub fn find_arriving<T: Flows + ?Sized>(maps: &T) -> Step {
    let found = maps.with_run(|run| {
        run.set_arriving_key();
        match find(maps, &run.key, &mut run.flow) {
            Some(entry) => known(maps, run, entry),
            // The packets of other connections belong to a flow that began before the programs were attached, or to
            // nobody's.
            None if run.continues() => Known::Foreign,
            None => Known::New,
        }
    });
    match found {
        Some(Known::Continues) => Step::Translate,
        Some(Known::New) => Step::Next,
        Some(Known::Foreign) | None => Step::Pass,
        Some(Known::Replaced) => moved(maps),
        Some(Known::MayBeOver) if maps.is_over() => replaced(maps),
        Some(Known::MayBeOver | Known::MayBeMoved | Known::MustProve) => {
            let seen = maps.proven();
            or_pass(maps.with_run(|run| {
                run.set_arriving_key();
                if let Some(entry) = find(maps, &run.key, &mut run.flow) {
                    let later = Seen::later_than(run.flow.last_used, run.now);
                    maps.touch_flow(entry, seen.union(later), run.now);
                }
                run.replace(run.flow.backend, run.flow.forwarded_port);
                Step::Translate
            }))
        }
    }
}

/// The relation of a packet to the entry that was found for it.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Known {
    /// The packet belongs to the flow.
    Continues,
    /// The packet begins a flow.
    New,
    /// The packet belongs to another program's connection.
    Foreign,
    /// The packet begins a flow in the place of this one.
    Replaced,
    /// The packet belongs to the flow if the replies show that the flow is not over.
    MayBeOver,
    /// The datagram belongs to the flow, unless [`check_frontend`](super::lifetime::check_frontend) finds another Service at the
    /// frontend.
    MayBeMoved,
    /// The packet belongs to the flow, and shows an event that counts only if its sender knows what the backend has sent.
    MustProve,
}

/// Ends the flow, whose packets go to another backend, or to nobody, from now on.
#[inline(always)]
fn moved<T: Flows + ?Sized>(maps: &T) -> Step {
    let family = maps.with_run(|run| {
        let is_datagram = !run.protocol.has_connections();
        is_datagram.then(|| run.source.address.is_v4())
    });
    match family.flatten() {
        Some(true) => maps.count(Reason::DatagramsMovedV4),
        Some(false) => maps.count(Reason::DatagramsMovedV6),
        None => {}
    }
    replaced(maps)
}

/// Ends the flow, since a new one takes its place.
#[inline(always)]
fn replaced<T: Flows + ?Sized>(maps: &T) -> Step {
    maps.end_others();
    maps.end_entry(Role::DIALLED);
    or_pass(maps.with_run(|run| {
        if run.continues() {
            Step::Pass
        } else {
            Step::Next
        }
    }))
}

/// Handles a packet at tc ingress for which there is an entry.
#[inline(always)]
fn known<T: Flows + ?Sized>(maps: &T, run: &mut Run, entry: &Flow) -> Known {
    if run.flow.role == Role::MASQUERADED {
        maps.touch_flow(entry, Seen::from_backend(run.flags), run.now);
        run.replace(run.flow.forwarded_client(), run.source.port);
        return Known::Continues;
    }
    // A packet from outside that claims to be this host's must not touch its flow.
    let of_host = run.link == PacketLink::HOST;
    if (run.flow.flags & Flow::OF_HOST != 0) != of_host {
        return if of_host {
            Known::Replaced
        } else {
            Known::Foreign
        };
    }
    // Datagrams leave a backend that no longer serves at once. Connections stay with their backend to the end.
    if !run.protocol.has_connections() && (run.is_moved != 0 || is_backend_gone(maps, &run.flow)) {
        return Known::Replaced;
    }
    if run.opens() || run.flow.is_expired(&maps.timeouts(), run.now) {
        return Known::MayBeOver;
    }
    if !run.protocol.has_connections() && run.flow.last_used != run.now {
        return Known::MayBeMoved;
    }
    let seen = Seen::from_client(run.flags);
    if run.protocol.is_tcp() && seen.without(run.flow.seen).needs_proof() {
        return Known::MustProve;
    }
    let later = Seen::later_than(run.flow.last_used, run.now);
    maps.touch_flow(entry, seen.union(later), run.now);
    run.replace(run.flow.backend, run.flow.forwarded_port);
    Known::Continues
}

/// Ends the forwarded and the masqueraded entry of the run's flow.
#[inline(always)]
pub fn end_others<T: Flows + ?Sized>(maps: &T) {
    maps.with_run(|run| {
        run.flow.set_key(Role::FORWARDED, &mut run.key);
        let Some(entry) = find(maps, &run.key, &mut run.other) else {
            return;
        };
        if !run.other.has_ends_of(&run.flow) {
            return;
        }
        maps.end_flow(entry);
        if run.other.masquerade.is(&Endpoint::NONE) {
            return;
        }
        run.other.set_key(Role::MASQUERADED, &mut run.key);
        if let Some(entry) = find(maps, &run.key, &mut run.other) {
            // The port may belong to another flow by now.
            if run.other.has_ends_of(&run.flow) {
                maps.end_flow(entry);
            }
        }
    });
}

/// Returns true if packets of a new flow leave with this node's address, if they leave by a link that has the programs (kube-proxy
/// `pkg/proxy/nftables/proxier.go`, `syncProxyRules`).
#[inline(always)]
fn is_masqueraded<T: Flows + ?Sized>(maps: &T, flags: u8, locality: Locality) -> bool {
    let is_foreign = locality == Locality::Foreign || maps.masquerades_all();
    flags & Frontend::MASQUERADE != 0 || flags & Frontend::MASQUERADE_FOREIGN != 0 && is_foreign
}

/// Chooses the backend for a new flow, and stores it in the run. Returns [`Step::Next`] if there is one.
#[inline(always)]
pub fn choose<T: Flows + ?Sized>(maps: &T) -> Step {
    let Some((source, key)) = maps.with_run(|run| {
        let to = &run.destination;
        let key = FrontendKey::new(to.address, to.port, run.protocol);
        (run.source.address, key)
    }) else {
        return Step::Pass;
    };
    let sender = Sender(source);
    let record = match decide::find_frontend(maps, &sender, &key, Traffic::Packets) {
        Lookup::Found(record) => record,
        Lookup::None => return Step::Pass,
        Lookup::Unstable => {
            maps.with_run(|run| run.set_reason(Reason::RecordUnstable));
            return Step::Drop;
        }
    };
    let (service, packet_flags) = (record.frontend.service, record.frontend.packet_flags);
    let link_flags = sender::flags_of_link(maps);
    if link_flags & PacketLink::KNOWN_FLOWS_ONLY != 0 {
        return Step::Pass;
    }
    if maps.is_frozen() {
        return Step::Defer;
    }
    let depends_on_locality = packet_flags & Frontend::MASQUERADE_FOREIGN != 0
        || link_flags & PacketLink::OF_PODS_HERE != 0;
    let locality = if depends_on_locality {
        sender::locality_on_link(link_flags, || maps.locality())
    } else {
        Locality::Unknown
    };
    let traffic = sender::traffic_on_link(link_flags, locality);
    let choice = match decide::choose_backend(maps, &sender, &key, record, traffic) {
        Ok(choice) => choice,
        Err(none) => {
            maps.with_run(|run| run.stop(service, none.reason()));
            return verdict(none);
        }
    };
    // Otherwise, the backend would get a packet from its own address.
    let is_own_client = choice.address == source;
    let mut flags = 0;
    if is_own_client || is_masqueraded(maps, packet_flags, locality) {
        flags |= Flow::MUST_MASQUERADE;
    }
    if link_flags & PacketLink::LEADS_TO_PODS != 0 {
        flags |= Flow::ON_POD_LINKS;
    }
    if maps.with_run(|run| run.link) == Some(PacketLink::HOST) {
        // The replies are found by the address that stands for the client.
        flags |= Flow::OF_HOST | Flow::MUST_MASQUERADE;
    }
    let backend = NewBackend {
        endpoint: Endpoint::new(choice.address, choice.port),
        index: choice.index,
        state: decide::state(maps, choice.index),
        service,
    };
    or_pass(maps.with_run(|run| {
        run.begin(backend, flags, choice.reason);
        Step::Next
    }))
}

/// Returns the relation of the packet's destination to an entry of `service_ranges`.
#[inline(always)]
pub fn relation_to_service_range<T: Flows + ?Sized>(maps: &T, index: u32) -> u32 {
    let Some(range) = maps.service_range(index) else {
        return service_range::NO_MORE;
    };
    let relation = maps.with_run(|run| service_range::relation(&run.destination.address, range));
    relation.unwrap_or(service_range::NO_MORE)
}

/// Decides about a packet that belongs to no flow and no frontend.
#[inline(always)]
pub fn without_frontend<T: Flows + ?Sized>(maps: &T) -> Step {
    let entry = || {
        let key = maps.with_run(|run| FrontendKey::of_address(run.destination.address))?;
        maps.frontend_index(&key)
    };
    let relation = |index| maps.relation_to_service_range(index);
    let (reason, step) = match Unserved::of(relation, entry) {
        Unserved::LeftAlone => return Step::Pass,
        Unserved::ClusterIp => (Reason::ClusterPortUnused, Step::Refuse),
        Unserved::Unallocated => (Reason::ClusterIpUnallocated, Step::Drop),
    };
    if sender::flags_of_link(maps) & PacketLink::KNOWN_FLOWS_ONLY != 0 {
        return Step::Pass;
    }
    maps.with_run(|run| run.stop(Flow::NO_SERVICE, reason));
    step
}

/// Returns the verdict on a packet for which no backend could be chosen.
#[inline(always)]
const fn verdict(none: NoChoice) -> Step {
    if none.is_drop() {
        Step::Drop
    } else {
        Step::Refuse
    }
}

/// Inserts an entry of the run's flow, unless another flow uses its key.
#[inline(always)]
pub fn claim<T: Flows + ?Sized>(maps: &T, role: Role, from_closing: bool) -> Insertion {
    let insertion = maps.insert(role, true);
    if insertion == Insertion::Exists && maps.is_unused(from_closing) {
        // Two flows of one client port can replace the entry at once. Only one of them then gets answers.
        return maps.insert(role, false);
    }
    insertion
}

/// Inserts the entry of the run's flow with this role.
#[inline(always)]
pub fn insert<T: Flows + ?Sized>(maps: &T, role: Role, is_new: bool) -> Insertion {
    let inserted = maps.with_run(|run| {
        run.flow.role = role;
        let insertion = maps.insert_flow(&run.flow, is_new);
        if insertion == Insertion::Inserted && role == Role::DIALLED {
            run.set_arriving_key();
            maps.record_recent_flow(&run.key);
        }
        insertion
    });
    inserted.unwrap_or(Insertion::NoMemory)
}

/// Adds what another entry of the same flow has seen to a copy of an entry. The packets of one direction may meet one entry
/// only.
#[inline(always)]
pub(super) fn learn_from<T: Flows + ?Sized>(
    maps: &T,
    entry: &mut Flow,
    role: Role,
    (sibling, key): (&mut Flow, &mut FlowKey),
) {
    entry.set_key(role, key);
    if copy_entry(maps, key, sibling) && sibling.has_ends_of(entry) {
        entry.seen = entry.seen.union(sibling.seen);
        entry.last_used = entry.last_used.max(sibling.last_used);
    }
}

/// Returns true if the entry with the key of the run's flow has ended or expired, belongs to a connection that was reset or
/// (with `from_closing`) that both ends have closed or whose handshake makes no progress, or to an earlier flow with the same
/// client and frontend.
#[inline(always)]
pub fn is_unused<T: Flows + ?Sized>(maps: &T, from_closing: bool) -> bool {
    let is_unused = maps.with_run(|run| {
        let (other, sibling, key) = (&mut run.other, &mut run.candidate, &mut run.key);
        run.flow.set_key(run.flow.role, key);
        if !copy_entry(maps, key, other) {
            return false;
        }
        if other.role == Role::MASQUERADED {
            learn_from(maps, other, Role::FORWARDED, (sibling, key));
        }
        learn_from(maps, other, Role::DIALLED, (sibling, key));
        let is_over = match other.seen.phase(other.protocol) {
            Phase::Closed => true,
            Phase::Closing => from_closing,
            // The handshakes that anyone begins with forged addresses must not take all ports.
            Phase::HalfOpen => {
                from_closing && run.now.saturating_sub(other.last_used) > ANSWER_TIME
            }
            Phase::Unanswered | Phase::Answered | Phase::HalfClosed | Phase::Established => false,
        };
        is_over || other.is_unused(&maps.timeouts(), run.now) || other.has_ends_of(&run.flow)
    });
    is_unused.unwrap_or(false)
}

/// Looks up the flow of a packet at tc egress. Returns [`Step::Next`] if the client has no port of the node yet, and may need
/// one.
#[inline(always)]
pub fn find_leaving<T: Flows + ?Sized>(maps: &T) -> Step {
    or_pass(maps.with_run(|run| {
        run.set_forwarded_key();
        let Some(entry) = find(maps, &run.key, &mut run.flow) else {
            return Step::Pass;
        };
        if may_begin_namesake(run, &maps.timeouts()) {
            let (flow, sibling, key) = (&mut run.flow, &mut run.other, &mut run.key);
            learn_from(maps, flow, Role::DIALLED, (sibling, key));
            if may_open_again(flow.seen, flow.seen.phase(flow.protocol))
                || flow.is_expired(&maps.timeouts(), run.now)
            {
                maps.end_flow(entry);
                return Step::Pass;
            }
        }
        leaving(maps, run, entry)
    }))
}

/// Returns true if a packet at tc egress may begin a connection with the same ends as the run's flow, which is over: the
/// client has used its port again, and has dialled the backend itself. Its replies would come from the frontend.
#[inline(always)]
fn may_begin_namesake(run: &Run, timeouts: &Timeouts) -> bool {
    let flow = &run.flow;
    run.flags.has_syn() && (flow.seen != Seen::NOTHING || flow.is_expired(timeouts, run.now))
}

/// Handles a packet at tc egress for which there is an entry.
#[inline(always)]
fn leaving<T: Flows + ?Sized>(maps: &T, run: &mut Run, entry: &Flow) -> Step {
    if run.source.is(&run.flow.backend) {
        maps.touch_flow(entry, Seen::from_backend(run.flags), run.now);
        if run.protocol.is_tcp() {
            expect_of_client(maps, run, entry);
        }
        run.replace(run.flow.frontend, run.flow.client.port);
        return Step::Translate;
    }
    // The program at tc ingress records what the client of a TCP connection has proven. The time is that of the backend.
    if !run.protocol.is_tcp() {
        maps.touch_flow(entry, Seen::from_client(run.flags), run.now);
    }
    if run.flow.masquerade.is(&Endpoint::NONE) {
        return if run.flow.flags & Flow::MUST_MASQUERADE != 0 || run.returns != 0 {
            Step::Next
        } else {
            Step::Pass
        };
    }
    run.replace(run.flow.masquerade, run.destination.port);
    Step::Translate
}

/// Ends the entry of the run's flow with this role.
#[inline(always)]
pub fn end_entry<T: Flows + ?Sized>(maps: &T, role: Role) {
    maps.with_run(|run| {
        run.flow.set_key(role, &mut run.key);
        if let Some(entry) = find(maps, &run.key, &mut run.other) {
            // The port of the node may belong to another flow.
            if run.other.has_ends_of(&run.flow) {
                maps.end_flow(entry);
            }
        }
    });
}
