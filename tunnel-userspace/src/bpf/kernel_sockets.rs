//! How a socket of the kernel's own is known (`sk_kern_sock` of `struct sock`): connects of such run
//! the hooks, their close runs none (`inet_release` in net/ipv4/af_inet.c).

use std::{fs, io};

use super::{
    attach::Hook,
    btf::{Btf, Kind, Member},
    sys,
};

/// Where the kernel describes its types.
pub(super) const TYPES: &str = "/sys/kernel/btf/vmlinux";

/// Where `struct sock` has the bit.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub struct KernelSocketBit {
    /// The byte, from the beginning of the structure.
    pub byte: u32,
    /// The bit in it, as a number with nothing but that set.
    pub bit: u8,
}

impl KernelSocketBit {
    /// Asks the kernel. Nothing where it does not say, or lets no program read its memory (Linux that
    /// is locked down for confidentiality).
    pub(super) fn find() -> io::Result<Option<Self>> {
        if !sys::loads(&READ_KERNEL, Hook::Connect4.attach_type())? {
            return Ok(None);
        }
        match fs::read(TYPES) {
            Ok(description) => Ok(Self::in_description(&description)),
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
            Err(error) => Err(error),
        }
    }

    fn in_description(description: &[u8]) -> Option<Self> {
        let btf = Btf::parse(description)?;
        // The programs read the socket's address from the beginning of what they are given.
        let given = btf.find(Kind::Struct, "bpf_sock_addr_kern")?;
        if btf.member(given, "sk")?.offset != 0 {
            return None;
        }
        Self::of(btf.member(btf.find(Kind::Struct, "sock")?, "sk_kern_sock")?)
    }

    fn of(member: Member) -> Option<Self> {
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

/// `r3 = r1; r1 = r10; r1 += -8; r2 = 8; call bpf_probe_read_kernel; r0 = 1; exit`.
const READ_KERNEL: [u64; 7] = [
    0x13bf,
    0xa1bf,
    0xffff_fff8_0000_0107,
    0x0000_0008_0000_02b7,
    0x0000_0071_0000_0085,
    0x0000_0001_0000_00b7,
    0x95,
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn this_kernel_says_where_the_bit_is_or_nothing() {
        // As Linux 6.18 describes it for x86-64: one bit.
        let Ok(description) = fs::read(TYPES) else {
            return;
        };
        let found = KernelSocketBit::in_description(&description).expect("a kernel with sockets");

        assert_eq!(found.bit.count_ones(), 1);
        assert!(found.byte > 0 && found.byte < 4096, "{found:?}");
        assert_eq!(KernelSocketBit::in_description(&description[..4096]), None);
    }
}
