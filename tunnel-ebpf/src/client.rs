//! Finds the client address of a socket: the address that it is bound to, or will get.
#![expect(unsafe_code, reason = "global functions need `no_mangle`")]

use tunnel_common::{
    addr::Address,
    affinity::Client,
    decide::{Asker, Caller},
    kernel::{
        DEVICE_FLAGS, DEVICE_LIST, DEVICE_V4, DEVICE_V6, IFF_LOOPBACK, IFF_UP, NET_DEVICES,
        RT_SCOPE_LINK, SOCK_NET, V4_ADDRESS, V4_FIRST, V4_NEXT, V4_SCOPE, V6_ADDRESS, V6_ADDRESSES,
        V6_LIST,
    },
};

use crate::{
    context::{self, Sock, peek, place},
    steering,
};

/// The maximum number of devices of a network namespace that are scanned. A pod's device may come after up
/// to nine fallback devices of IP tunnels.
const DEVICES: u32 = 16;

/// The maximum number of addresses per device that are scanned.
const ADDRESSES: u32 = 8;

/// The offset of `prev` in `struct list_head`, in bytes.
const PREVIOUS: usize = size_of::<usize>();

/// The socket of a hook, for which a backend is chosen.
pub(crate) struct Asking<'a, S>(pub(crate) &'a S);

impl<S: Sock> Asker for Asking<'_, S> {
    #[inline(always)]
    fn caller(&self, is_v4: bool) -> Caller {
        of(self.0, is_v4)
    }

    #[inline(always)]
    fn is_bound(&self, is_v4: bool) -> bool {
        self.0.own_address(is_v4).is_some()
    }

    #[inline(always)]
    fn is_bound_to_loopback(&self, is_v4: bool) -> bool {
        self.0.own_address(is_v4).is_some_and(Address::is_loopback)
    }

    #[inline(always)]
    fn is_known_host(&self) -> bool {
        steering::is_known_host(self.0)
    }
}

/// Returns the client of a socket: the socket's own address of the given family, else the first address of
/// that family in its network namespace, else the namespace itself.
#[inline(always)]
fn of<S: Sock>(sock: &S, is_v4: bool) -> Caller {
    let address = sock
        .own_address(is_v4)
        .or_else(|| of_namespace(sock, is_v4));
    match address {
        Some(address) => Caller::new(&Client::of_address(address)),
        None => Caller::new(&Client::of_namespace(sock.namespace())),
    }
}

#[inline(always)]
fn of_namespace<S: Sock>(sock: &S, is_v4: bool) -> Option<Address> {
    // The loader sets either all offsets or none.
    if place::<SOCK_NET>() == 0 {
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
        peek(found).map(Address::from_v4_word)
    } else {
        peek(found).map(Address::from_words)
    }
}

/// Returns a pointer to the first IPv4 address in a socket's network namespace whose scope is wider than
/// its link; 0 if there is none.
///
/// A global function, since the verifier checks those only once. After an inlined one, the verifier would
/// check the rest of the program again for each of its exits.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v4(socket: usize) -> usize {
    first(socket, |device| first_v4_of(device)).unwrap_or(0)
}

/// Returns a pointer to the first IPv6 address, as [`first_v4`] does for IPv4.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v6(socket: usize) -> usize {
    first(socket, |device| first_v6_of(device)).unwrap_or(0)
}

/// Returns the first result of `of` that is not 0, over the devices that are up and not loopback.
#[inline(always)]
fn first(socket: usize, of: impl Fn(usize) -> usize) -> Option<usize> {
    let net: usize = peek(socket + place::<SOCK_NET>())?;
    let devices = net + place::<NET_DEVICES>();
    let mut next: usize = peek(devices)?;
    // Bounded by DEVICES for the verifier.
    for _ in 0..DEVICES {
        if next == devices {
            return None;
        }
        let device = next - place::<DEVICE_LIST>();
        let flags: u32 = peek(device + place::<DEVICE_FLAGS>())?;
        if flags & (IFF_UP | IFF_LOOPBACK) == IFF_UP {
            let found = of(device);
            if found != 0 {
                return Some(found);
            }
        }
        next = peek(next)?;
    }
    None
}

/// Returns a pointer to the first IPv4 address of a device whose scope is wider than its link; 0 if there is
/// none. A global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v4_of(device: usize) -> usize {
    v4_of(device).unwrap_or(0)
}

/// Returns a pointer to the oldest IPv6 address of a device that is not link-local; 0 if there is none. A
/// global function, for the same reason as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v6_of(device: usize) -> usize {
    // If an address is removed during the walk, its link leads nowhere and the walk fails. A second walk
    // no longer meets that address.
    v6_of(device).or_else(|| v6_of(device)).unwrap_or(0)
}

#[inline(always)]
fn v4_of(device: usize) -> Option<usize> {
    let known: usize = peek(device + place::<DEVICE_V4>())?;
    if known == 0 {
        return None;
    }
    let mut next: usize = peek(known + place::<V4_FIRST>())?;
    // Bounded by ADDRESSES for the verifier.
    for _ in 0..ADDRESSES {
        if next == 0 {
            return None;
        }
        if peek::<u8>(next + place::<V4_SCOPE>())? < RT_SCOPE_LINK {
            return Some(next + place::<V4_ADDRESS>());
        }
        next = peek(next + place::<V4_NEXT>())?;
    }
    None
}

/// Returns a pointer to the oldest address of a device that is not link-local. The list begins with the
/// newest address of the widest scope (`ipv6_link_dev_addr` in the kernel's `net/ipv6/addrconf.c`), so it
/// is read backwards.
#[inline(always)]
fn v6_of(device: usize) -> Option<usize> {
    let known: usize = peek(device + place::<DEVICE_V6>())?;
    if known == 0 {
        return None;
    }
    let list = known + place::<V6_ADDRESSES>();
    let mut previous: usize = peek(list + PREVIOUS)?;
    // Bounded by ADDRESSES for the verifier.
    for _ in 0..ADDRESSES {
        if previous == list {
            return None;
        }
        let address = previous - place::<V6_LIST>() + place::<V6_ADDRESS>();
        if !Address::from_words(peek(address)?).is_link_local() {
            return Some(address);
        }
        previous = peek(previous + PREVIOUS)?;
    }
    None
}
