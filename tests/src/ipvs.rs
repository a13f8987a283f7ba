//! Configures IPVS in a network namespace over generic netlink. See `net/netfilter/ipvs` and
//! `include/uapi/linux/ip_vs.h` in the kernel source.

use std::{
    ffi::CStr,
    net::{IpAddr, SocketAddr},
};

use anyhow::{Result, bail};
use nix::libc;
use rtnetlink::packet_core::DefaultNla;

use crate::{
    generic_netlink::{self, Connection, attribute, nested},
    sandbox::Sandbox,
};

const FAMILY: &CStr = c"IPVS";
const NEW_SERVICE: u8 = 1;
const REMOVE_SERVICE: u8 = 3;
const NEW_DESTINATION: u8 = 5;
/// The top-level attributes of a request.
const SERVICE: u16 = 1;
const DESTINATION: u16 = 2;

/// A connection to IPVS in one network namespace.
#[derive(Debug)]
pub struct Ipvs(Connection);

impl Ipvs {
    /// Connects to IPVS in a sandbox's network namespace.
    pub fn open(sandbox: &Sandbox) -> Result<Self> {
        Connection::open(sandbox, FAMILY).map(Self)
    }

    /// Adds a virtual TCP service that forwards its connections to one destination, using NAT.
    pub fn add(&self, service: SocketAddr, destination: SocketAddr) -> Result<()> {
        // For IPv4, the field is a netmask in network byte order; for IPv6, it is a prefix length in host
        // byte order.
        let netmask = match service {
            SocketAddr::V4(_) => [0xff; 4],
            SocketAddr::V6(_) => 128_u32.to_ne_bytes(),
        };
        let mut named = service_id(service);
        named.extend([
            attribute(6, c"rr".to_bytes_with_nul()),
            attribute(7, &[0; 8]),
            attribute(8, &0_u32.to_ne_bytes()),
            attribute(9, &netmask),
        ]);
        self.0.send(NEW_SERVICE, &[nested(SERVICE, &named)])?;
        let destination = [
            attribute(1, &address(destination.ip())),
            attribute(2, &destination.port().to_be_bytes()),
            attribute(3, &0_u32.to_ne_bytes()),
            attribute(4, &1_u32.to_ne_bytes()),
            attribute(5, &0_u32.to_ne_bytes()),
            attribute(6, &0_u32.to_ne_bytes()),
        ];
        let both = [
            nested(SERVICE, &service_id(service)),
            nested(DESTINATION, &destination),
        ];
        self.0.send(NEW_DESTINATION, &both)
    }

    /// Removes a virtual service.
    pub fn remove(&self, service: SocketAddr) -> Result<()> {
        self.0
            .send(REMOVE_SERVICE, &[nested(SERVICE, &service_id(service))])
    }
}

/// Returns true if the kernel supports IPVS, after loading the module if necessary.
pub(crate) fn is_supported() -> Result<bool> {
    generic_netlink::is_known(FAMILY)
}

/// Returns the attributes that identify a virtual service: its address family, protocol, address and port.
fn service_id(service: SocketAddr) -> Vec<DefaultNla> {
    let family = match service {
        SocketAddr::V4(_) => libc::AF_INET,
        SocketAddr::V6(_) => libc::AF_INET6,
    };
    let short = |number: i32| u16::try_from(number).unwrap_or_default().to_ne_bytes();
    vec![
        attribute(1, &short(family)),
        attribute(2, &short(libc::IPPROTO_TCP)),
        attribute(3, &address(service.ip())),
        attribute(4, &service.port().to_be_bytes()),
    ]
}

/// Encodes an address as the kernel's `union nf_inet_addr`.
fn address(of: IpAddr) -> [u8; 16] {
    let mut address = [0; 16];
    match of {
        IpAddr::V4(of) => address[..4].copy_from_slice(&of.octets()),
        IpAddr::V6(of) => address = of.octets(),
    }
    address
}

/// Returns how many connections the IPVS table of a sandbox contains.
pub fn connections(sandbox: &Sandbox) -> Result<usize> {
    let table = sandbox.run(&["cat", "/proc/net/ip_vs_conn"])?;
    let Some((_head, connections)) = table.split_once('\n') else {
        bail!("/proc/net/ip_vs_conn has no header line: {table}");
    };
    Ok(connections.lines().count())
}
