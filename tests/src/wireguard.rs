//! Connects network namespaces by WireGuard. See `include/uapi/linux/wireguard.h` in the kernel source.

use std::{ffi::CStr, net::Ipv4Addr};

use anyhow::Result;
use aws_lc_rs::{
    agreement::{PrivateKey, X25519},
    rand,
};
use nix::libc;
use rtnetlink::packet_core::DefaultNla;

use crate::{
    generic_netlink::{Connection, attribute, nested},
    sandbox::Sandbox,
};

const FAMILY: &CStr = c"wireguard";
const SET_DEVICE: u8 = 1;

/// The attributes of a device (`WGDEVICE_A_…`).
const LINK_NAME: u16 = 2;
const PRIVATE_KEY: u16 = 3;
const LISTEN_PORT: u16 = 6;
const PEERS: u16 = 8;
/// The attributes of a peer (`WGPEER_A_…`).
const PUBLIC_KEY: u16 = 1;
const ENDPOINT: u16 = 4;
const ALLOWED_IPS: u16 = 9;
/// The attributes of a range of addresses (`WGALLOWEDIP_A_…`).
const RANGE_FAMILY: u16 = 1;
const RANGE_ADDRESS: u16 = 2;
const RANGE_LENGTH: u16 = 3;

/// The port of both ends.
const PORT: u16 = 51_820;

/// An end of the link, in a sandbox, and its address for the packets that carry the link's.
pub type End<'a> = (&'a Sandbox, Ipv4Addr);

/// Makes the WireGuard links with a name at both ends send all packets to each other.
pub fn connect(link: &str, [near, far]: [End<'_>; 2]) -> Result<()> {
    let keys = [private_key()?, private_key()?];
    configure(link, near.0, &keys[0], (&keys[1], far.1))?;
    configure(link, far.0, &keys[1], (&keys[0], near.1))
}

fn private_key() -> Result<[u8; 32]> {
    let mut key = [0; 32];
    rand::fill(&mut key)?;
    Ok(key)
}

fn configure(
    link: &str,
    sandbox: &Sandbox,
    key: &[u8; 32],
    (peer_key, peer): (&[u8; 32], Ipv4Addr),
) -> Result<()> {
    let public = PrivateKey::from_private_key(&X25519, peer_key)?.compute_public_key()?;
    // The elements of a list have no kinds.
    let peer = nested(
        0,
        &[
            attribute(PUBLIC_KEY, public.as_ref()),
            attribute(ENDPOINT, &endpoint(peer)),
            nested(
                ALLOWED_IPS,
                &[everything(libc::AF_INET, 4), everything(libc::AF_INET6, 16)],
            ),
        ],
    );
    let name = [link.as_bytes(), &[0]].concat();
    let attributes = [
        attribute(LINK_NAME, &name),
        attribute(PRIVATE_KEY, key),
        attribute(LISTEN_PORT, &PORT.to_ne_bytes()),
        nested(PEERS, &[peer]),
    ];
    Connection::open(sandbox, FAMILY)?.send(SET_DEVICE, &attributes)
}

/// Returns the range that contains all addresses of a family, which are `length` bytes long.
fn everything(family: i32, length: usize) -> DefaultNla {
    nested(
        0,
        &[
            attribute(RANGE_FAMILY, &short(family)),
            attribute(RANGE_ADDRESS, &[0; 16][..length]),
            attribute(RANGE_LENGTH, &[0]),
        ],
    )
}

/// Encodes the endpoint of a peer as `struct sockaddr_in`.
fn endpoint(address: Ipv4Addr) -> Vec<u8> {
    let parts: [&[u8]; 4] = [
        &short(libc::AF_INET),
        &PORT.to_be_bytes(),
        &address.octets(),
        &[0; 8],
    ];
    parts.concat()
}

/// Encodes an address family.
fn short(family: i32) -> [u8; 2] {
    u16::try_from(family).unwrap_or_default().to_ne_bytes()
}
