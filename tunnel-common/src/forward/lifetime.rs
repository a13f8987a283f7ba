//! Decides how long a flow lasts: which events count that its packets show, and when another flow takes its place.

use super::{Flows, Run, sender::Sender, steps::find};
use crate::{
    decide::{self, Traffic},
    flow::{Flow, Phase, Role, Seen},
    lookup::Lookup,
    service::FrontendKey,
};

/// The time in seconds in which an end answers.
pub(super) const ANSWER_TIME: u32 = 1;

/// Returns true if the backend of a flow no longer serves.
#[inline(always)]
pub(super) fn is_backend_gone<T: Flows + ?Sized>(maps: &T, flow: &Flow) -> bool {
    decide::state(maps, flow.backend_index) != flow.backend_state
}

/// Returns what a client's packet shows about the run's flow. Of a TCP connection, the end of the handshake and a reset count
/// only if the sender knows numbers of the backend: anyone can send packets with a forged address. A reset that could be a
/// forged one counts as the end of the client's data (compare RFC 5961 section 3.2): a backend that takes it for real answers
/// nothing any more, and one that doesn't makes the client send another one with the right number.
#[inline(always)]
pub fn proven<T: Flows + ?Sized>(maps: &T) -> Seen {
    let seen = maps.with_run(|run| {
        let seen = Seen::from_client(run.flags);
        if !run.protocol.is_tcp() {
            return seen;
        }
        run.flow.set_key(Role::FORWARDED, &mut run.key);
        let Some(entry) = find(maps, &run.key, &mut run.other) else {
            return Seen::NOTHING;
        };
        let (other, numbers) = (&run.other, &run.numbers);
        if !other.has_ends_of(&run.flow) {
            return Seen::NOTHING;
        }
        if other.seen.includes(Seen::HANDSHAKE_OF_CLIENT) {
            return if numbers.continues_at(other.expected) {
                seen
            } else {
                seen.with_fin_for_rst()
            };
        }
        let is_proven =
            run.flags.has_ack() && other.seen.has_reply() && numbers.acknowledges(other.expected);
        if !is_proven {
            return Seen::NOTHING;
        }
        maps.touch_flow(entry, Seen::HANDSHAKE_OF_CLIENT, run.now);
        maps.expect(entry, numbers.sequence);
        seen
    });
    seen.unwrap_or(Seen::NOTHING)
}

/// Stores whether another Service has got the frontend of the run's flow, if the packet is the first datagram of a second.
#[inline(always)]
pub(super) fn check_frontend<T: Flows + ?Sized>(maps: &T) {
    let is_due = maps.with_run(|run| {
        !run.protocol.has_connections()
            && run.flow.role == Role::DIALLED
            && run.flow.last_used != run.now
    });
    if is_due == Some(true) && maps.is_moved() {
        maps.with_run(|run| run.is_moved = 1);
    }
}

/// Returns true if another Service than that of the run's flow has its frontend now.
#[inline(always)]
pub fn is_moved<T: Flows + ?Sized>(maps: &T) -> bool {
    let flow = maps.with_run(|run| {
        let to = &run.destination;
        let key = FrontendKey::new(to.address, to.port, run.protocol);
        (run.source.address, key, run.flow.service)
    });
    let Some((source, key, service)) = flow else {
        return false;
    };
    match decide::find_frontend(maps, &Sender(source), &key, Traffic::Packets) {
        Lookup::Found(record) => record.frontend.service != service,
        Lookup::None | Lookup::Unstable => false,
    }
}

/// Returns true if the run's flow is over, so that the packet begins another one. The replies use another entry, which may
/// be more recent, and which shows whether the backend has closed.
#[inline(always)]
pub fn is_over<T: Flows + ?Sized>(maps: &T) -> bool {
    let is_over = maps.with_run(|run| {
        let (mut seen, sent) = (run.flow.seen, run.flow.last_used);
        let mut answered = 0;
        run.flow.set_key(Role::FORWARDED, &mut run.key);
        if find(maps, &run.key, &mut run.other).is_some() && run.other.client.is(&run.flow.client) {
            seen = seen.union(run.other.seen);
            answered = run.other.last_used;
        }
        let phase = seen.phase(run.flow.protocol);
        if maps.timeouts().is_over(phase, sent.max(answered), run.now) {
            return true;
        }
        if !run.opens() {
            return false;
        }
        // Connections stay with their backend to the end, unless it doesn't answer the client any more.
        let is_silent = phase == Phase::HalfOpen
            || sent > answered.saturating_add(ANSWER_TIME)
            || !run.protocol.is_tcp();
        may_open_again(seen, phase) || is_silent && is_backend_gone(maps, &run.flow)
    });
    is_over.unwrap_or(true)
}

/// Returns true if the ends of the connection may open another one. That the client has closed it is not enough, because anyone
/// can send such a packet.
#[inline(always)]
pub(super) const fn may_open_again(seen: Seen, phase: Phase) -> bool {
    matches!(phase, Phase::Closed | Phase::Closing)
        || matches!(phase, Phase::HalfClosed) && seen.is_closed_by_backend()
}

/// Stores the number that the client is expected to show after this packet of the backend.
#[inline(always)]
pub(super) fn expect_of_client<T: Flows + ?Sized>(maps: &T, run: &Run, entry: &Flow) {
    let is_open = run.flow.seen.includes(Seen::HANDSHAKE_OF_CLIENT);
    let number = if is_open {
        run.numbers.acknowledged
    } else {
        run.numbers.sequence
    };
    if run.flags.has_ack() && number != run.flow.expected {
        maps.expect(entry, number);
    }
}
