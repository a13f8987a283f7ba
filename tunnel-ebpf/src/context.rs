//! Safe views of the contexts that the kernel hands to the socket hooks.
//!
//! Every field is read and written with one volatile access of 32 bits: the verifier refuses the
//! 64-bit accesses that LLVM would merge neighbours into.
#![expect(unsafe_code, reason = "the context is a raw pointer of the kernel's")]

use aya_ebpf::{
    EbpfContext as _, Global,
    bindings::{bpf_sock, bpf_sock_addr},
    helpers::generated::{
        bpf_get_prandom_u32, bpf_get_socket_cookie, bpf_ktime_get_ns, bpf_set_retval,
    },
    programs::SockAddrContext,
};
use tunnel_common::{
    addr::{Address, Port, Protocol},
    service::FrontKey,
};

/// The verdict of a hook: the system call goes on.
pub(crate) const ALLOW: i32 = 1;

/// The verdict of a hook: the system call fails, with EPERM unless the error was set.
pub(crate) const DENY: i32 = 0;

/// The licence as the kernel reads it: it lends most helpers to GPL-compatible programs only.
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";

/// Whether `bpf_set_retval` may be called from socket hooks (Linux 6.1 and later). Set by the
/// loader; where it is 0 the verifier never sees the call.
#[unsafe(no_mangle)]
static RETVAL_SETTABLE: Global<u8> = Global::new(0);

/// The socket of a hook and the address it dials, sends to or heard from.
pub(crate) trait Sock {
    /// The context.
    fn context(&self) -> &SockAddrContext;

    /// The address in the context.
    fn address(&self) -> Address;

    /// Replaces address and port in the context.
    fn set(&self, address: &Address, port: Port);

    /// The port in the context.
    #[inline(always)]
    fn port(&self) -> Port {
        let ctx = self.context().sock_addr;
        // SAFETY: the kernel hands a valid context to the program, for as long as it runs.
        let word = unsafe { (&raw const (*ctx).user_port).read_volatile() };
        #[expect(
            clippy::cast_possible_truncation,
            reason = "the port is in the first two bytes"
        )]
        Port::from_network(word as u16)
    }

    /// The protocol of the socket, if it is one that is translated.
    #[inline(always)]
    fn protocol(&self) -> Option<Protocol> {
        let ctx = self.context().sock_addr;
        // SAFETY: the kernel hands a valid context to the program, for as long as it runs.
        Protocol::of_socket(unsafe { (&raw const (*ctx).protocol).read_volatile() })
    }

    /// The front key that the socket dials, if its protocol is translated.
    #[inline(always)]
    fn key(&self) -> Option<FrontKey> {
        Some(FrontKey::new(self.address(), self.port(), self.protocol()?))
    }

    /// Whether the socket is bound to a network device.
    #[inline(always)]
    fn is_bound_to_device(&self) -> bool {
        let sk = socket(self.context());
        // SAFETY: `sk` of `bpf_sock_addr` is never null; the verifier checks the field.
        unsafe { (&raw const (*sk).bound_dev_if).read_volatile() != 0 }
    }

    /// The cookie of the socket: a number that no other socket has or had.
    #[inline(always)]
    fn cookie(&self) -> u64 {
        // SAFETY: the helper takes the context of this program type.
        unsafe { bpf_get_socket_cookie(self.context().as_ptr()) }
    }
}

/// The socket that a hook runs for.
#[inline(always)]
pub(crate) fn socket(ctx: &SockAddrContext) -> *mut bpf_sock {
    // SAFETY: the kernel hands a valid context to the program, for as long as it runs.
    unsafe { (*ctx.sock_addr).__bindgen_anon_1.sk }
}

/// A view for the hooks that carry an IPv4 address.
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
        let ctx: *const bpf_sock_addr = self.0.sock_addr;
        // SAFETY: the kernel hands a valid context to the program, for as long as it runs.
        Address::from_v4_word(unsafe { (&raw const (*ctx).user_ip4).read_volatile() })
    }

    #[inline(always)]
    fn set(&self, address: &Address, port: Port) {
        let ctx = self.0.sock_addr;
        // SAFETY: the kernel hands a valid context to the program, for as long as it runs.
        unsafe { (&raw mut (*ctx).user_ip4).write_volatile(address.v4_word()) };
        // SAFETY: as above.
        unsafe { (&raw mut (*ctx).user_port).write_volatile(u32::from(port.to_network())) };
    }
}

/// A view for the hooks that carry an IPv6 address, v4-mapped ones among them.
pub(crate) struct Sock6<'a>(&'a SockAddrContext);

impl<'a> Sock6<'a> {
    #[inline(always)]
    pub(crate) const fn new(ctx: &'a SockAddrContext) -> Self {
        Self(ctx)
    }
}

impl Sock for Sock6<'_> {
    #[inline(always)]
    fn context(&self) -> &SockAddrContext {
        self.0
    }

    #[inline(always)]
    fn address(&self) -> Address {
        let ip = {
            let ctx: *const bpf_sock_addr = self.0.sock_addr;
            // SAFETY: the kernel hands a valid context to the program, for as long as it runs.
            unsafe { (&raw const (*ctx).user_ip6).cast::<u32>() }
        };
        // SAFETY: the address has four words.
        let a = unsafe { ip.read_volatile() };
        // SAFETY: as above.
        let b = unsafe { ip.add(1).read_volatile() };
        // SAFETY: as above.
        let c = unsafe { ip.add(2).read_volatile() };
        // SAFETY: as above.
        let d = unsafe { ip.add(3).read_volatile() };
        Address::from_words([a, b, c, d])
    }

    #[inline(always)]
    fn set(&self, address: &Address, port: Port) {
        let [a, b, c, d] = address.words();
        let ctx = self.0.sock_addr;
        // SAFETY: the kernel hands a valid context to the program, for as long as it runs.
        let ip = unsafe { (&raw mut (*ctx).user_ip6).cast::<u32>() };
        // SAFETY: the address has four words.
        unsafe { ip.write_volatile(a) };
        // SAFETY: as above.
        unsafe { ip.add(1).write_volatile(b) };
        // SAFETY: as above.
        unsafe { ip.add(2).write_volatile(c) };
        // SAFETY: as above.
        unsafe { ip.add(3).write_volatile(d) };
        // SAFETY: as for `ctx`.
        unsafe { (&raw mut (*ctx).user_port).write_volatile(u32::from(port.to_network())) };
    }
}

/// Makes the system call fail with an error number once the hook denies it. Says whether this
/// kernel can.
#[inline(always)]
pub(crate) fn set_error(number: i32) -> bool {
    if RETVAL_SETTABLE.load() == 0 {
        return false;
    }
    // SAFETY: the helper takes any error number; the loader found that the kernel has it.
    unsafe { bpf_set_retval(-number) };
    true
}

/// Nanoseconds of the monotonic clock.
#[inline(always)]
pub(crate) fn now() -> u64 {
    // SAFETY: the helper has no precondition.
    unsafe { bpf_ktime_get_ns() }
}

/// A random number.
#[inline(always)]
pub(crate) fn random() -> u32 {
    // SAFETY: the helper has no precondition.
    unsafe { bpf_get_prandom_u32() }
}
