//! Logs each program's actions on sockets and packets, as events for the daemon.
//!
//! An event is a line of text with fields of the form `name=value`. Reasons and protocols are logged as
//! numbers, because the verifier takes too long for strings of unknown length.
#![expect(
    unsafe_code,
    reason = "the verifier checks an exported function by itself"
)]

use aya_ebpf::bindings::BPF_RB_AVAIL_DATA;
use aya_log_ebpf::{
    log,
    macro_support::{AYA_LOGS, Level, level_enabled},
};
use tunnel_common::{
    addr::Address,
    forward::{Flows as _, Run, Step},
    origin::Origin,
    reason::Reason,
    service::FrontendKey,
};

use crate::maps::{self, KernelMaps};

/// The number of bytes in the ring buffer above which new events are dropped. The ring buffer has 128 KiB.
/// The remaining 8 KiB are for events that other CPUs write between the check and the write.
const FULL_ABOVE: u64 = (128 - 8) << 10;

/// Sends an event to the daemon. If the log level is disabled, the verifier removes this code. If the ring
/// buffer is full, the event is lost and counted.
macro_rules! event {
    ($level:ident, $($text:tt)+) => {
        if level_enabled(Level::$level) && has_room() {
            log!((), target: "", Level::$level, $($text)+);
        }
    };
}

#[inline(always)]
fn has_room() -> bool {
    if AYA_LOGS.query(BPF_RB_AVAIL_DATA.into()) <= FULL_ABOVE {
        return true;
    }
    maps::count_reason(Reason::LogEventsLost);
    false
}

/// Logs that a connection or datagram is sent to a backend or to the ingress.
#[inline(always)]
pub(crate) fn translated(origin: &Origin, reason: Reason) {
    event!(
        Debug,
        "translated: destination={:i} port={} protocol={} backend={:i} backend_port={} reason={}",
        origin.vip.octets(),
        origin.vip_port.to_host(),
        origin.protocol.number(),
        origin.backend.octets(),
        origin.backend_port.to_host(),
        reason.index()
    );
}

/// Logs that a connection or datagram is refused.
#[inline(always)]
pub(crate) fn refused(key: &FrontendKey, reason: Reason) {
    event!(
        Debug,
        "refused: destination={:i} port={} protocol={} reason={}",
        key.address.octets(),
        key.port.to_host(),
        key.protocol.number(),
        reason.index()
    );
}

/// Logs that a connection or datagram is not translated, because its destination is not a frontend.
#[inline(always)]
pub(crate) fn not_translated(key: &FrontendKey) {
    event!(
        Trace,
        "no frontend, ignored: destination={:i} port={} protocol={}",
        key.address.octets(),
        key.port.to_host(),
        key.protocol.number()
    );
}

/// Logs that a datagram goes to the peer of its connected socket without translation.
#[inline(always)]
pub(crate) fn peer_kept(key: &FrontendKey) {
    event!(
        Trace,
        "peer kept: destination={:i} port={} protocol={}",
        key.address.octets(),
        key.port.to_host(),
        key.protocol.number()
    );
}

/// Logs that the VIP replaced a backend's address.
#[inline(always)]
pub(crate) fn vip_restored(origin: &Origin) {
    event!(
        Debug,
        "restored: backend={:i} backend_port={} destination={:i} port={}",
        origin.backend.octets(),
        origin.backend_port.to_host(),
        origin.vip.octets(),
        origin.vip_port.to_host()
    );
}

/// Logs that a socket with a translation was closed.
#[inline(always)]
pub(crate) fn socket_closed(origin: &Origin) {
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

/// Logs that the guard dropped a packet.
#[inline(always)]
pub(crate) fn dropped(to: Address) {
    event!(
        Debug,
        "dropped: destination={:i} reason={}",
        to.octets(),
        Reason::GuardDropped.index()
    );
}

/// Logs what was decided about a packet.
#[inline(always)]
pub(crate) fn packet(step: Step) {
    log_packet(step.number());
}

/// Does what [`packet`] does. A separate function, because the values of an event would not fit into the caller's stack frame.
/// The number that it returns has no meaning.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn log_packet(step: u32) -> u32 {
    KernelMaps.with_run(|run| match Step::from_number(step) {
        Step::Begin => flow_begun(run),
        Step::Translate => end_replaced(run),
        Step::Refuse | Step::Drop => packet_refused(run),
        Step::Next | Step::Pass | Step::Defer => {}
    });
    0
}

#[inline(always)]
fn flow_begun(run: &Run) {
    event!(
        Debug,
        "flow begun: client={:i} client_port={} destination={:i} port={} protocol={} backend={:i} backend_port={} reason={}",
        run.source.address.octets(),
        run.source.port.to_host(),
        run.destination.address.octets(),
        run.destination.port.to_host(),
        run.protocol.number(),
        run.replacement.address.octets(),
        run.replacement.port.to_host(),
        run.reason
    );
}

#[inline(always)]
fn packet_refused(run: &Run) {
    event!(
        Debug,
        "refused: source={:i} source_port={} destination={:i} port={} protocol={} reason={}",
        run.source.address.octets(),
        run.source.port.to_host(),
        run.destination.address.octets(),
        run.destination.port.to_host(),
        run.protocol.number(),
        run.reason
    );
}

#[inline(always)]
fn end_replaced(run: &Run) {
    event!(
        Trace,
        "replaced: source={:i} source_port={} destination={:i} port={} protocol={} new={:i} new_port={}",
        run.source.address.octets(),
        run.source.port.to_host(),
        run.destination.address.octets(),
        run.destination.port.to_host(),
        run.protocol.number(),
        run.replacement.address.octets(),
        run.replacement.port.to_host()
    );
}
