//! Every map of the data plane, once. No other module accesses a map.
#![expect(unsafe_code, reason = "BPF map access")]

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
    decide::{self, Caller, Kept, Record, Traffic},
    origin::{Origin, Overflow, OverflowKey},
    reason::Reason,
    select,
    service::{Backend, Front, FrontKey, Membership, Near, Set, Slot, Source, State, Tally},
    steering::{Steered, SteeringKey},
};

use crate::context;

// The loader sets the sizes of 1 here, by its config and the number of CPUs.
#[btf_map(name = "svc")]
static SVC: HashMap<FrontKey, u32, 1> = HashMap::new();
#[btf_map(name = "front")]
static FRONT: Array<Front, 1> = Array::new();
#[btf_map(name = "slot")]
static SLOT: Array<Slot, 1> = Array::new();
#[btf_map(name = "source")]
static SOURCE: Array<Source, 1> = Array::new();
#[btf_map(name = "be")]
static BE: Array<Backend, 1> = Array::new();
// The daemon maps it into its own memory too.
#[btf_map(name = "conns")]
static CONNS: Array<u64, 1, MMAPABLE> = Array::new();
#[btf_map(name = "tally")]
static TALLY: Array<Tally, 1> = Array::new();
#[btf_map(name = "affinity")]
static AFFINITY: LruHashMap<AffinityKey, Affinity, 1> = LruHashMap::new();
#[btf_map(name = "origin")]
static ORIGIN: SkStorage<Origin> = SkStorage::new();
#[btf_map(name = "overflow")]
static OVERFLOW: LruHashMap<OverflowKey, Overflow, 1, NO_COMMON_LRU> = LruHashMap::new();
#[btf_map(name = "count")]
static COUNT: PerCpuArray<u64, REASONS> = PerCpuArray::new();
#[btf_map(name = "steer")]
static STEER: HashMap<SteeringKey, u32, 1> = HashMap::new();
#[btf_map(name = "steered")]
static STEERED: Array<Steered, 1> = Array::new();
#[btf_map(name = "host")]
static HOST: Array<u64, 2> = Array::new();

const NO_COMMON_LRU: usize = aya_ebpf::bindings::BPF_F_NO_COMMON_LRU as usize;
const MMAPABLE: usize = aya_ebpf::bindings::BPF_F_MMAPABLE as usize;
const NOEXIST: u64 = aya_ebpf::bindings::BPF_NOEXIST as u64;
const REASONS: usize = Reason::CAPACITY as usize;

/// The maps in the kernel, for a decision.
///
/// Steps that need more than a random number are global functions: the verifier checks those once, and
/// not again with the remainder of the program after each of their exits.
pub(crate) struct Kernel;

impl decide::Maps for Kernel {
    #[inline(always)]
    fn front_index(&self, key: &FrontKey) -> Option<u32> {
        // SAFETY: the program runs in an RCU read section, so the element stays mapped. It may be
        // reused for another key meanwhile, so this may be another frontend's index: `lookup::look_up`
        // compares the key that the record echoes.
        unsafe { SVC.get(key) }.copied()
    }

    #[inline(always)]
    fn front(&self, index: u32) -> Option<&Front> {
        FRONT.get(index)
    }

    #[inline(always)]
    fn slot(&self, index: u32) -> Option<&Slot> {
        SLOT.get(index)
    }

    #[inline(always)]
    fn source(&self, index: u32) -> Option<&Source> {
        SOURCE.get(index)
    }

    #[inline(always)]
    fn backend(&self, index: u32) -> Option<&Backend> {
        BE.get(index)
    }

    /// Reads an entry, whose element may be reused for another key at any moment.
    #[inline(always)]
    fn affinity(&self, key: &AffinityKey) -> Option<&Affinity> {
        // SAFETY: the element stays mapped for the run of the program. Every bit pattern is a value,
        // and `decide` checks the backend before it uses it.
        unsafe { AFFINITY.get(key) }.filter(|entry| entry.key == *key)
    }

    #[inline(always)]
    fn insert_affinity(&self, entry: &Affinity, is_new: bool) -> bool {
        let flags = if is_new { NOEXIST } else { 0 };
        #[expect(
            clippy::needless_borrows_for_generic_args,
            reason = "a copy takes room on the stack"
        )]
        AFFINITY.insert(&entry.key, entry, flags).is_ok()
    }

    #[inline(always)]
    fn open_at(&self, backend: u32) -> u64 {
        // SAFETY: the entry stays mapped; one aligned word, which changes under it.
        CONNS
            .get_ptr(backend)
            .map_or(0, |count| unsafe { count.read_volatile() })
    }

    /// Reads, then increments. A program on another CPU may concurrently get the same number, which
    /// costs one turn and nothing else.
    #[inline(always)]
    fn turn(&self, service: u32) -> Option<u32> {
        let tally = TALLY.get_ptr_mut(service)?;
        // SAFETY: the entry stays mapped.
        let turn = unsafe { &raw mut (*tally).turn };
        #[expect(clippy::cast_possible_truncation, reason = "modulo 2^32")]
        // SAFETY: as above; one aligned word, which changes under it.
        let number = unsafe { turn.read_volatile() } as u32;
        add(Some(turn), 1);
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
    fn state(&self, backend: &Backend) -> State {
        // SAFETY: the reference is valid; the word changes under it, hence one volatile read.
        unsafe { (&raw const backend.state).read_volatile() }
    }

    #[inline(always)]
    fn sets(&self, backend: &Backend) -> Membership {
        // SAFETY: as for `state`.
        unsafe { (&raw const backend.sets).read_volatile() }
    }

    #[inline(always)]
    fn near<'a>(&self, front: &'a Front, place: u32) -> Option<&'a Near> {
        front.near.get(context::in_register(place))
    }

    #[inline(always)]
    fn place(&self, record: Record<'_>, traffic: Traffic, caller: Caller) -> Option<u32> {
        let Caller { kind, upper, lower } = caller;
        let place = place_by_algorithm(record.index, traffic, kind, upper, lower);
        #[expect(clippy::cast_possible_truncation, reason = "the lower half")]
        let low = place as u32;
        (place != NO_PLACE).then_some(low)
    }

    #[inline(always)]
    fn kept(&self, record: Record<'_>, traffic: Traffic, caller: Caller) -> Option<Kept> {
        let Caller { kind, upper, lower } = caller;
        Kept::from_word(kept_by_client(record.index, traffic, kind, upper, lower))
    }

    #[inline(always)]
    fn is_among(&self, sources: Set, [upper, lower]: [u64; 2]) -> bool {
        is_among_sources(sources.base, sources.len, upper, lower) != 0
    }
}

/// The word for no offset.
const NO_PLACE: u64 = u64::MAX;

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn place_by_algorithm(
    front: u32,
    traffic: Traffic,
    kind: u32,
    upper: u64,
    lower: u64,
) -> u64 {
    let Some(front) = FRONT.get(front) else {
        return NO_PLACE;
    };
    let caller = Caller { kind, upper, lower };
    decide::place(&Kernel, front, traffic, caller).map_or(NO_PLACE, u64::from)
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn kept_by_client(
    front: u32,
    traffic: Traffic,
    kind: u32,
    upper: u64,
    lower: u64,
) -> u64 {
    let caller = Caller { kind, upper, lower };
    let kept = FRONT.get(front);
    Kept::to_word(kept.and_then(|front| decide::kept(&Kernel, front, traffic, caller)))
}

#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn is_among_sources(base: u32, len: u32, upper: u64, lower: u64) -> u32 {
    let address = Address::from_halves([upper, lower]);
    select::is_among(Set { base, len }, &address, |index| SOURCE.get(index)).into()
}

/// Adds one to the open connections of a backend.
#[inline(always)]
pub(crate) fn count_opened(index: u32) {
    add(CONNS.get_ptr_mut(index), 1);
}

/// Subtracts one from the open connections of a backend.
#[inline(always)]
pub(crate) fn count_closed(index: u32) {
    // Minus one, since the sum is modulo 2^64.
    add(CONNS.get_ptr_mut(index), u64::MAX);
}

/// Counts a connection or flow of a service port that was sent to a backend.
#[inline(always)]
pub(crate) fn count_sent(service: u32) {
    count_at_service(service, 0);
}

/// Counts a connection or datagram of a service port that was refused.
#[inline(always)]
pub(crate) fn count_refused(service: u32) {
    count_at_service(service, 1);
}

/// Increments a counter of a service port, if it has counters. A global function has a stack frame of
/// its own; that of its caller has little room left.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn count_at_service(service: u32, is_refused: u32) -> u32 {
    let Some(tally) = TALLY.get_ptr_mut(service) else {
        return 0;
    };
    let counter = if is_refused == 0 {
        // SAFETY: the entry stays mapped.
        unsafe { &raw mut (*tally).sent }
    } else {
        // SAFETY: as above.
        unsafe { &raw mut (*tally).refused }
    };
    add(Some(counter), 1);
    1
}

/// Returns the last translation of a socket.
#[inline(always)]
pub(crate) fn origin(ctx: &SockAddrContext) -> Option<&'static Origin> {
    // SAFETY: the helper takes the socket of the context.
    let value = unsafe { ORIGIN.get_ptr_mut(ctx) };
    // SAFETY: the value is null, or stays mapped until the program ends. Only the word `used`
    // changes, through `touch`.
    unsafe { value.cast_const().as_ref() }
}

/// Stores the time of the last use of a socket's flow.
#[inline(always)]
pub(crate) fn touch(origin: &'static Origin, now: u64) {
    let used = (&raw const origin.used).cast_mut();
    // SAFETY: the value is in socket storage, where programs may write; one word of 64 bits.
    unsafe { used.write_volatile(now) };
}

/// Marks a socket that has older translations in `overflow`.
#[inline(always)]
pub(crate) fn mark_overflowed(origin: &'static Origin) {
    let flags = (&raw const origin.flags).cast_mut();
    // SAFETY: the value is in socket storage, where programs may write; one aligned word, which only
    // the holder of the socket's lock changes.
    unsafe { flags.write_volatile(origin.flags | Origin::OVERFLOWED) };
}

/// Stores a translation of a socket that has none. Returns the stored one, which is another if a
/// concurrent thread was first, or none if memory is short.
#[inline(always)]
pub(crate) fn insert_origin(ctx: &SockAddrContext, origin: &mut Origin) -> Option<&'static Origin> {
    // SAFETY: the helper takes the socket of the context; the initial value is complete before
    // other readers see it.
    let value = unsafe { ORIGIN.get_or_insert_ptr_mut(ctx, Some(origin)) };
    // SAFETY: as for `origin`.
    unsafe { value.cast_const().as_ref() }
}

/// Removes the translation of a socket. Readers that hold the value keep it unchanged. Returns true if
/// there was one.
#[inline(always)]
pub(crate) fn remove_origin(ctx: &SockAddrContext) -> bool {
    // SAFETY: the helper takes the socket of the context. It fails only if there is no value.
    unsafe { ORIGIN.delete(context::socket(ctx)) }.is_ok()
}

/// Returns the last translation of a socket that is being closed.
#[inline(always)]
pub(crate) fn origin_of_closed(ctx: &SockContext) -> Option<&'static Origin> {
    let sock: *mut bpf_sock = ctx.sock;
    // SAFETY: the helper takes the socket that the hook runs for.
    let value = unsafe {
        bpf_sk_storage_get(
            (&raw const ORIGIN).cast_mut().cast(),
            sock.cast(),
            ptr::null_mut(),
            0,
        )
    };
    // SAFETY: as for `origin`.
    unsafe { value.cast_const().cast::<Origin>().as_ref() }
}

/// Returns an older translation of a socket, if the entry echoes the key.
#[inline(always)]
pub(crate) fn overflow(key: &OverflowKey) -> Option<Origin> {
    // SAFETY: the element stays mapped for the run of the program, but may be reused for another
    // key: it is copied, and the copy's key compared.
    let entry = unsafe { OVERFLOW.get(key) }.copied()?;
    if entry.key == *key {
        Some(entry.origin)
    } else {
        None
    }
}

/// Stores an older translation of a socket. The map evicts the least recently used entry.
#[inline(always)]
pub(crate) fn insert_overflow(entry: &Overflow) {
    // The map is an LRU: the insert fails only if every entry is being changed at this moment, and then
    // the flow chooses again.
    #[expect(
        clippy::needless_borrows_for_generic_args,
        reason = "a copy takes room on the stack"
    )]
    let _full: Result<(), i32> = OVERFLOW.insert(&entry.key, entry, 0);
}

/// Removes an older translation of a socket.
#[inline(always)]
pub(crate) fn remove_overflow(key: &OverflowKey) {
    let _absent: Result<(), i32> = OVERFLOW.remove(key);
}

/// Returns the index of the record of an address and port of an edge node.
#[inline(always)]
pub(crate) fn steer_index(key: &SteeringKey) -> Option<u32> {
    // SAFETY: as for `front_index`.
    unsafe { STEER.get(key) }.copied()
}

/// Returns the record of an address and port of an edge node. While a program can reach it, only the
/// time of its removal changes.
#[inline(always)]
pub(crate) fn steered(index: u32) -> Option<&'static Steered> {
    STEERED.get(index)
}

/// Returns the cookie of the host's network namespace; 0 until it is known.
#[inline(always)]
pub(crate) fn host() -> u64 {
    HOST.get(0).copied().unwrap_or(0)
}

/// Returns the families whose steering prefix is routed to this node: bits of `Steered::ROUTED_*`.
#[inline(always)]
pub(crate) fn routed() -> u64 {
    HOST.get(1).copied().unwrap_or(0)
}

/// Stores the cookie of the host's network namespace.
#[inline(always)]
pub(crate) fn note_host(cookie: u64) {
    if let Some(host) = HOST.get_ptr_mut(0) {
        // SAFETY: the entry stays mapped; one aligned word, written by the probe only.
        unsafe { host.write_volatile(cookie) };
    }
}

/// Increments the counter of a reason on this CPU.
#[inline(always)]
pub(crate) fn count(reason: Reason) {
    add(COUNT.get_ptr_mut(reason.index()), 1);
}

/// Adds to a counter, if it exists.
#[inline(always)]
fn add(counter: Option<*mut u64>, number: u64) {
    if let Some(counter) = counter {
        // SAFETY: the counter is an aligned word of 64 bits in a map. The addition is atomic because
        // another program may preempt this one, or count there on another CPU. It is written out
        // because `core` has no atomic addition for this target, and because Linux 5.10 has none
        // that gives a result.
        unsafe {
            asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) counter, in(reg) number, options(nostack));
        }
    }
}
