//! The offsets of fields in the kernel's structures that the programs read to find the address that a
//! socket will get: the network namespace of the socket, its devices, their addresses.
//!
//! The daemon reads the offsets from the kernel's BTF and passes them to the programs at load time:
//! bytes from the start of each structure, in an array indexed by the constants of this module.

/// `sock.__sk_common.skc_net`: the network namespace of a socket.
pub const SOCK_NET: usize = 0;
/// `net.dev_base_head`: the list of the devices of a namespace.
pub const NET_DEVICES: usize = 1;
/// `net_device.dev_list`: a device in that list.
pub const DEVICE_LIST: usize = 2;
/// `net_device.flags`: [`IFF_UP`] and others.
pub const DEVICE_FLAGS: usize = 3;
/// `net_device.ip_ptr`: the IPv4 state of a device.
pub const DEVICE_V4: usize = 4;
/// `net_device.ip6_ptr`: the IPv6 state of a device.
pub const DEVICE_V6: usize = 5;
/// `in_device.ifa_list`: the first IPv4 address of a device.
pub const V4_FIRST: usize = 6;
/// `in_ifaddr.ifa_next`: the next IPv4 address.
pub const V4_NEXT: usize = 7;
/// `in_ifaddr.ifa_local`: the address.
pub const V4_ADDRESS: usize = 8;
/// `in_ifaddr.ifa_scope`: the scope of the address.
pub const V4_SCOPE: usize = 9;
/// `inet6_dev.addr_list`: the list of IPv6 addresses.
pub const V6_ADDRESSES: usize = 10;
/// `inet6_ifaddr.if_list`: an address in that list.
pub const V6_LIST: usize = 11;
/// `inet6_ifaddr.addr`: the address.
pub const V6_ADDRESS: usize = 12;

/// The number of offsets.
pub const PLACES: usize = 13;

/// A device that is up (`include/uapi/linux/if.h`).
pub const IFF_UP: u32 = 1;
/// A loopback device.
pub const IFF_LOOPBACK: u32 = 8;
/// The scope of an IPv4 address that is valid on its link only; narrower scopes have greater numbers
/// (`include/uapi/linux/rtnetlink.h`).
pub const RT_SCOPE_LINK: u8 = 253;
