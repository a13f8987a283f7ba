//! Finds a socket's client address: the address that the socket is bound to, or the one that it will get.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use tunnel_common::{
    addr::Address,
    affinity::Client,
    decide::{ClientContext, ClientScalars},
    kernel_offsets::{
        DEVICE_FLAGS, DEVICE_LIST, DEVICE_V4, DEVICE_V6, IFF_LOOPBACK, IFF_UP, NET_DEVICES,
        RT_SCOPE_LINK, SOCK_NET, V4_ADDRESS, V4_FIRST, V4_NEXT, V4_SCOPE, V6_ADDRESS, V6_ADDRESSES,
        V6_LIST,
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

/// The byte offset of `prev` in `struct list_head`.
const PREVIOUS: usize = size_of::<usize>();

/// The socket that a hook runs for, and for which a backend is chosen.
pub(crate) struct HookSocket<'a, S>(pub(crate) &'a S);

impl<S: Sock> ClientContext for HookSocket<'_, S> {
    #[inline(always)]
    fn client(&self, is_v4: bool) -> ClientScalars {
        client_of(self.0, is_v4)
    }

    #[inline(always)]
    fn has_source_address(&self, is_v4: bool) -> bool {
        self.0.source_address(is_v4).is_some()
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

/// Returns a socket's client: the socket's own address of the given family, or else the first address of that
/// family in its network namespace, or else the namespace itself.
#[inline(always)]
fn client_of<S: Sock>(sock: &S, is_v4: bool) -> ClientScalars {
    let address = sock
        .source_address(is_v4)
        .or_else(|| namespace_address(sock, is_v4));
    match address {
        Some(address) => ClientScalars::new(&Client::of_address(address)),
        None => ClientScalars::new(&Client::of_namespace(sock.namespace())),
    }
}

#[inline(always)]
fn namespace_address<S: Sock>(sock: &S, is_v4: bool) -> Option<Address> {
    // The loader sets all of the offsets or none of them.
    if kernel_offset::<SOCK_NET>() == 0 {
        return None;
    }
    let socket = context::address_of_socket(sock.context())?;
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

/// Returns a pointer to the first IPv4 address in a socket's network namespace that is valid beyond its link,
/// or 0 if there is none.
///
/// This is a global function because the verifier checks a global function only once. If it were inlined, the
/// verifier would check the rest of the program again for each of the function's exits.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v4(socket: usize) -> usize {
    find_address(socket, |device| device_v4(device)).unwrap_or(0)
}

/// Returns a pointer to the first IPv6 address in a socket's network namespace that is not link-local, or 0
/// if there is none. A global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v6(socket: usize) -> usize {
    find_address(socket, |device| device_v6(device)).unwrap_or(0)
}

/// Calls `find` for each device that is up and not a loopback device, and returns the first result that is
/// not 0.
#[inline(always)]
fn find_address(socket: usize, find: impl Fn(usize) -> usize) -> Option<usize> {
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
        if flags & (IFF_UP | IFF_LOOPBACK) == IFF_UP {
            let found = find(device);
            if found != 0 {
                return Some(found);
            }
        }
        next = read_kernel(next)?;
    }
    None
}

/// Returns a pointer to a device's first IPv4 address that is valid beyond its link, or 0 if there is none. A
/// global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn device_v4(device: usize) -> usize {
    find_device_v4(device).unwrap_or(0)
}

/// Returns a pointer to a device's oldest IPv6 address that is not link-local, or 0 if there is none. A
/// global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn device_v6(device: usize) -> usize {
    // If an address is removed during the walk, its link leads nowhere, and the walk fails. A second walk no
    // longer encounters that address.
    find_device_v6(device)
        .or_else(|| find_device_v6(device))
        .unwrap_or(0)
}

#[inline(always)]
fn find_device_v4(device: usize) -> Option<usize> {
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
        if read_kernel::<u8>(next + kernel_offset::<V4_SCOPE>())? < RT_SCOPE_LINK {
            return Some(next + kernel_offset::<V4_ADDRESS>());
        }
        next = read_kernel(next + kernel_offset::<V4_NEXT>())?;
    }
    None
}

/// Returns a pointer to a device's oldest IPv6 address that is not link-local. The list begins with the
/// newest address of the widest scope (`ipv6_link_dev_addr` in the kernel's `net/ipv6/addrconf.c`), so it is
/// read backwards.
#[inline(always)]
fn find_device_v6(device: usize) -> Option<usize> {
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
        if !Address::from_words(read_kernel(address)?).is_link_local() {
            return Some(address);
        }
        previous = read_kernel(previous + PREVIOUS)?;
    }
    None
}
