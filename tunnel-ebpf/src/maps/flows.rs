//! The maps of flows, as the input for [`forward`]. The steps of a decision are global functions, which share the state of
//! the run.
#![expect(unsafe_code, reason = "BPF map access")]

use core::ptr;

use aya_ebpf::{
    Global,
    btf_maps::{Array, HashMap, LruHashMap, PerCpuArray},
    helpers::generated::{bpf_get_smp_processor_id, bpf_ktime_get_coarse_ns},
    macros::btf_map,
};
use tunnel_common::{
    addr::Port,
    flow::{FROZEN_UNTIL, Flow, FlowKey, REFUSALS, Role, Seen, Timeouts},
    forward::{
        Flows, Insertion, RECENT_FLOWS_OF_CPU, Run, Step, fragments::Fragments, reclaim, sender,
        steps,
    },
    fragment::{FragmentKey, FragmentRecord},
    locality::Locality,
    packet_link::PacketLink,
    reason::Reason,
    refusal::Refusals,
    service::SourceRange,
    service_range::ServiceRange,
};

use super::{KernelMaps, NO_PREALLOC, NOEXIST, forwarded, lifetime, ports};
use crate::context;

#[btf_map(name = "flows")]
static FLOWS: HashMap<FlowKey, Flow, 1, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "recent_flows")]
static RECENT_FLOWS: Array<FlowKey, 1> = Array::new();
#[btf_map(name = "recent_counts")]
static RECENT_COUNTS: Array<u32, 1> = Array::new();
#[btf_map(name = "fragments")]
static FRAGMENTS: LruHashMap<FragmentKey, FragmentRecord, 1> = LruHashMap::new();
#[btf_map(name = "packet_runs")]
static PACKET_RUNS: PerCpuArray<Run, 1> = PerCpuArray::new();
#[btf_map(name = "packet_links")]
static PACKET_LINKS: HashMap<u32, PacketLink, 1, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "local_ranges")]
static LOCAL_RANGES: Array<SourceRange, 1> = Array::new();
#[btf_map(name = "service_ranges")]
static SERVICE_RANGES: Array<ServiceRange, 1> = Array::new();
#[btf_map(name = "packet_state")]
static PACKET_STATE: Array<u64, 2> = Array::new();

/// The number of 64-bit words in a flow.
const FLOW_WORDS: usize = size_of::<Flow>() / size_of::<u64>();

impl Flows for KernelMaps {
    #[inline(always)]
    fn with_run<R>(&self, work: impl FnOnce(&mut Run) -> R) -> Option<R> {
        let run = PACKET_RUNS.get_ptr_mut(0)?;
        // SAFETY: every CPU has an entry of its own. A tc program is not interrupted by another one on its CPU, because
        // it runs with bottom halves disabled. No other reference exists, because `work` calls no step.
        unsafe { run.as_mut() }.map(work)
    }

    #[inline(always)]
    fn flow(&self, key: &FlowKey) -> Option<&Flow> {
        // SAFETY: the element stays mapped while the program runs. Every bit pattern is valid, and it is only used for
        // copies, which are checked.
        unsafe { FLOWS.get(key) }
    }

    #[inline(always)]
    fn copy_flow(&self, flow: &Flow, copy: &mut Flow) {
        let (from, to) = (
            ptr::from_ref(flow).cast::<u64>(),
            ptr::from_mut(copy).cast::<u64>(),
        );
        for word in 0..FLOW_WORDS {
            let (from, to) = (from.wrapping_add(word), to.wrapping_add(word));
            // SAFETY: the entry has this many words, and the kernel aligns values to them. The read is volatile, so that
            // the caller checks the key in the copy, and not in the entry, which may change meanwhile.
            let value = unsafe { from.read_volatile() };
            // SAFETY: the copy has as many words, and is also aligned to them.
            unsafe { to.write_volatile(value) };
        }
    }

    #[inline(always)]
    fn count(&self, reason: Reason) {
        super::count_reason(reason);
    }

    #[inline(always)]
    fn insert_flow(&self, flow: &Flow, is_new: bool) -> Insertion {
        let flags = if is_new { NOEXIST } else { 0 };
        match FLOWS.insert(flow.key(), flow, flags) {
            Ok(()) => Insertion::Inserted,
            Err(EEXIST) => Insertion::Exists,
            Err(E2BIG) => Insertion::Full,
            Err(_) => Insertion::NoMemory,
        }
    }

    #[inline(always)]
    fn touch_flow(&self, flow: &Flow, seen: Seen, now: u32) {
        if flow.last_used != now {
            let last_used = (&raw const flow.last_used).cast_mut();
            // SAFETY: the value is in a map, which programs may write. It is one aligned word.
            unsafe { last_used.write_volatile(now) };
        }
        if !flow.seen.includes(seen) {
            let events = (&raw const flow.seen).cast_mut();
            // SAFETY: as above. It is one byte.
            unsafe { events.write_volatile(flow.seen.union(seen)) };
        }
    }

    #[inline(always)]
    fn expect(&self, flow: &Flow, number: u16) {
        let expected = (&raw const flow.expected).cast_mut();
        // SAFETY: as for `touch_flow`. It is two aligned bytes.
        unsafe { expected.write_volatile(number) };
    }

    #[inline(always)]
    fn end_flow(&self, flow: &Flow) {
        let flags = (&raw const flow.flags).cast_mut();
        // SAFETY: as for `touch_flow`. It is one byte.
        unsafe { flags.write_volatile(flow.flags | Flow::ENDED) };
    }

    #[inline(always)]
    fn remove_flow(&self, key: &FlowKey) -> bool {
        FLOWS.remove(key).is_ok()
    }

    #[inline(always)]
    fn recent_flow(&self, index: u32) -> Option<&FlowKey> {
        RECENT_FLOWS.get(index)
    }

    #[inline(always)]
    fn recent_index(&self, is_of_this_cpu: bool, age: u32) -> u32 {
        let cpu = if is_of_this_cpu {
            this_cpu()
        } else {
            ((u64::from(context::random()) * u64::from(context::cpus())) >> 32) as u32
        };
        let inserted = RECENT_COUNTS.get_ptr(cpu).map_or(0, |count| {
            // SAFETY: the entry stays mapped, and is one aligned word.
            unsafe { count.read_volatile() }
        });
        recent_index_of(cpu, inserted.wrapping_sub(1).wrapping_sub(age))
    }

    #[inline(always)]
    fn record_recent_flow(&self, key: &FlowKey) {
        let cpu = this_cpu();
        let Some(count) = RECENT_COUNTS.get_ptr_mut(cpu) else {
            return;
        };
        // SAFETY: the entry stays mapped, and only this CPU writes it.
        let inserted = unsafe { count.read_volatile() };
        if let Some(entry) = RECENT_FLOWS.get_ptr_mut(recent_index_of(cpu, inserted)) {
            // SAFETY: as above. Readers check the entry that the key leads to.
            unsafe { entry.write(*key) };
        }
        // SAFETY: as above.
        unsafe { count.write_volatile(inserted.wrapping_add(1)) };
    }

    #[inline(always)]
    fn seconds(&self) -> u32 {
        let nanoseconds = if COARSE_CLOCK.load() == 0 {
            context::now()
        } else {
            // SAFETY: the helper has no preconditions, and the loader has checked that this kernel has it.
            unsafe { bpf_ktime_get_coarse_ns() }
        };
        #[expect(clippy::cast_possible_truncation, reason = "136 years")]
        let seconds = (nanoseconds / 1_000_000_000) as u32;
        seconds
    }

    #[inline(always)]
    fn is_frozen(&self) -> bool {
        let until = PACKET_STATE.get_ptr(FROZEN_UNTIL).map_or(0, |until| {
            // SAFETY: the entry stays mapped, and is one aligned word.
            unsafe { until.read_volatile() }
        });
        until > u64::from(self.seconds())
    }

    #[inline(always)]
    fn timeouts(&self) -> Timeouts {
        context::flow_timeouts()
    }

    #[inline(always)]
    fn local_range(&self, index: u32) -> Option<&SourceRange> {
        LOCAL_RANGES.get(index)
    }

    #[inline(always)]
    fn service_range(&self, index: u32) -> Option<&ServiceRange> {
        SERVICE_RANGES.get(index)
    }

    #[inline(always)]
    fn packet_link(&self, link: u32) -> Option<&PacketLink> {
        // SAFETY: the element stays mapped while the program runs. The kernel may reuse it for another link, whose addresses
        // are also this node's; this packet is then judged by the flags of that link.
        unsafe { PACKET_LINKS.get(link) }
    }

    #[inline(always)]
    fn masquerades_all(&self) -> bool {
        context::masquerades_all()
    }

    #[inline(always)]
    fn may_keep_port(&self, port: Port) -> bool {
        let [first, count] = context::masquerade_ports();
        u32::from(port.to_host()).wrapping_sub(first) < count
    }

    #[inline(always)]
    fn port_at(&self, place: u32) -> Port {
        ports::port_at(place)
    }

    #[inline(always)]
    fn port_for(&self, client: Port, place: u32) -> Port {
        ports::port_for(client, place)
    }

    #[inline(always)]
    fn find_arriving(&self) -> Step {
        Step::from_number(find_arriving_flow())
    }

    #[inline(always)]
    fn is_over(&self) -> bool {
        lifetime::is_flow_over() != 0
    }

    #[inline(always)]
    fn is_moved(&self) -> bool {
        lifetime::is_frontend_moved() != 0
    }

    #[inline(always)]
    fn proven(&self) -> Seen {
        Seen::from_number(lifetime::proven_events())
    }

    #[inline(always)]
    fn end_others(&self) {
        lifetime::end_other_entries();
    }

    #[inline(always)]
    fn locality(&self) -> Locality {
        Locality::from_number(locality_of_sender())
    }

    #[inline(always)]
    fn relation_to_range(&self, index: u32) -> u32 {
        relation_of_sender_to_range(index)
    }

    #[inline(always)]
    fn relation_to_service_range(&self, index: u32) -> u32 {
        relation_of_destination_to_range(index)
    }

    #[inline(always)]
    fn without_frontend(&self) -> Step {
        Step::from_number(decide_without_frontend())
    }

    #[inline(always)]
    fn steer(&self) -> Step {
        Step::from_number(forwarded::steer_packet())
    }

    #[inline(always)]
    fn may_be_forwarded(&self) -> bool {
        forwarded::may_sender_be_forwarded() != 0
    }

    #[inline(always)]
    fn relation_to_forwarded_range(&self, index: u32) -> u32 {
        forwarded::relation_of_sender_to_forward_range(index)
    }

    #[inline(always)]
    fn choose(&self) -> Step {
        Step::from_number(choose_for_packet())
    }

    #[inline(always)]
    fn claim(&self, role: Role, from_closing: bool) -> Insertion {
        Insertion::from_number(claim_flow_key(role.number(), from_closing.into()))
    }

    #[inline(always)]
    fn insert(&self, role: Role, is_new: bool) -> Insertion {
        Insertion::from_number(insert_flow_entry(role.number(), u32::from(is_new)))
    }

    #[inline(always)]
    fn is_unused(&self, from_closing: bool) -> bool {
        is_entry_unused(from_closing.into()) != 0
    }

    #[inline(always)]
    fn make_room(&self) -> bool {
        make_room_for_flow() != 0
    }

    #[inline(always)]
    fn better_candidate(&self, number: u32, best: u64) -> u64 {
        better_candidate_to_remove(number, best)
    }

    #[inline(always)]
    fn find_leaving(&self) -> Step {
        Step::from_number(find_leaving_flow())
    }

    #[inline(always)]
    fn end_entry(&self, role: Role) {
        lifetime::end_flow_entry(role.number());
    }
}

impl Fragments for KernelMaps {
    #[inline(always)]
    fn fragment(&self, key: &FragmentKey) -> Option<FragmentRecord> {
        // SAFETY: the element stays mapped while the program runs. It is copied below.
        let record = unsafe { FRAGMENTS.get(key) }?;
        // SAFETY: every bit pattern is valid. The read is volatile, so that the caller checks the key in the copy.
        Some(unsafe { ptr::from_ref(record).read_volatile() })
    }

    #[inline(always)]
    fn remove_fragment(&self, key: &FragmentKey) {
        // Mostly, there is none.
        let _removed = FRAGMENTS.remove(key);
    }

    #[inline(always)]
    fn insert_fragment(&self, record: &FragmentRecord) {
        // The map evicts an entry if it is full. Without memory for the insertion, the fragments are lost.
        #[expect(
            clippy::needless_borrows_for_generic_args,
            reason = "a copy takes stack space"
        )]
        let _inserted = FRAGMENTS.insert(&record.key, record, 0);
    }

    #[inline(always)]
    fn fragment_timeout(&self) -> u32 {
        context::fragment_timeout()
    }
}

/// 1 if the kernel has `bpf_ktime_get_coarse_ns`, which reads no hardware clock. Set by the loader.
#[unsafe(no_mangle)]
static COARSE_CLOCK: Global<u8> = Global::new(0);

/// The error of an insertion into a full map.
const E2BIG: i32 = -7;
/// The error of an insertion under an existing key.
const EEXIST: i32 = -17;

/// Returns the number of this CPU.
#[inline(always)]
fn this_cpu() -> u32 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_get_smp_processor_id() }
}

/// Returns the index in the array `recent_flows` of a position in the part of a CPU.
#[inline(always)]
const fn recent_index_of(cpu: u32, position: u32) -> u32 {
    cpu * RECENT_FLOWS_OF_CPU + position % RECENT_FLOWS_OF_CPU
}

/// Returns true if a link leads to pods.
#[inline(always)]
pub(crate) fn leads_to_pods(link: u32) -> bool {
    let link = KernelMaps.packet_link(link);
    link.is_some_and(|link| link.flags & PacketLink::LEADS_TO_PODS != 0)
}

/// Returns true if another refused packet may be answered in this second, and counts it.
#[inline(always)]
pub(crate) fn may_answer() -> bool {
    let Some(stored) = PACKET_STATE.get_ptr_mut(REFUSALS) else {
        return false;
    };
    // SAFETY: the entry stays mapped, and is one aligned word.
    let refusals = Refusals::from_word(unsafe { stored.read_volatile() });
    match refusals.next(KernelMaps.seconds(), context::refusals_per_second()) {
        Some(next) => {
            // SAFETY: as above. If another CPU writes at once, a few more packets are answered.
            unsafe { stored.write_volatile(next.word()) };
            true
        }
        None => false,
    }
}

/// Calls [`steps::find_arriving`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn find_arriving_flow() -> u32 {
    steps::find_arriving(&KernelMaps).number()
}

/// Calls [`sender::locality`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn locality_of_sender() -> u32 {
    sender::locality(&KernelMaps).number()
}

/// Calls [`sender::relation_to_range`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn relation_of_sender_to_range(index: u32) -> u32 {
    sender::relation_to_range(&KernelMaps, index)
}

/// Calls [`steps::relation_to_service_range`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn relation_of_destination_to_range(index: u32) -> u32 {
    steps::relation_to_service_range(&KernelMaps, index)
}

/// Calls [`steps::without_frontend`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn decide_without_frontend() -> u32 {
    steps::without_frontend(&KernelMaps).number()
}

/// Calls [`steps::choose`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn choose_for_packet() -> u32 {
    steps::choose(&KernelMaps).number()
}

/// Calls [`steps::claim`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn claim_flow_key(role: u32, from_closing: u32) -> u32 {
    steps::claim(&KernelMaps, Role::from_number(role), from_closing != 0).number()
}

/// Calls [`steps::insert`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn insert_flow_entry(role: u32, is_new: u32) -> u32 {
    steps::insert(&KernelMaps, Role::from_number(role), is_new != 0).number()
}

/// Calls [`steps::is_unused`]. Returns 1 for true.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn is_entry_unused(from_closing: u32) -> u32 {
    steps::is_unused(&KernelMaps, from_closing != 0).into()
}

/// Calls [`reclaim::make_room`]. Returns 1 for true.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn make_room_for_flow() -> u32 {
    reclaim::make_room(&KernelMaps).into()
}

/// Calls [`reclaim::better_candidate`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn better_candidate_to_remove(number: u32, best: u64) -> u64 {
    reclaim::better_candidate(&KernelMaps, number, best)
}

/// Calls [`steps::find_leaving`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn find_leaving_flow() -> u32 {
    steps::find_leaving(&KernelMaps).number()
}
