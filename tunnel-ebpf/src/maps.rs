//! The maps, and all access to them. No other module accesses a map.
#![expect(unsafe_code, reason = "BPF map access")]

mod flows;
mod forwarded;
mod lifetime;
mod older;
mod ports;

use core::{arch::asm, ptr};

use aya_ebpf::{
    bindings::bpf_sock,
    btf_maps::{Array, HashMap, LruHashMap, PerCpuArray, SkStorage},
    helpers::generated::bpf_sk_storage_get,
    macros::btf_map,
    programs::{SockAddrContext, SockContext},
};
use tunnel_common::{
    addr::Address,
    affinity::{Affinity, AffinityKey},
    decide::{self, AffinityChoice, ClientScalars, FrontendRecord, Traffic},
    origin::Origin,
    reason::Reason,
    select,
    service::{
        Backend, BackendState, Frontend, FrontendKey, IndexRange, InlineBackend, Membership,
        ServiceCounts, Slot, SourceRange,
    },
    steering::{SteeringKey, SteeringRecord},
};

pub(crate) use self::{
    flows::{leads_to_pods, may_answer},
    older::{
        few, few_or_new, insert_shared, many, many_of_closed, many_or_new, overflow,
        remove_overflow, remove_shared, shared,
    },
};
use crate::context;

/// Entries are allocated on demand.
const NO_PREALLOC: usize = aya_ebpf::bindings::BPF_F_NO_PREALLOC as usize;

// A size of 1 is a placeholder. The loader sets the actual size from the config and the number of CPUs.
#[btf_map(name = "services")]
static SERVICES: HashMap<FrontendKey, u32, 1, NO_PREALLOC> = HashMap::new();
#[btf_map(name = "frontends")]
static FRONTENDS: Array<Frontend, 1> = Array::new();
#[btf_map(name = "slots")]
static SLOTS: Array<Slot, 1> = Array::new();
#[btf_map(name = "source_ranges")]
static SOURCE_RANGES: Array<SourceRange, 1> = Array::new();
#[btf_map(name = "backends")]
static BACKENDS: Array<Backend, 1> = Array::new();
// The daemon maps the values into its own memory.
#[btf_map(name = "conns")]
static CONNS: Array<u64, 1, MMAPABLE> = Array::new();
#[btf_map(name = "service_counts")]
static SERVICE_COUNTS: Array<ServiceCounts, 1> = Array::new();
#[btf_map(name = "affinity")]
static AFFINITY: LruHashMap<AffinityKey, Affinity, 1> = LruHashMap::new();
#[btf_map(name = "origin")]
static ORIGIN: SkStorage<Origin> = SkStorage::new();
#[btf_map(name = "reason_counts")]
static REASON_COUNTS: PerCpuArray<u64, REASONS> = PerCpuArray::new();
#[btf_map(name = "steer")]
static STEER: HashMap<SteeringKey, u32, 1> = HashMap::new();
#[btf_map(name = "steered")]
static STEERED: Array<SteeringRecord, 1> = Array::new();
#[btf_map(name = "host")]
static HOST: Array<u64, 2> = Array::new();

const MMAPABLE: usize = aya_ebpf::bindings::BPF_F_MMAPABLE as usize;
const NOEXIST: u64 = aya_ebpf::bindings::BPF_NOEXIST as u64;
const REASONS: usize = Reason::CAPACITY as usize;

/// The maps in the kernel, as the input for [`decide`].
///
/// The larger steps of choosing a backend are global functions, because the verifier checks a global function
/// only once. If a step were inlined, the verifier would check the rest of the program again for each of the
/// step's exits.
pub(crate) struct KernelMaps;

impl decide::Maps for KernelMaps {
    #[inline(always)]
    fn frontend_index(&self, key: &FrontendKey) -> Option<u32> {
        // SAFETY: the program runs in an RCU read-side critical section, so the element stays mapped. The
        // kernel may meanwhile reuse the element for another key; `lookup::look_up` checks the key in the
        // record.
        unsafe { SERVICES.get(key) }.copied()
    }

    #[inline(always)]
    fn frontend(&self, index: u32) -> Option<&Frontend> {
        FRONTENDS.get(index)
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<&Slot> {
        SLOTS.get(index)
    }

    #[inline(always)]
    fn source_range(&self, index: u32) -> Option<&SourceRange> {
        SOURCE_RANGES.get(index)
    }

    #[inline(always)]
    fn backend(&self, index: u32) -> Option<&Backend> {
        BACKENDS.get(index)
    }

    /// Reads an entry. The kernel may reuse the entry's hash element for another key at any time.
    #[inline(always)]
    fn affinity(&self, key: &AffinityKey) -> Option<&Affinity> {
        // SAFETY: the element stays mapped while the program runs. Every bit pattern is valid, and `decide`
        // checks the backend before using it.
        unsafe { AFFINITY.get(key) }.filter(|entry| entry.key == *key)
    }

    #[inline(always)]
    fn insert_affinity(&self, entry: &Affinity, is_new: bool) -> bool {
        let flags = if is_new { NOEXIST } else { 0 };
        #[expect(
            clippy::needless_borrows_for_generic_args,
            reason = "a copy takes stack space"
        )]
        AFFINITY.insert(&entry.key, entry, flags).is_ok()
    }

    #[inline(always)]
    fn open_connections(&self, backend: u32) -> u64 {
        // SAFETY: the entry stays mapped. It is one aligned word, which other CPUs may change.
        CONNS
            .get_ptr(backend)
            .map_or(0, |count| unsafe { count.read_volatile() })
    }

    /// Reads the counter, then increments it. A program on another CPU may concurrently read the same number,
    /// and then chooses the same slot.
    #[inline(always)]
    fn next_round_robin(&self, service: u32) -> Option<u32> {
        let counters = SERVICE_COUNTS.get_ptr_mut(service)?;
        // SAFETY: the entry stays mapped.
        let counter = unsafe { &raw mut (*counters).round_robin };
        #[expect(clippy::cast_possible_truncation, reason = "modulo 2^32")]
        // SAFETY: as above. The counter is one aligned word, which other CPUs may change.
        let number = unsafe { counter.read_volatile() } as u32;
        add(Some(counter), 1);
        Some(number)
    }

    #[inline(always)]
    fn random(&self) -> u32 {
        context::random()
    }

    #[inline(always)]
    fn now(&self) -> u64 {
        context::now()
    }

    #[inline(always)]
    fn state(&self, backend: &Backend) -> BackendState {
        // SAFETY: the reference is valid. The read is volatile, because the daemon may change the word
        // concurrently.
        unsafe { (&raw const backend.state).read_volatile() }
    }

    #[inline(always)]
    fn sets(&self, backend: &Backend) -> Membership {
        // SAFETY: as for `state`.
        unsafe { (&raw const backend.sets).read_volatile() }
    }

    #[inline(always)]
    fn inline_backend<'a>(&self, frontend: &'a Frontend, offset: u32) -> Option<&'a InlineBackend> {
        frontend.inline_backends.get(in_register(offset))
    }

    #[inline(always)]
    fn choose_offset(
        &self,
        record: FrontendRecord<'_>,
        traffic: Traffic,
        client: ClientScalars,
    ) -> Option<u32> {
        let ClientScalars { kind, upper, lower } = client;
        let offset = offset_by_algorithm(record.index, traffic, kind, upper, lower);
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let low = offset as u32;
        (offset != NO_OFFSET).then_some(low)
    }

    #[inline(always)]
    fn choose_by_affinity(
        &self,
        record: FrontendRecord<'_>,
        traffic: Traffic,
        client: ClientScalars,
    ) -> Option<AffinityChoice> {
        let ClientScalars { kind, upper, lower } = client;
        AffinityChoice::from_word(backend_by_affinity(
            record.index,
            traffic,
            kind,
            upper,
            lower,
        ))
    }

    #[inline(always)]
    fn is_in_source_ranges(&self, ranges: IndexRange, [upper, lower]: [u64; 2]) -> bool {
        is_in_source_ranges(ranges.base, ranges.len, upper, lower) != 0
    }
}

/// The value that [`offset_by_algorithm`] returns if there is no offset.
const NO_OFFSET: u64 = u64::MAX;

/// Calls [`decide::choose_offset`] for the frontend record at an index.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn offset_by_algorithm(
    frontend: u32,
    traffic: Traffic,
    kind: u32,
    upper: u64,
    lower: u64,
) -> u64 {
    let Some(frontend) = FRONTENDS.get(frontend) else {
        return NO_OFFSET;
    };
    let client = ClientScalars { kind, upper, lower };
    decide::choose_offset(&KernelMaps, frontend, traffic, client).map_or(NO_OFFSET, u64::from)
}

/// Calls [`decide::choose_by_affinity`] for the frontend record at an index, and packs the result into one
/// word.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn backend_by_affinity(
    frontend: u32,
    traffic: Traffic,
    kind: u32,
    upper: u64,
    lower: u64,
) -> u64 {
    let client = ClientScalars { kind, upper, lower };
    let frontend = FRONTENDS.get(frontend);
    AffinityChoice::to_word(
        frontend.and_then(|frontend| {
            decide::choose_by_affinity(&KernelMaps, frontend, traffic, client)
        }),
    )
}

/// Calls [`select::is_in_ranges`] on the map of source ranges. Returns 1 for true.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn is_in_source_ranges(base: u32, len: u32, upper: u64, lower: u64) -> u32 {
    let address = Address::from_halves([upper, lower]);
    select::is_in_ranges(IndexRange { base, len }, &address, |index| {
        SOURCE_RANGES.get(index)
    })
    .into()
}

/// Increments a backend's count of open connections.
#[inline(always)]
pub(crate) fn count_opened(index: u32) {
    add(CONNS.get_ptr_mut(index), 1);
}

/// Decrements a backend's count of open connections.
#[inline(always)]
pub(crate) fn count_closed(index: u32) {
    // Adds -1 modulo 2^64.
    add(CONNS.get_ptr_mut(index), u64::MAX);
}

/// Increments a service port's count of connections and UDP flows sent to a backend.
#[inline(always)]
pub(crate) fn count_sent(service: u32) {
    count_for_service(service, 0);
}

/// Increments a service port's count of refused connections and datagrams.
#[inline(always)]
pub(crate) fn count_refused(service: u32) {
    count_for_service(service, 1);
}

/// Increments one of a service port's counters. Returns 0 if the service port has no counters. This is a
/// global function to keep its callers' stack frames small.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn count_for_service(service: u32, is_refused: u32) -> u32 {
    let Some(counters) = SERVICE_COUNTS.get_ptr_mut(service) else {
        return 0;
    };
    let counter = if is_refused == 0 {
        // SAFETY: the entry stays mapped.
        unsafe { &raw mut (*counters).sent }
    } else {
        // SAFETY: as above.
        unsafe { &raw mut (*counters).refused }
    };
    add(Some(counter), 1);
    1
}

/// Returns a socket's last translation.
#[inline(always)]
pub(crate) fn origin(ctx: &SockAddrContext) -> Option<&'static Origin> {
    // SAFETY: the helper takes the socket in the context.
    let value = unsafe { ORIGIN.get_ptr_mut(ctx) };
    // SAFETY: the pointer is null, or the value stays mapped until the program ends. Only `touch` and `set_flags`
    // change the value, each of them a single field.
    unsafe { value.cast_const().as_ref() }
}

/// Records the time at which a flow was last used.
#[inline(always)]
pub(crate) fn touch(origin: &'static Origin, now: u64) {
    let last_used = (&raw const origin.last_used).cast_mut();
    // SAFETY: the value is in a map, which programs may write. It is one aligned word.
    unsafe { last_used.write_volatile(now) };
}

/// Changes the flags of the last translation.
#[inline(always)]
pub(crate) fn set_flags(origin: &'static Origin, flags: u16) {
    let field = (&raw const origin.flags).cast_mut();
    // SAFETY: as for `touch`. It is one aligned half-word.
    unsafe { field.write_volatile(flags) };
}

/// Stores the last translation of a socket that has none. Returns false if there is no memory.
#[inline(always)]
pub(crate) fn insert_origin(ctx: &SockAddrContext, origin: &mut Origin) -> bool {
    // SAFETY: the helper takes the socket in the context. Readers see the value only after it has been
    // written completely.
    let value = unsafe { ORIGIN.get_or_insert_ptr_mut(ctx, Some(origin)) };
    !value.is_null()
}

/// Removes a socket's last translation. Returns true if there was one. Programs that are reading the value
/// still see it unchanged.
#[inline(always)]
pub(crate) fn remove_origin(ctx: &SockAddrContext) -> bool {
    // SAFETY: the helper takes the socket in the context, and fails only if there is no value.
    unsafe { ORIGIN.delete(context::socket(ctx)) }.is_ok()
}

/// Returns the last translation of a socket that is being closed.
#[inline(always)]
pub(crate) fn origin_of_closed(ctx: &SockContext) -> Option<&'static Origin> {
    let value = value_of_closed(&ORIGIN, ctx);
    // SAFETY: as for `origin`.
    unsafe { value.cast_const().as_ref() }
}

/// Returns a pointer to the value of a socket that is being closed, or null if the socket has none. aya has this
/// only for the hooks that have an address.
#[inline(always)]
fn value_of_closed<T>(storage: &'static SkStorage<T>, ctx: &SockContext) -> *mut T {
    let map = ptr::from_ref(storage).cast_mut().cast();
    let sock: *mut bpf_sock = ctx.sock;
    // SAFETY: the helper takes the socket that the hook runs for, and creates no value.
    unsafe { bpf_sk_storage_get(map, sock.cast(), ptr::null_mut(), 0) }.cast()
}

/// Returns the index of the steering record for an edge node's address and port.
#[inline(always)]
pub(crate) fn steering_index(key: &SteeringKey) -> Option<u32> {
    // SAFETY: as for `frontend_index`.
    unsafe { STEER.get(key) }.copied()
}

/// Returns the steering record at an index. While programs can reach a record, only its `removed_at` changes.
#[inline(always)]
pub(crate) fn steering_record(index: u32) -> Option<&'static SteeringRecord> {
    STEERED.get(index)
}

/// Returns the cookie of the host's network namespace, or 0 if it is not known yet.
#[inline(always)]
pub(crate) fn host_namespace() -> u64 {
    HOST.get(0).copied().unwrap_or(0)
}

/// Returns the address families whose steering prefix is routed to this node, as a combination of
/// `SteeringRecord::ROUTED_*`.
#[inline(always)]
pub(crate) fn routed_families() -> u64 {
    HOST.get(1).copied().unwrap_or(0)
}

/// Stores the cookie of the host's network namespace.
#[inline(always)]
pub(crate) fn store_host_namespace(cookie: u64) {
    if let Some(host) = HOST.get_ptr_mut(0) {
        // SAFETY: the entry stays mapped. It is one aligned word, which is written only when the daemon
        // connects to its probe.
        unsafe { host.write_volatile(cookie) };
    }
}

/// Increments a reason's counter on this CPU.
#[inline(always)]
pub(crate) fn count_reason(reason: Reason) {
    count_reason_at(reason.index());
}

/// Increments the counter on this CPU of the reason with an index.
#[inline(always)]
pub(crate) fn count_reason_at(reason: u32) {
    add(REASON_COUNTS.get_ptr_mut(reason), 1);
}

/// Adds a number to a counter, if there is one.
#[inline(always)]
fn add(counter: Option<*mut u64>, number: u64) {
    if let Some(counter) = counter {
        // SAFETY: the counter is an aligned 64-bit word in a map. The addition is atomic, because another
        // program may preempt this one or run on another CPU. It is written in assembly, because `core` has
        // no atomic addition for this target, and an atomic addition that returns the old value needs Linux
        // 5.12.
        unsafe {
            asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) counter, in(reg) number, options(nostack));
        }
    }
}

/// Returns the number unchanged, and forces the compiler to keep it in a register. If the compiler loaded the
/// number from the stack twice, once to compare it and once to use it, the verifiers in Linux 5.10 and 6.1
/// would lose track of its bounds.
#[inline(always)]
pub(crate) fn in_register(number: u32) -> usize {
    let mut number = number as usize;
    // This is an instruction, because the line of an empty assembly block would have the same offset as the
    // next one, and the kernel rejects such debug information.
    // SAFETY: the instruction changes nothing.
    unsafe { asm!("{0} = {0}", inout(reg) number, options(nomem, nostack, preserves_flags)) };
    number
}
