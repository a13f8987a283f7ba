//! Who asks for a backend: the address that a socket has, or will have.
#![expect(unsafe_code, reason = "some functions have names of their own")]

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

/// How many devices of a namespace are looked at. Fallback devices of tunnels, up to nine, may come
/// before that of a pod.
const DEVICES: u32 = 16;

/// How many addresses of a device are looked at.
const ADDRESSES: u32 = 8;

/// Where an entry of a list of the kernel's (`struct list_head`) has the one before it, in bytes.
const PREVIOUS: usize = size_of::<usize>();

/// The socket that a hook runs for, as it asks for a backend.
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

/// The client that a socket is, as it dials an address of that family: the address that it has, or else
/// the first of that family that its network namespace has, or else the namespace.
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
    // The loader tells all places or none.
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

/// Where the first IPv4 address is that the network namespace of a socket has, and that is not for a
/// link only; 0 if there is none. A function with a name of its own is verified once, and not again
/// with everything that comes after each of its ends.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v4(socket: usize) -> usize {
    first(socket, |device| first_v4_of(device)).unwrap_or(0)
}

/// As [`first_v4`], of IPv6.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v6(socket: usize) -> usize {
    first(socket, |device| first_v6_of(device)).unwrap_or(0)
}

/// What is found first on the devices that are up and no loopback.
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

/// Where the first IPv4 address of a device is that is not for its link only; 0 if it has none. With a
/// name of its own, as [`first_v4`].
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v4_of(device: usize) -> usize {
    v4_of(device).unwrap_or(0)
}

/// As [`first_v4_of`], of IPv6.
#[inline(never)]
#[unsafe(no_mangle)]
extern "C" fn first_v6_of(device: usize) -> usize {
    // An address that is being removed leads nowhere any more. It is in no list by then.
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

/// The list begins with the newest address of the widest scope (`ipv6_link_dev_addr` in the kernel's
/// `net/ipv6/addrconf.c`), so it is followed from its end: what is for the link only, and then the
/// address that the device has had for longest.
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
