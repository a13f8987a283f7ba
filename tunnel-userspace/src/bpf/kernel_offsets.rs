//! Searches the kernel's BTF for the offsets of the structure fields that the programs read.

use std::fs;

use tunnel_common::kernel_offsets::{
    DEVICE_FLAGS, DEVICE_LIST, DEVICE_V4, DEVICE_V6, NET_DEVICES, NET_OWNER, OFFSET_COUNT,
    OWNER_LEVEL, OWNER_PARENT, OWNER_USER, SOCK_NET, V4_ADDRESS, V4_FIRST, V4_NEXT, V4_SCOPE,
    V6_ADDRESS, V6_ADDRESSES, V6_LIST,
};

use super::btf::{Btf, TypeKind, VMLINUX_BTF};

/// Reads the kernel's BTF, if it is available.
pub(super) fn read_btf() -> Option<Vec<u8>> {
    let btf = fs::read(VMLINUX_BTF).inspect_err(|error| {
        tracing::debug!(%error, path = VMLINUX_BTF, "cannot read the kernel's BTF");
    });
    btf.ok()
}

/// The offset of each field from the start of its structure, in bytes, indexed by the constants in
/// `tunnel_common::kernel_offsets`.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KernelOffsets([u32; OFFSET_COUNT]);

/// The structure and member that each offset belongs to.
const FIELDS: [(usize, &str, &str); OFFSET_COUNT] = [
    // `sock_common` is the first member of `struct sock`, so offsets in it are valid in `struct sock`, too.
    (SOCK_NET, "sock_common", "skc_net"),
    (NET_DEVICES, "net", "dev_base_head"),
    (DEVICE_LIST, "net_device", "dev_list"),
    (DEVICE_FLAGS, "net_device", "flags"),
    (DEVICE_V4, "net_device", "ip_ptr"),
    (DEVICE_V6, "net_device", "ip6_ptr"),
    (V4_FIRST, "in_device", "ifa_list"),
    (V4_NEXT, "in_ifaddr", "ifa_next"),
    (V4_ADDRESS, "in_ifaddr", "ifa_local"),
    (V4_SCOPE, "in_ifaddr", "ifa_scope"),
    (V6_ADDRESSES, "inet6_dev", "addr_list"),
    (V6_LIST, "inet6_ifaddr", "if_list"),
    (V6_ADDRESS, "inet6_ifaddr", "addr"),
    (NET_OWNER, "net", "user_ns"),
    (OWNER_LEVEL, "user_namespace", "level"),
    (OWNER_PARENT, "user_namespace", "parent"),
    (OWNER_USER, "user_namespace", "owner"),
];

impl KernelOffsets {
    /// Finds the offsets in BTF; returns `None` if any of them is missing.
    pub(super) fn find(btf: &Btf<'_>) -> Option<Self> {
        let mut offsets = [0; OFFSET_COUNT];
        for (index, structure, member) in FIELDS {
            let id = btf.find(TypeKind::Struct, structure)?;
            *offsets.get_mut(index)? = btf.member(id, member)?.offset;
        }
        // The programs take a zero at this index to mean that all offsets are unknown.
        offsets
            .get(SOCK_NET)
            .is_some_and(|offset| *offset > 0)
            .then_some(Self(offsets))
    }

    /// Returns the offsets as the value of the programs' constant; all zeros if they are unknown.
    pub(super) fn to_constants(offsets: Option<Self>) -> [u32; OFFSET_COUNT] {
        offsets.map_or([0; OFFSET_COUNT], |Self(offsets)| offsets)
    }
}

/// The position of the bit `sk_kern_sock` in `struct sock`. The bit is set for kernel sockets: connecting one
/// runs the hooks, but closing it doesn't (see `inet_release` in net/ipv4/af_inet.c).
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KernelSocketBit {
    /// The offset of the byte that contains the bit, from the start of the structure.
    pub byte: u32,
    /// The mask for the bit in that byte.
    pub bit: u8,
}

impl KernelSocketBit {
    /// Finds the bit in BTF.
    pub(super) fn find(btf: &Btf<'_>) -> Option<Self> {
        let member = btf.member(btf.find(TypeKind::Struct, "sock")?, "sk_kern_sock")?;
        let bit = if cfg!(target_endian = "little") {
            1_u8.checked_shl(member.bit)
        } else {
            0x80_u8.checked_shr(member.bit)
        };
        Some(Self {
            byte: member.offset,
            bit: bit.filter(|_| member.width == 1)?,
        })
    }
}

/// Searches BTF for all offsets. Called by a fuzzer.
pub(crate) fn search_btf(btf: &[u8]) {
    if let Some(types) = Btf::parse(btf) {
        let _found = (KernelOffsets::find(&types), KernelSocketBit::find(&types));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn find_in<T>(btf: &[u8], find: fn(&Btf<'_>) -> Option<T>) -> Option<T> {
        find(&Btf::parse(btf)?)
    }

    #[test]
    fn every_offset_has_a_structure_and_member() {
        for index in 0..OFFSET_COUNT {
            assert!(
                FIELDS.iter().any(|(named, _, _)| *named == index),
                "{index}"
            );
        }
    }

    #[test]
    fn the_btf_of_this_kernel_has_all_offsets() {
        let btf = read_btf().expect("a kernel with BTF");
        let KernelOffsets(offsets) = find_in(&btf, KernelOffsets::find).expect("all offsets");

        // None of these is the first member of its structure on any kernel.
        let devices = [NET_DEVICES, DEVICE_LIST, DEVICE_V4, DEVICE_V6];
        for index in devices
            .into_iter()
            .chain([SOCK_NET, V4_SCOPE, NET_OWNER, OWNER_LEVEL])
        {
            assert!(offsets[index] > 0, "{index}");
        }
        assert_eq!(find_in(&[], KernelOffsets::find), None);
    }

    #[test]
    fn the_btf_of_this_kernel_has_the_bit_of_kernel_sockets() {
        let btf = read_btf().expect("a kernel with BTF");
        let found = find_in(&btf, KernelSocketBit::find).expect("a kernel with sockets");

        assert_eq!(found.bit.count_ones(), 1);
        assert!(found.byte > 0 && found.byte < 4096, "{found:?}");
        let cut = find_in(&btf[..4096], KernelSocketBit::find);
        assert_eq!(cut, None);
    }
}
