//! Safe views of the contexts that the kernel passes to the socket hooks.
//!
//! Every field is read and written with one volatile access of 32 bits: the verifier rejects the 64-bit
//! accesses into which LLVM would merge neighbours.
#![expect(unsafe_code, reason = "the context is a raw pointer of the kernel's")]

use core::{
    arch::asm,
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
    kernel::PLACES,
    service::FrontKey,
};

/// The verdict of a hook with which the system call continues.
pub(crate) const ALLOW: i32 = 1;

/// The verdict of a hook with which the system call fails, with EPERM unless another error was set.
pub(crate) const DENY: i32 = 0;

/// The licence, which the kernel reads: most helpers are for GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// 1 if socket hooks may call `bpf_set_retval` (Linux 6.1 and later). Set by the loader; with 0 the
/// verifier removes the call.
#[unsafe(no_mangle)]
static RETVAL_SETTABLE: Global<u8> = Global::new(0);

/// The mark of the daemon's own sockets, which are left alone. Set by the loader; with 0 no socket has
/// it, and the verifier removes the check.
#[unsafe(no_mangle)]
static OWN_MARK: Global<u32> = Global::new(0);

/// 1 if connects to edge nodes are steered. Set by the loader.
#[unsafe(no_mangle)]
static STEERING: Global<u8> = Global::new(0);

/// The offset of the byte of `struct sock` that contains the bit `sk_kern_sock`. Set by the loader from
/// the kernel's BTF, with [`KERN_SOCK_BIT`].
#[unsafe(no_mangle)]
static KERN_SOCK_BYTE: Global<u32> = Global::new(0);
/// The mask of `sk_kern_sock` in that byte; with 0 it is unknown, and the verifier removes the check.
#[unsafe(no_mangle)]
static KERN_SOCK_BIT: Global<u8> = Global::new(0);

/// The steering prefixes that the guard protects from outside: the network, then the mask, as words in
/// network byte order. Set by the loader. A network with bits outside its mask, as here, matches no
/// address.
#[unsafe(no_mangle)]
pub(crate) static GUARD_V4: [Global<u32>; 2] = [Global::new(u32::MAX), Global::new(0)];
/// The same for IPv6, with four words each.
#[unsafe(no_mangle)]
pub(crate) static GUARD_V6: [Global<u32>; 8] = {
    const NONE: Global<u32> = Global::new(u32::MAX);
    const ALL: Global<u32> = Global::new(0);
    [NONE, NONE, NONE, NONE, ALL, ALL, ALL, ALL]
};

/// The offsets in the kernel's structures, indexed by the constants of `tunnel_common::kernel`. Set by
/// the loader if they are known; with 0 the verifier removes the reads.
#[unsafe(no_mangle)]
static KERNEL_PLACES: [Global<u32>; PLACES] = {
    const UNKNOWN: Global<u32> = Global::new(0);
    [UNKNOWN; PLACES]
};

/// Returns one of these offsets; 0 for all of them if they are unknown.
#[inline(always)]
pub(crate) fn place<const PLACE: usize>() -> usize {
    const { assert!(PLACE < PLACES, "a place that there is") };
    KERNEL_PLACES[PLACE].load() as usize
}

/// A plain number, for which every bit pattern is valid.
pub(crate) trait Plain: Copy {}

impl Plain for u8 {}
impl Plain for u32 {}
impl Plain for usize {}
impl Plain for [u32; 4] {}

/// Reads the kernel's memory. The content may change concurrently; an unmapped address returns none.
#[inline(always)]
pub(crate) fn peek<T: Plain>(address: usize) -> Option<T> {
    copy(ptr::without_provenance(address))
}

/// Returns the kernel address of the socket of a hook. The verifier allows no arithmetic on a pointer to
/// a socket, but its bytes can be copied.
#[inline(always)]
pub(crate) fn address_of_socket(ctx: &SockAddrContext) -> Option<usize> {
    let socket = socket(ctx);
    copy((&raw const socket).cast())
}

#[inline(always)]
fn copy<T: Plain>(from: *const c_void) -> Option<T> {
    let mut value = MaybeUninit::<T>::uninit();
    #[expect(clippy::cast_possible_truncation, reason = "16 at most")]
    let size = size_of::<T>() as u32;
    // SAFETY: the helper writes the value, and fails where nothing is mapped at the address.
    let failed = unsafe { bpf_probe_read_kernel(value.as_mut_ptr().cast(), size, from) };
    // SAFETY: the helper wrote it, in full, and every bit pattern is a value.
    (failed == 0).then(|| unsafe { value.assume_init() })
}

/// Returns true if connects to edge nodes are steered.
#[inline(always)]
pub(crate) fn is_steering() -> bool {
    STEERING.load() != 0
}

/// The socket of a hook, and the address that it dials, sends to or received from.
pub(crate) trait Sock {
    /// Returns the context.
    fn context(&self) -> &SockAddrContext;

    /// Returns the address in the context.
    fn address(&self) -> Address;

    /// Replaces address and port in the context.
    fn set(&self, address: &Address, port: Port);

    /// Returns the port in the context.
    #[inline(always)]
    fn port(&self) -> Port {
        let word = read(self.context(), offset_of!(bpf_sock_addr, user_port));
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the port is in the first two bytes"
        )]
        Port::from_network(word as u16)
    }

    /// Returns the protocol of the socket, if it is one that is translated.
    #[inline(always)]
    fn protocol(&self) -> Option<Protocol> {
        Protocol::of_socket(read(self.context(), offset_of!(bpf_sock_addr, protocol)))
    }

    /// Returns the frontend key that the socket dials, if its protocol is translated.
    #[inline(always)]
    fn key(&self) -> Option<FrontKey> {
        Some(FrontKey::new(self.address(), self.port(), self.protocol()?))
    }

    /// Returns true if the socket is bound to a network device.
    #[inline(always)]
    fn is_bound_to_device(&self) -> bool {
        field(self.context(), offset_of!(bpf_sock, bound_dev_if)) != 0
    }

    /// Returns the address of a family to which the socket is bound, or which it got at its connect.
    #[inline(always)]
    fn own_address(&self, is_v4: bool) -> Option<Address> {
        let ctx = self.context();
        if is_v4 {
            let word = field(ctx, offset_of!(bpf_sock, src_ip4));
            return (word != 0).then_some(Address::from_v4_word(word));
        }
        let first = offset_of!(bpf_sock, src_ip6);
        let words = [
            field(ctx, first),
            field(ctx, first + 4),
            field(ctx, first + 8),
            field(ctx, first + 12),
        ];
        let [a, b, c, d] = words;
        ((a | b | c | d) != 0).then_some(Address::from_words(words))
    }

    /// Returns true if the socket is one of the daemon's own.
    #[inline(always)]
    fn is_own(&self) -> bool {
        let mark = OWN_MARK.load();
        mark != 0 && field(self.context(), offset_of!(bpf_sock, mark)) == mark
    }

    /// Returns true if the socket is one of the kernel's own (NFS, the inner sockets of MPTCP), whose
    /// close runs no hook.
    #[inline(always)]
    fn is_of_kernel(&self) -> bool {
        let bit = KERN_SOCK_BIT.load();
        if bit == 0 {
            return false;
        }
        let byte = address_of_socket(self.context())
            .and_then(|socket| peek::<u8>(socket + KERN_SOCK_BYTE.load() as usize));
        byte.is_some_and(|byte| byte & bit != 0)
    }

    /// Returns the cookie of the network namespace that the socket is in.
    #[inline(always)]
    fn namespace(&self) -> u64 {
        // SAFETY: the helper takes the context of this program type.
        unsafe { bpf_get_netns_cookie(self.context().as_ptr()) }
    }

    /// Returns the cookie of the socket: a number that no other socket has or has had.
    #[inline(always)]
    fn cookie(&self) -> u64 {
        // SAFETY: the helper takes the context of this program type.
        unsafe { bpf_get_socket_cookie(self.context().as_ptr()) }
    }
}

/// Returns the socket of a hook.
#[inline(always)]
pub(crate) fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    // SAFETY: the kernel hands a valid context to the program, for as long as it runs.
    let context = unsafe { &*ctx.sock_addr };
    // SAFETY: the field of the union that the kernel fills.
    unsafe { context.__bindgen_anon_1.sk }
}

/// Reads a word of the socket.
#[inline(always)]
fn field(ctx: &SockAddrContext, offset: usize) -> u32 {
    let place = socket(ctx)
        .cast_const()
        .cast::<u32>()
        .wrapping_byte_add(offset);
    // SAFETY: `sk` of `bpf_sock_addr` is never null, and the verifier checks the field.
    unsafe { place.read_volatile() }
}

/// Reads a word of the context.
#[inline(always)]
fn read(ctx: &SockAddrContext, offset: usize) -> u32 {
    let place = ctx.sock_addr.cast_const().cast::<u32>();
    // SAFETY: the kernel hands a valid context to the program, for as long as it runs, and the
    // verifier checks the offset.
    unsafe { place.wrapping_byte_add(offset).read_volatile() }
}

/// Writes a word of the context.
#[inline(always)]
fn write(ctx: &SockAddrContext, offset: usize, word: u32) {
    let place = ctx.sock_addr.cast::<u32>();
    // SAFETY: as for `read`.
    unsafe { place.wrapping_byte_add(offset).write_volatile(word) };
}

/// A view for the hooks with an IPv4 address.
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
        Address::from_v4_word(read(self.0, offset_of!(bpf_sock_addr, user_ip4)))
    }

    #[inline(always)]
    fn set(&self, address: &Address, port: Port) {
        write(
            self.0,
            offset_of!(bpf_sock_addr, user_ip4),
            address.v4_word(),
        );
        write(
            self.0,
            offset_of!(bpf_sock_addr, user_port),
            port.to_network().into(),
        );
    }
}

/// A view for the hooks with an IPv6 address, which may be v4-mapped.
pub(crate) struct Sock6<'a>(&'a SockAddrContext);

impl<'a> Sock6<'a> {
    #[inline(always)]
    pub(crate) const fn new(ctx: &'a SockAddrContext) -> Self {
        Self(ctx)
    }
}

/// The offsets of the words of an IPv6 address in the context.
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
            read(self.0, a),
            read(self.0, b),
            read(self.0, c),
            read(self.0, d),
        ])
    }

    #[inline(always)]
    fn set(&self, address: &Address, port: Port) {
        let ([a, b, c, d], [first, second, third, fourth]) = (IP6, address.words());
        write(self.0, a, first);
        write(self.0, b, second);
        write(self.0, c, third);
        write(self.0, d, fourth);
        write(
            self.0,
            offset_of!(bpf_sock_addr, user_port),
            port.to_network().into(),
        );
    }
}

/// Sets the error of the system call for a hook that denies it. Returns false if this kernel has no
/// helper for that.
#[inline(always)]
pub(crate) fn set_error(number: i32) -> bool {
    if RETVAL_SETTABLE.load() == 0 {
        return false;
    }
    // SAFETY: the helper takes any error number; the loader found that the kernel has it.
    unsafe { bpf_set_retval(-number) };
    true
}

/// Returns the nanoseconds of the monotonic clock.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper has no precondition.
    unsafe { bpf_ktime_get_ns() }
}

/// Returns a random number.
#[inline(always)]
pub(crate) fn random() -> u32 {
    // SAFETY: the helper has no precondition.
    unsafe { bpf_get_prandom_u32() }
}

/// Returns the number unchanged, in a register. If the compiler keeps it on the stack, and loads it once
/// to compare it and once more to use it, the verifiers of Linux 5.10 and 6.1 lose its bounds.
#[inline(always)]
pub(crate) fn in_register(number: u32) -> usize {
    let mut number = number as usize;
    // SAFETY: no instruction at all.
    unsafe { asm!("/* {0} */", inout(reg) number, options(nomem, nostack, preserves_flags)) };
    number
}
