//! The fields of kernel structures that programs follow to predict a socket's source address: from the socket
//! to its network namespace, then to the devices in that namespace, and then to their addresses. The
//! last fields lead to the owner of the network namespace.
//!
//! The daemon reads the byte offsets of these fields from the kernel's BTF, and passes them to the programs
//! as an array at load time. The constants in this module are indices into that array.

/// `sock.__sk_common.skc_net`: the socket's network namespace.
pub const SOCK_NET: usize = 0;
/// `net.dev_base_head`: the list of devices in the namespace.
pub const NET_DEVICES: usize = 1;
/// `net_device.dev_list`: the device's link in that list.
pub const DEVICE_LIST: usize = 2;
/// `net_device.flags`: the device's flags, such as [`IFF_UP`].
pub const DEVICE_FLAGS: usize = 3;
/// `net_device.ip_ptr`: the device's IPv4 state.
pub const DEVICE_V4: usize = 4;
/// `net_device.ip6_ptr`: the device's IPv6 state.
pub const DEVICE_V6: usize = 5;
/// `in_device.ifa_list`: the device's first IPv4 address.
pub const V4_FIRST: usize = 6;
/// `in_ifaddr.ifa_next`: the next IPv4 address.
pub const V4_NEXT: usize = 7;
/// `in_ifaddr.ifa_local`: the IPv4 address itself.
pub const V4_ADDRESS: usize = 8;
/// `in_ifaddr.ifa_scope`: the scope of the IPv4 address.
pub const V4_SCOPE: usize = 9;
/// `inet6_dev.addr_list`: the device's list of IPv6 addresses.
pub const V6_ADDRESSES: usize = 10;
/// `inet6_ifaddr.if_list`: the address's link in that list.
pub const V6_LIST: usize = 11;
/// `inet6_ifaddr.addr`: the IPv6 address itself.
pub const V6_ADDRESS: usize = 12;
/// `net.user_ns`: the user namespace that owns the network namespace.
pub const NET_OWNER: usize = 13;
/// `user_namespace.level`: how many user namespaces the user namespace is nested in. The initial one has level 0.
pub const OWNER_LEVEL: usize = 14;
/// `user_namespace.parent`: the user namespace in which the user namespace was created.
pub const OWNER_PARENT: usize = 15;
/// `user_namespace.owner`: the user who created the user namespace.
pub const OWNER_USER: usize = 16;

/// The number of offsets above.
pub const OFFSET_COUNT: usize = 17;

/// The maximum level of a user namespace (`create_user_ns` in the kernel's `kernel/user_namespace.c`).
pub const MAX_OWNER_LEVEL: u32 = 33;

/// Device flag: the device is up (`include/uapi/linux/if.h`).
pub const IFF_UP: u32 = 1;
/// Device flag: the device is a loopback device.
pub const IFF_LOOPBACK: u32 = 8;
/// The scope of an IPv4 address that is valid only on its link. Narrower scopes have greater numbers
/// (`include/uapi/linux/rtnetlink.h`).
pub const RT_SCOPE_LINK: u8 = 253;
