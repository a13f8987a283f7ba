//! The fields of kernel structures that programs follow to predict the source address of a socket: from
//! the socket to its network namespace, to the devices of that namespace, and to their addresses.
//!
//! The daemon reads the offsets of these fields, in bytes, from the kernel's BTF, and passes them to the
//! programs at load time as an array. The constants of this module are the indices into that array.

/// `sock.__sk_common.skc_net`: the network namespace of a socket.
pub const SOCK_NET: usize = 0;
/// `net.dev_base_head`: the list of devices of a namespace.
pub const NET_DEVICES: usize = 1;
/// `net_device.dev_list`: the link of a device in that list.
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
/// `inet6_ifaddr.if_list`: the link of an address in that list.
pub const V6_LIST: usize = 11;
/// `inet6_ifaddr.addr`: the address.
pub const V6_ADDRESS: usize = 12;

/// The number of offsets.
pub const OFFSET_COUNT: usize = 13;

/// Device flag: the device is up (`include/uapi/linux/if.h`).
pub const IFF_UP: u32 = 1;
/// Device flag: a loopback device.
pub const IFF_LOOPBACK: u32 = 8;
/// The scope of an IPv4 address that is valid on its link only; narrower scopes have greater numbers
/// (`include/uapi/linux/rtnetlink.h`).
pub const RT_SCOPE_LINK: u8 = 253;
