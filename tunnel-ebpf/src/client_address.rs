//! Finds a socket's client address: the address that the socket is bound to, or the one that it will get.
//!
//! A process can bind a socket to any loopback address and, with IP_FREEBIND, to addresses that its network
//! namespace does not have. Such addresses do not identify a client. In a user namespace of its own, a process can
//! give any number of addresses to any number of network namespaces. Session affinity therefore identifies them by
//! the user namespace.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use tunnel_common::{
    addr::Address,
    affinity::Client,
    decide::{ClientContext, ClientScalars, Identity},
    kernel_offsets::{
        DEVICE_FLAGS, DEVICE_LIST, DEVICE_V4, DEVICE_V6, IFF_LOOPBACK, IFF_UP, MAX_OWNER_LEVEL,
        NET_DEVICES, NET_OWNER, OWNER_LEVEL, OWNER_PARENT, OWNER_USER, RT_SCOPE_LINK, SOCK_NET,
        V4_ADDRESS, V4_FIRST, V4_NEXT, V4_SCOPE, V6_ADDRESS, V6_ADDRESSES, V6_LIST,
    },
};

use crate::{
    context::{self, Sock, kernel_offset, read_kernel},
    steering,
};

/// The maximum number of devices to scan in a network namespace. A pod's device may come after up to nine
/// fallback devices for IP tunnels.
const DEVICES: u32 = 16;

/// The maximum number of addresses to scan on each device.
const ADDRESSES: u32 = 8;

/// The owner of a network namespace: the initial user namespace.
const INITIAL: u64 = u64::MAX;

/// The owner of a network namespace: a user namespace whose outermost one was not created by root.
const ROOTLESS: u64 = 0;

/// The byte offset of `prev` in `struct list_head`.
const PREVIOUS: usize = size_of::<usize>();

/// The socket that a hook runs for, and for which a backend is chosen.
pub(crate) struct HookSocket<'a, S>(pub(crate) &'a S);

impl<S: Sock> ClientContext for HookSocket<'_, S> {
    #[inline(always)]
    fn client(&self, is_v4: bool) -> Identity {
        client_of(self.0, is_v4)
    }

    #[inline(always)]
    fn affinity_client(&self, client: ClientScalars) -> ClientScalars {
        let Self(sock) = self;
        let owner = namespace_of(*sock).map_or(INITIAL, |socket| owner_of_namespace(socket));
        match owner {
            INITIAL => client,
            namespace => ClientScalars::new(&Client::of_user_namespace(namespace)),
        }
    }

    #[inline(always)]
    fn is_bound_to_loopback(&self, is_v4: bool) -> bool {
        self.0
            .source_address(is_v4)
            .is_some_and(Address::is_loopback)
    }

    #[inline(always)]
    fn is_known_host(&self) -> bool {
        steering::is_known_host(self.0)
    }
}

/// Returns a socket's client: the source address that is set, if the socket's network namespace has it, or else
/// the first address of the given family in this namespace, or else the namespace itself.
#[inline(always)]
fn client_of<S: Sock>(sock: &S, is_v4: bool) -> Identity {
    let socket = namespace_of(sock);
    let source = socket.and_then(|socket| own_source_address(sock, socket, is_v4));
    let address = source.or_else(|| first_address(socket?, is_v4));
    let client = match address {
        Some(address) => Client::of_address(address),
        None => Client::of_namespace(sock.namespace()),
    };
    Identity {
        client: ClientScalars::new(&client),
        is_by_source: source.is_some(),
    }
}

/// Returns the kernel address of a socket, if the programs can read the addresses in its network namespace.
#[inline(always)]
fn namespace_of<S: Sock>(sock: &S) -> Option<usize> {
    // The loader sets all of the offsets or none of them.
    if kernel_offset::<SOCK_NET>() == 0 {
        return None;
    }
    context::address_of_socket(sock.context())
}

/// Returns the owner of a socket's network namespace: [`INITIAL`], [`ROOTLESS`], or the kernel address of a user
/// namespace that root created, as container runtimes do. A global function, for the same reason as [`first_v4`].
///
/// If user namespaces are nested, this is the outermost one, because a process can create any number of others in
/// it. All namespaces that users without privileges create count as one: such a user may be mapped to thousands of
/// others, and each of these can create an outermost one.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn owner_of_namespace(socket: usize) -> u64 {
    let find = || {
        let net: usize = read_kernel(socket + kernel_offset::<SOCK_NET>())?;
        let mut owner: usize = read_kernel(net + kernel_offset::<NET_OWNER>())?;
        let level: u32 = read_kernel(owner + kernel_offset::<OWNER_LEVEL>())?;
        if level == 0 {
            return Some(INITIAL);
        }
        // MAX_OWNER_LEVEL bounds the loop, as the verifier requires.
        for outer in 1..MAX_OWNER_LEVEL {
            if outer >= level {
                break;
            }
            owner = read_kernel(owner + kernel_offset::<OWNER_PARENT>())?;
        }
        let user: u32 = read_kernel(owner + kernel_offset::<OWNER_USER>())?;
        #[expect(clippy::as_conversions, reason = "an address as a number")]
        Some(if user == 0 { owner as u64 } else { ROOTLESS })
    };
    find().unwrap_or(ROOTLESS)
}

/// Returns a socket's source address, if it is set and the socket's network namespace has it.
#[inline(always)]
fn own_source_address<S: Sock>(sock: &S, socket: usize, is_v4: bool) -> Option<Address> {
    let source = sock.source_address(is_v4)?;
    if source.is_loopback() {
        return None;
    }
    let has = if is_v4 {
        has_v4(socket, source.v4_word())
    } else {
        let [upper, lower] = source.halves();
        has_v6(socket, upper, lower)
    };
    (has != 0).then_some(source)
}

#[inline(always)]
fn first_address(socket: usize, is_v4: bool) -> Option<Address> {
    let found = if is_v4 {
        first_v4(socket)
    } else {
        first_v6(socket)
    };
    if found == 0 {
        None
    } else if is_v4 {
        read_kernel(found).map(Address::from_v4_word)
    } else {
        read_kernel(found).map(Address::from_words)
    }
}

/// Returns 1 if a socket's network namespace has an IPv4 address. A global function, for the same reason as
/// [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn has_v4(socket: usize, word: u32) -> u32 {
    find_address(socket, 0, |device| device_has_v4(device, word))
        .is_some()
        .into()
}

/// Returns 1 if a socket's network namespace has an IPv6 address. A global function, for the same reason as
/// [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn has_v6(socket: usize, upper: u64, lower: u64) -> u32 {
    find_address(socket, 0, |device| device_has_v6(device, upper, lower))
        .is_some()
        .into()
}

/// Returns a pointer to the first IPv4 address in a socket's network namespace that is valid beyond its link,
/// or 0 if there is none.
///
/// This is a global function because the verifier checks a global function only once. If it were inlined, the
/// verifier would check the rest of the program again for each of the function's exits.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v4(socket: usize) -> usize {
    find_address(socket, IFF_LOOPBACK, |device| device_v4(device)).unwrap_or(0)
}

/// Returns a pointer to the first IPv6 address in a socket's network namespace that is not link-local, or 0
/// if there is none. A global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v6(socket: usize) -> usize {
    find_address(socket, IFF_LOOPBACK, |device| device_v6(device)).unwrap_or(0)
}

/// Calls `find` for each device that is up and has none of the `excluded` flags, and returns the first result
/// that is not 0.
#[inline(always)]
fn find_address(socket: usize, excluded: u32, find: impl Fn(usize) -> usize) -> Option<usize> {
    let net: usize = read_kernel(socket + kernel_offset::<SOCK_NET>())?;
    let devices = net + kernel_offset::<NET_DEVICES>();
    let mut next: usize = read_kernel(devices)?;
    // DEVICES bounds the loop, as the verifier requires.
    for _ in 0..DEVICES {
        if next == devices {
            return None;
        }
        let device = next - kernel_offset::<DEVICE_LIST>();
        let flags: u32 = read_kernel(device + kernel_offset::<DEVICE_FLAGS>())?;
        if flags & (IFF_UP | excluded) == IFF_UP {
            let found = find(device);
            if found != 0 {
                return Some(found);
            }
        }
        next = read_kernel(next)?;
    }
    None
}

/// Returns 1 if a device has an IPv4 address. A global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn device_has_v4(device: usize, word: u32) -> usize {
    let found = find_device_v4(device, |address| {
        Some(read_kernel::<u32>(address + kernel_offset::<V4_ADDRESS>())? == word)
    });
    found.is_some().into()
}

/// Returns 1 if a device has an IPv6 address. A global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn device_has_v6(device: usize, upper: u64, lower: u64) -> usize {
    let wanted = Address::from_halves([upper, lower]);
    let find = || find_device_v6(device, |address| address == wanted);
    // A second walk, for the same reason as in `device_v6`.
    find().or_else(find).is_some().into()
}

/// Returns a pointer to a device's first IPv4 address that is valid beyond its link, or 0 if there is none. A
/// global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn device_v4(device: usize) -> usize {
    let found = find_device_v4(device, |address| {
        Some(read_kernel::<u8>(address + kernel_offset::<V4_SCOPE>())? < RT_SCOPE_LINK)
    });
    found.unwrap_or(0)
}

/// Returns a pointer to a device's oldest IPv6 address that is not link-local, or 0 if there is none. A
/// global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn device_v6(device: usize) -> usize {
    // If an address is removed during the walk, its link leads nowhere, and the walk fails. A second walk no
    // longer encounters that address.
    let find = || find_device_v6(device, |address| !address.is_link_local());
    find().or_else(find).unwrap_or(0)
}

/// Returns a pointer to a device's first IPv4 address for which `is_wanted`, called with a pointer to the
/// `struct in_ifaddr`, returns true.
#[inline(always)]
fn find_device_v4(device: usize, is_wanted: impl Fn(usize) -> Option<bool>) -> Option<usize> {
    let state: usize = read_kernel(device + kernel_offset::<DEVICE_V4>())?;
    if state == 0 {
        return None;
    }
    let mut next: usize = read_kernel(state + kernel_offset::<V4_FIRST>())?;
    // ADDRESSES bounds the loop, as the verifier requires.
    for _ in 0..ADDRESSES {
        if next == 0 {
            return None;
        }
        if is_wanted(next)? {
            return Some(next + kernel_offset::<V4_ADDRESS>());
        }
        next = read_kernel(next + kernel_offset::<V4_NEXT>())?;
    }
    None
}

/// Returns a pointer to a device's oldest IPv6 address for which `is_wanted` returns true. The list begins with
/// the newest address of the widest scope (`ipv6_link_dev_addr` in the kernel's `net/ipv6/addrconf.c`), so it is
/// read backwards.
#[inline(always)]
fn find_device_v6(device: usize, is_wanted: impl Fn(Address) -> bool) -> Option<usize> {
    let state: usize = read_kernel(device + kernel_offset::<DEVICE_V6>())?;
    if state == 0 {
        return None;
    }
    let list = state + kernel_offset::<V6_ADDRESSES>();
    let mut previous: usize = read_kernel(list + PREVIOUS)?;
    // ADDRESSES bounds the loop, as the verifier requires.
    for _ in 0..ADDRESSES {
        if previous == list {
            return None;
        }
        let address = previous - kernel_offset::<V6_LIST>() + kernel_offset::<V6_ADDRESS>();
        if is_wanted(Address::from_words(read_kernel(address)?)) {
            return Some(address);
        }
        previous = read_kernel(previous + PREVIOUS)?;
    }
    None
}
