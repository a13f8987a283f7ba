//! Events for the log of user space: what a program did with a socket or packet.
//!
//! Records are text of the form `name=value`; reasons and protocols are told by their numbers, since
//! a text whose length is not known when this is compiled costs the verifier too much.

use aya_ebpf::bindings::BPF_RB_AVAIL_DATA;
use aya_log_ebpf::{
    log,
    macro_support::{AYA_LOGS, Level, level_enabled},
};
use tunnel_common::{addr::Address, origin::Origin, reason::Reason, service::FrontKey};

use crate::maps;

/// How much the ring may hold for another record to be tried: of its 128 KiB, all but what records
/// of several CPUs may take between the question and the answer.
const FULL: u64 = (128 - 8) << 10;

/// Sends an event to user space. Where its level is not asked for, the verifier removes the code;
/// where nobody empties the ring, the record is lost and counted.
macro_rules! event {
    ($level:ident, $($text:tt)+) => {
        if level_enabled(Level::$level) && has_room() {
            log!((), target: "", Level::$level, $($text)+);
        }
    };
}

#[inline(always)]
fn has_room() -> bool {
    if AYA_LOGS.query(BPF_RB_AVAIL_DATA.into()) <= FULL {
        return true;
    }
    maps::count(Reason::LogLost);
    false
}

/// A connect or datagram goes to a backend, or to the ingress.
#[inline(always)]
pub(crate) fn translated(origin: &Origin, reason: Reason) {
    event!(
        Debug,
        "sent on: destination={:i} port={} protocol={} backend={:i} backend_port={} reason={}",
        origin.vip.octets(),
        origin.vip_port.to_host(),
        origin.protocol.number(),
        origin.backend.octets(),
        origin.backend_port.to_host(),
        reason.index()
    );
}

/// A connect or datagram is refused.
#[inline(always)]
pub(crate) fn refused(key: &FrontKey, reason: Reason) {
    event!(
        Debug,
        "refused: destination={:i} port={} protocol={} reason={}",
        key.address.octets(),
        key.port.to_host(),
        key.protocol.number(),
        reason.index()
    );
}

/// A connect or datagram to nobody's front.
#[inline(always)]
pub(crate) fn left_alone(key: &FrontKey) {
    event!(
        Trace,
        "no front, left alone: destination={:i} port={} protocol={}",
        key.address.octets(),
        key.port.to_host(),
        key.protocol.number()
    );
}

/// A datagram to a backend that the socket was given before.
#[inline(always)]
pub(crate) fn goes_on(key: &FrontKey) {
    event!(
        Trace,
        "goes on to its backend: backend={:i} backend_port={} protocol={}",
        key.address.octets(),
        key.port.to_host(),
        key.protocol.number()
    );
}

/// A VIP was put in the place of a backend.
#[inline(always)]
pub(crate) fn put_back(origin: &Origin) {
    event!(
        Debug,
        "put back: backend={:i} backend_port={} destination={:i} port={}",
        origin.backend.octets(),
        origin.backend_port.to_host(),
        origin.vip.octets(),
        origin.vip_port.to_host()
    );
}

/// A socket that remembered a translation was closed.
#[inline(always)]
pub(crate) fn released(origin: &Origin) {
    event!(
        Debug,
        "closed: destination={:i} port={} protocol={} backend={:i} backend_port={} reason={}",
        origin.vip.octets(),
        origin.vip_port.to_host(),
        origin.protocol.number(),
        origin.backend.octets(),
        origin.backend_port.to_host(),
        Reason::SocketReleased.index()
    );
}

/// A packet from outside was dropped.
#[inline(always)]
pub(crate) fn guarded(to: Address) {
    event!(
        Debug,
        "dropped: destination={:i} reason={}",
        to.octets(),
        Reason::Guarded.index()
    );
}
