//! Who asks for a backend: the address that a socket has, or will have.

use tunnel_common::{
    addr::Address,
    affinity::Client,
    kernel::{
        DEVICE_FLAGS, DEVICE_LIST, DEVICE_V4, DEVICE_V6, IFF_LOOPBACK, IFF_UP, NET_DEVICES,
        RT_SCOPE_LINK, SOCK_NET, V4_ADDRESS, V4_FIRST, V4_NEXT, V4_SCOPE, V6_ADDRESS, V6_ADDRESSES,
        V6_LIST,
    },
};

use crate::context::{self, Sock, peek, place};

/// How many devices of a namespace are looked at. Fallback devices of tunnels, up to nine, may come
/// before that of a pod.
const DEVICES: u32 = 16;

/// How many addresses of a device are looked at.
const ADDRESSES: u32 = 8;

/// The client that a socket is, as it dials an address of that family.
#[inline(always)]
pub(crate) fn of<S: Sock>(sock: &S, is_v4: bool) -> Client {
    match address(sock, is_v4) {
        Some(address) => Client::of_address(address),
        None => Client::of_namespace(sock.namespace()),
    }
}

/// The address that a socket has, or else the first of that family that its network namespace has.
#[inline(always)]
pub(crate) fn address<S: Sock>(sock: &S, is_v4: bool) -> Option<Address> {
    sock.own_address(is_v4)
        .or_else(|| of_namespace(sock, is_v4))
}

#[inline(always)]
fn of_namespace<S: Sock>(sock: &S, is_v4: bool) -> Option<Address> {
    // The loader tells all places or none.
    if place::<SOCK_NET>() == 0 {
        return None;
    }
    let socket = context::address_of_socket(sock.context())?;
    let net: usize = peek(socket + place::<SOCK_NET>())?;
    let words = first(net + place::<NET_DEVICES>(), is_v4)?;
    Some(Address::from_words(words))
}

/// The first address of the devices in a list that are up and no loopback.
#[inline(always)]
fn first(devices: usize, is_v4: bool) -> Option<[u32; 4]> {
    let mut next: usize = peek(devices)?;
    // Bounded by DEVICES for the verifier.
    for _ in 0..DEVICES {
        if next == devices {
            return None;
        }
        let device = next - place::<DEVICE_LIST>();
        let flags: u32 = peek(device + place::<DEVICE_FLAGS>())?;
        if flags & (IFF_UP | IFF_LOOPBACK) == IFF_UP {
            let found = if is_v4 {
                first_v4(device)
            } else {
                first_v6(device)
            };
            if found.is_some() {
                return found;
            }
        }
        next = peek(next)?;
    }
    None
}

/// The first IPv4 address of a device that is not for its link only, in the form that is v4-mapped.
#[inline(always)]
fn first_v4(device: usize) -> Option<[u32; 4]> {
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
            let word = peek(next + place::<V4_ADDRESS>())?;
            return Some(Address::from_v4_word(word).words());
        }
        next = peek(next + place::<V4_NEXT>())?;
    }
    None
}

/// The first IPv6 address of a device that is not for its link only.
#[inline(always)]
fn first_v6(device: usize) -> Option<[u32; 4]> {
    let known: usize = peek(device + place::<DEVICE_V6>())?;
    if known == 0 {
        return None;
    }
    let list = known + place::<V6_ADDRESSES>();
    let mut next: usize = peek(list)?;
    // Bounded by ADDRESSES for the verifier.
    for _ in 0..ADDRESSES {
        if next == list {
            return None;
        }
        let address = next - place::<V6_LIST>() + place::<V6_ADDRESS>();
        let words: [u32; 4] = peek(address)?;
        if !Address::from_words(words).is_link_local() {
            return Some(words);
        }
        next = peek(next)?;
    }
    None
}
