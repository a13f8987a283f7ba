//! Safe access to the contexts of socket hooks, to constants set by the loader, and to BPF helpers.
//!
//! Every field of a context is read and written with one volatile 32-bit access. Otherwise, LLVM would merge
//! neighbouring accesses into a 64-bit access, which the verifier rejects.
#![expect(unsafe_code, reason = "the context is a raw pointer from the kernel")]

use core::{
    ffi::c_void,
    mem::{MaybeUninit, offset_of},
    ptr,
};

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::{
        bpf_get_netns_cookie, bpf_get_prandom_u32, bpf_get_socket_cookie, bpf_ktime_get_ns,
        bpf_probe_read_kernel, bpf_set_retval,
    },
    programs::SockAddrContext,
};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    flow::Timeouts,
    kernel_offsets::OFFSET_COUNT,
    origin::Origin,
    service::FrontendKey,
};

const AF_INET: u32 = 2;

/// The return value with which a hook lets the system call continue.
pub(crate) const ALLOW: i32 = 1;

/// The return value with which a hook makes the system call fail, with EPERM unless another error was set.
pub(crate) const DENY: i32 = 0;

/// The programs' licence. The kernel offers most helpers only to GPL-compatible programs.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// 1 if socket hooks may call `bpf_set_retval` (Linux 6.1 and later). Set by the loader. If it is 0, the
/// verifier removes the call.
#[unsafe(no_mangle)]
static RETVAL_SETTABLE: Global<u8> = Global::new(0);

/// The mark on the daemon's own sockets, which are not translated. Set by the loader. If it is 0, no socket
/// is marked, and the verifier removes the check.
#[unsafe(no_mangle)]
static OWN_MARK: Global<u32> = Global::new(0);

/// 1 if connections to edge nodes are steered. Set by the loader.
#[unsafe(no_mangle)]
static STEERING: Global<u8> = Global::new(0);

/// The offset in `struct sock` of the byte that contains the bit `sk_kern_sock`. The loader sets this and
/// [`KERN_SOCK_BIT`] from the kernel's BTF.
#[unsafe(no_mangle)]
static KERN_SOCK_BYTE: Global<u32> = Global::new(0);
/// The mask for the bit `sk_kern_sock` in the byte at [`KERN_SOCK_BYTE`]. If it is 0, the bit is unknown, and
/// the verifier removes the check.
#[unsafe(no_mangle)]
static KERN_SOCK_BIT: Global<u8> = Global::new(0);

/// The IPv4 steering prefix that the guard protects: its network address and mask, in network byte order. Set
/// by the loader. The default matches no address, because the network address has bits outside the mask.
#[unsafe(no_mangle)]
pub(crate) static GUARD_V4: [Global<u32>; 2] = [Global::new(u32::MAX), Global::new(0)];
/// The IPv6 steering prefix that the guard protects: its network address and mask, four words each, in
/// network byte order. Set by the loader. The default matches no address, as in [`GUARD_V4`].
#[unsafe(no_mangle)]
pub(crate) static GUARD_V6: [Global<u32>; 8] = {
    const NONE: Global<u32> = Global::new(u32::MAX);
    const ALL: Global<u32> = Global::new(0);
    [NONE, NONE, NONE, NONE, ALL, ALL, ALL, ALL]
};

/// The offsets of fields in kernel structures, indexed by the constants in `tunnel_common::kernel_offsets`.
/// Set by the loader. If they are 0, the offsets are unknown, and the verifier removes the reads.
#[unsafe(no_mangle)]
static KERNEL_OFFSETS: [Global<u32>; OFFSET_COUNT] = {
    const UNKNOWN: Global<u32> = Global::new(0);
    [UNKNOWN; OFFSET_COUNT]
};

/// The timeouts of flows in seconds, as in `Timeouts::to_words`. Set by the loader.
#[unsafe(no_mangle)]
static FLOW_TIMEOUTS: [Global<u32>; 7] = {
    const NONE: Global<u32> = Global::new(0);
    [NONE; 7]
};
/// The time for which fragments follow the first one of their packet, in seconds. Set by the loader.
#[unsafe(no_mangle)]
static FRAGMENT_TIMEOUT: Global<u32> = Global::new(0);
/// The number of CPUs that the kernel may use. Set by the loader.
#[unsafe(no_mangle)]
static CPUS: Global<u32> = Global::new(1);
/// 1 if packets to cluster IPs are masqueraded whoever sends them. Set by the loader.
#[unsafe(no_mangle)]
static MASQUERADE_ALL: Global<u8> = Global::new(0);
/// The maximum number of refused packets that are answered each second. Set by the loader.
#[unsafe(no_mangle)]
static REFUSALS_PER_SECOND: Global<u32> = Global::new(0);
/// The ports that may stand for clients: the first one, and their number. Set by the loader.
#[unsafe(no_mangle)]
static MASQUERADE_PORTS: [Global<u32>; 2] = [Global::new(0), Global::new(0)];

/// Returns the timeouts of flows.
#[inline(always)]
pub(crate) fn flow_timeouts() -> Timeouts {
    let [a, b, c, d, e, f, g] = &FLOW_TIMEOUTS;
    Timeouts::from_words([
        a.load(),
        b.load(),
        c.load(),
        d.load(),
        e.load(),
        f.load(),
        g.load(),
    ])
}

/// Returns the time for which fragments follow the first one of their packet, in seconds.
#[inline(always)]
pub(crate) fn fragment_timeout() -> u32 {
    FRAGMENT_TIMEOUT.load()
}

/// Returns the number of CPUs that the kernel may use.
#[inline(always)]
pub(crate) fn cpus() -> u32 {
    CPUS.load()
}

/// Returns true if packets to cluster IPs are masqueraded whoever sends them.
#[inline(always)]
pub(crate) fn masquerades_all() -> bool {
    MASQUERADE_ALL.load() != 0
}

/// Returns the maximum number of refused packets that are answered each second.
#[inline(always)]
pub(crate) fn refusals_per_second() -> u32 {
    REFUSALS_PER_SECOND.load()
}

/// Returns the first of the ports that may stand for clients, and their number.
#[inline(always)]
pub(crate) fn masquerade_ports() -> [u32; 2] {
    let [first, count] = &MASQUERADE_PORTS;
    [first.load(), count.load()]
}

/// Returns the offset of a field in a kernel structure. If the offsets are unknown, they are all 0.
#[inline(always)]
pub(crate) fn kernel_offset<const FIELD: usize>() -> usize {
    const { assert!(FIELD < OFFSET_COUNT, "no such field") };
    KERNEL_OFFSETS[FIELD].load() as usize
}

/// A plain type for which every bit pattern is valid.
pub(crate) trait Plain: Copy {}

impl Plain for u8 {}
impl Plain for u32 {}
impl Plain for usize {}
impl Plain for [u32; 4] {}

/// Reads kernel memory, which may change concurrently. Returns `None` if the address is not mapped.
#[inline(always)]
pub(crate) fn read_kernel<T: Plain>(address: usize) -> Option<T> {
    probe_read(ptr::without_provenance(address))
}

/// Returns the kernel address of the hook's socket as a number. The verifier forbids arithmetic on a pointer
/// to a socket, but not copying the pointer's bytes.
#[inline(always)]
pub(crate) fn address_of_socket(ctx: &SockAddrContext) -> Option<usize> {
    let socket = socket(ctx);
    probe_read((&raw const socket).cast())
}

#[inline(always)]
fn probe_read<T: Plain>(from: *const c_void) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    #[expect(clippy::cast_possible_truncation, reason = "at most 16 bytes")]
    let size = size_of::<T>() as u32;
    // SAFETY: the helper writes `size` bytes to the value, or fails if the address is not mapped.
    let failed = unsafe { bpf_probe_read_kernel(value.as_mut_ptr().cast(), size, from) };
    // SAFETY: the helper wrote the entire value, and every bit pattern is valid.
    (failed == 0).then(|| unsafe { value.assume_init() })
}

/// Returns true if connections to edge nodes are steered.
#[inline(always)]
pub(crate) fn is_steering_enabled() -> bool {
    STEERING.load() != 0
}

/// The context of a socket hook: the socket, and the address that it connects to, sends to or receives from.
pub(crate) trait Sock {
    /// Returns the raw context.
    fn context(&self) -> &SockAddrContext;

    /// Returns the address in the context.
    fn address(&self) -> Address;

    /// Replaces the address and port in the context.
    fn set(&self, address: &Address, port: Port);

    /// Returns the port in the context.
    #[inline(always)]
    fn port(&self) -> Port {
        let word = read_context(self.context(), offset_of!(bpf_sock_addr, user_port));
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the port is in the first two bytes"
        )]
        Port::from_network(word as u16)
    }

    /// Returns the socket's protocol, if the socket hooks translate it.
    #[inline(always)]
    fn protocol(&self) -> Option<Protocol> {
        Protocol::of_socket(read_context(
            self.context(),
            offset_of!(bpf_sock_addr, protocol),
        ))
    }

    /// Returns the frontend key for the address, port and protocol, if the socket hooks translate the
    /// protocol.
    #[inline(always)]
    fn frontend_key(&self) -> Option<FrontendKey> {
        Some(FrontendKey::new(
            self.address(),
            self.port(),
            self.protocol()?,
        ))
    }

    /// Returns true if the socket is bound to a network device.
    #[inline(always)]
    fn is_bound_to_device(&self) -> bool {
        read_sock(self.context(), offset_of!(bpf_sock, bound_dev_if)) != 0
    }

    /// Returns the socket's source address, if bind() or an earlier connect() has set one of the given
    /// family.
    #[inline(always)]
    fn source_address(&self, is_v4: bool) -> Option<Address> {
        let ctx = self.context();
        if is_v4 {
            let word = read_sock(ctx, offset_of!(bpf_sock, src_ip4));
            return (word != 0).then_some(Address::from_v4_word(word));
        }
        let words = read_sock_ip6(ctx, offset_of!(bpf_sock, src_ip6));
        let [a, b, c, d] = words;
        ((a | b | c | d) != 0).then_some(Address::from_words(words))
    }

    /// Returns true if the socket is connected to this address and port.
    #[inline(always)]
    fn is_peer(&self, address: &Address, port: Port) -> bool {
        let ctx = self.context();
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the port is in the first two bytes"
        )]
        let peer_port = read_sock(ctx, offset_of!(bpf_sock, dst_port)) as u16;
        if Port::from_network(peer_port) != port {
            return false;
        }
        // All words are read before the family is checked. Otherwise, LLVM would merge the reads of both
        // branches into one with a variable offset, which the verifier rejects.
        let v4 = read_sock(ctx, offset_of!(bpf_sock, dst_ip4));
        let v6 = read_sock_ip6(ctx, offset_of!(bpf_sock, dst_ip6));
        // An IPv6 socket that was connected to an IPv4 address before still has that address, too.
        let peer = if read_sock(ctx, offset_of!(bpf_sock, family)) == AF_INET {
            Address::from_v4_word(v4)
        } else {
            Address::from_words(v6)
        };
        peer == *address
    }

    /// Returns true if the socket is connected, and its last connect() used this translation.
    #[inline(always)]
    fn is_connected_by(&self, origin: &Origin) -> bool {
        origin.is_of_connect() && self.is_peer(&origin.backend, origin.backend_port)
    }

    /// Returns true if the socket has the mark of the daemon's sockets.
    #[inline(always)]
    fn has_daemon_mark(&self) -> bool {
        is_own_mark(read_sock(self.context(), offset_of!(bpf_sock, mark)))
    }

    /// Returns true if this is a kernel socket, such as an NFS socket or the socket of an MPTCP subflow. No
    /// hook runs when such a socket is closed.
    #[inline(always)]
    fn is_kernel_socket(&self) -> bool {
        let bit = KERN_SOCK_BIT.load();
        if bit == 0 {
            return false;
        }
        let byte = address_of_socket(self.context())
            .and_then(|socket| read_kernel::<u8>(socket + KERN_SOCK_BYTE.load() as usize));
        byte.is_some_and(|byte| byte & bit != 0)
    }

    /// Returns the cookie of the socket's network namespace.
    #[inline(always)]
    fn namespace(&self) -> u64 {
        // SAFETY: the helper takes a context of this program type.
        unsafe { bpf_get_netns_cookie(self.context().as_ptr()) }
    }

    /// Returns the socket's cookie, a number that the kernel never gives to any other socket.
    #[inline(always)]
    fn cookie(&self) -> u64 {
        // SAFETY: the helper takes a context of this program type.
        unsafe { bpf_get_socket_cookie(self.context().as_ptr()) }
    }
}

/// Returns true if a mark is that of the daemon's sockets.
#[inline(always)]
pub(crate) fn is_own_mark(mark: u32) -> bool {
    let own = OWN_MARK.load();
    own != 0 && mark == own
}

/// Returns the socket that a hook runs for.
#[inline(always)]
pub(crate) fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    // SAFETY: the kernel passes a context that is valid while the program runs.
    let context = unsafe { &*ctx.sock_addr };
    // SAFETY: this is the union field that the kernel sets.
    unsafe { context.__bindgen_anon_1.sk }
}

/// Reads a word from the socket.
#[inline(always)]
fn read_sock(ctx: &SockAddrContext, offset: usize) -> u32 {
    let word = socket(ctx)
        .cast_const()
        .cast::<u32>()
        .wrapping_byte_add(offset);
    // SAFETY: `sk` in `bpf_sock_addr` is never null, and the verifier checks the offset.
    unsafe { word.read_volatile() }
}

/// Reads the four words of an IPv6 address from the socket.
#[inline(always)]
fn read_sock_ip6(ctx: &SockAddrContext, offset: usize) -> [u32; 4] {
    [
        read_sock(ctx, offset),
        read_sock(ctx, offset + 4),
        read_sock(ctx, offset + 8),
        read_sock(ctx, offset + 12),
    ]
}

/// Reads a word from the context.
#[inline(always)]
fn read_context(ctx: &SockAddrContext, offset: usize) -> u32 {
    let start = ctx.sock_addr.cast_const().cast::<u32>();
    // SAFETY: the kernel passes a context that is valid while the program runs, and the verifier checks the
    // offset.
    unsafe { start.wrapping_byte_add(offset).read_volatile() }
}

/// Writes a word to the context.
#[inline(always)]
fn write_context(ctx: &SockAddrContext, offset: usize, word: u32) {
    let start = ctx.sock_addr.cast::<u32>();
    // SAFETY: as for `read_context`.
    unsafe { start.wrapping_byte_add(offset).write_volatile(word) };
}

/// The context of a hook for IPv4 addresses.
pub(crate) struct Sock4<'a>(&'a SockAddrContext);

impl<'a> Sock4<'a> {
    #[inline(always)]
    pub(crate) const fn new(ctx: &'a SockAddrContext) -> Self {
        Self(ctx)
    }
}

impl Sock for Sock4<'_> {
    #[inline(always)]
    fn context(&self) -> &SockAddrContext {
        self.0
    }

    #[inline(always)]
    fn address(&self) -> Address {
        Address::from_v4_word(read_context(self.0, offset_of!(bpf_sock_addr, user_ip4)))
    }

    #[inline(always)]
    fn set(&self, address: &Address, port: Port) {
        write_context(
            self.0,
            offset_of!(bpf_sock_addr, user_ip4),
            address.v4_word(),
        );
        write_context(
            self.0,
            offset_of!(bpf_sock_addr, user_port),
            port.to_network().into(),
        );
    }
}

/// The context of a hook for IPv6 addresses, which may be v4-mapped.
pub(crate) struct Sock6<'a>(&'a SockAddrContext);

impl<'a> Sock6<'a> {
    #[inline(always)]
    pub(crate) const fn new(ctx: &'a SockAddrContext) -> Self {
        Self(ctx)
    }
}

/// The offsets, within the context, of the four words of an IPv6 address.
const IP6: [usize; 4] = {
    let first = offset_of!(bpf_sock_addr, user_ip6);
    [first, first + 4, first + 8, first + 12]
};

impl Sock for Sock6<'_> {
    #[inline(always)]
    fn context(&self) -> &SockAddrContext {
        self.0
    }

    #[inline(always)]
    fn address(&self) -> Address {
        let [a, b, c, d] = IP6;
        Address::from_words([
            read_context(self.0, a),
            read_context(self.0, b),
            read_context(self.0, c),
            read_context(self.0, d),
        ])
    }

    #[inline(always)]
    fn set(&self, address: &Address, port: Port) {
        let ([a, b, c, d], [first, second, third, fourth]) = (IP6, address.words());
        write_context(self.0, a, first);
        write_context(self.0, b, second);
        write_context(self.0, c, third);
        write_context(self.0, d, fourth);
        write_context(
            self.0,
            offset_of!(bpf_sock_addr, user_port),
            port.to_network().into(),
        );
    }
}

/// Sets the error with which a denied system call fails. Returns false if this kernel can't set it.
#[inline(always)]
pub(crate) fn set_error(number: i32) -> bool {
    if RETVAL_SETTABLE.load() == 0 {
        return false;
    }
    // SAFETY: the helper takes any error number, and the loader has checked that this kernel has the helper.
    unsafe { bpf_set_retval(-number) };
    true
}

/// Returns the time in nanoseconds, from the monotonic clock.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_ktime_get_ns() }
}

/// Returns a random number.
#[inline(always)]
pub(crate) fn random() -> u32 {
    // SAFETY: the helper has no preconditions.
    unsafe { bpf_get_prandom_u32() }
}
