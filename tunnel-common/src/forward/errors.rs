//! Decides how ICMP errors are translated: as the packets that they are about.
//!
//! [`arrive`] replaces the destination of an error, and the sender of the packet that it quotes. [`leave`] replaces the
//! other end of the quoted packet. An error about a packet from this node comes to the address that stands for its sender
//! outside. The network stack then routes it to the sender:
//!
//! | error about a packet | arrives as | passes the stack as | leaves as |
//! |---|---|---|---|
//! | frontend → client | frontend → client | backend → client | backend → the node's address, if masqueraded |
//! | the node's address → backend | the node's address → backend | client → backend | client → frontend |
//! | client → backend, from a pod or this node | | client → backend | client → frontend |
//!
//! The source of an error that leaves becomes the address that the receiver knows, as it does with kube-proxy (the kernel's
//! `nf_nat_icmp_reply_translation` in net/netfilter/nf_nat_proto.c): the frontend for the client, and the node's address for
//! the backend.

use super::{Flows, Run, Step, steps};
use crate::{
    flow::{Endpoint, Role},
    packet::{Packet, icmp::ErrorHeader},
    reason::Reason,
};

/// Stores the headers of an ICMP error for [`start`].
#[inline(always)]
pub fn set_header<T: Flows + ?Sized>(maps: &T, header: &ErrorHeader) {
    maps.with_run(|run| run.error = *header);
}

/// Stores the packet that the ICMP error quotes for [`arrive`] and [`leave`].
#[inline(always)]
pub fn start<T: Flows + ?Sized>(maps: &T, quoted: &Packet) {
    let now = maps.seconds();
    maps.with_run(|run| run.start(quoted, now));
}

/// Decides about an ICMP error at tc ingress. If it is translated, [`Run::translated`] with [`End::Source`] is the quoted
/// packet with its new ends.
///
/// [`End::Source`]: super::End::Source
#[inline(always)]
pub fn arrive<T: Flows + ?Sized>(maps: &T) -> Step {
    decide(maps, |run| {
        // The flow is that of the packets in the other direction.
        run.key
            .set_arriving(&run.destination, &run.source, run.protocol);
        if !find(maps, run) {
            return Known::Foreign;
        }
        let flow = &run.flow;
        let (new, other_port) = if flow.role == Role::MASQUERADED {
            (flow.forwarded_client(), flow.backend.port)
        } else {
            (flow.backend, flow.forwarded_port)
        };
        run.replace(new, other_port);
        Known::Replaced
    })
}

/// Decides about an ICMP error at tc egress. If it is translated, [`Run::translated`] with [`End::Destination`] is the quoted
/// packet with its new ends.
///
/// [`End::Destination`]: super::End::Destination
#[inline(always)]
pub fn leave<T: Flows + ?Sized>(maps: &T) -> Step {
    decide(maps, |run| {
        run.set_forwarded_key();
        if !find(maps, run) {
            return Known::Foreign;
        }
        let flow = &run.flow;
        if run.destination.is(&flow.backend) {
            run.replace(flow.frontend, flow.client.port);
        } else if flow.masquerade.is(&Endpoint::NONE) {
            return Known::Same;
        } else {
            run.replace(flow.masquerade, flow.backend.port);
        }
        Known::Replaced
    })
}

/// The relation of a quoted packet to the flows.
#[derive(Clone, Copy, Eq, PartialEq)]
enum Known {
    /// The packet belongs to no flow.
    Foreign,
    /// The receiver of the error knows the ends of the packet.
    Same,
    /// The ends of the packet are replaced.
    Replaced,
}

/// Decides about an ICMP error. `find` finds the flow of the quoted packet, and stores its new ends.
#[inline(always)]
fn decide<T: Flows + ?Sized>(maps: &T, find: impl FnOnce(&mut Run) -> Known) -> Step {
    let step = maps.with_run(|run| {
        // An error goes to the sender of the packet that it is about.
        let known = if run.error.destination == run.source.address {
            find(run)
        } else {
            Known::Foreign
        };
        let (reason, step) = match known {
            Known::Foreign => (Reason::IcmpErrorUnmatched, Step::Pass),
            // It would lead the packets past this node.
            Known::Same | Known::Replaced if run.error.is_redirect != 0 => {
                (Reason::IcmpRedirectDropped, Step::Drop)
            }
            Known::Same => (Reason::IcmpErrorTranslated, Step::Pass),
            Known::Replaced => (Reason::IcmpErrorTranslated, Step::Translate),
        };
        run.set_reason(reason);
        step
    });
    super::or_pass(step)
}

/// Copies the entry with the run's key into the run. Returns false if there is none, or if it has ended.
#[inline(always)]
fn find<T: Flows + ?Sized>(maps: &T, run: &mut Run) -> bool {
    steps::find(maps, &run.key, &mut run.flow).is_some()
}
