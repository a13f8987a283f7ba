//! What a program says of its functions: those that have names of their own are verified by themselves.

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
};

use super::Attr;

const BPF_BTF_GET_FD_BY_ID: i64 = 19;

/// Bytes of `struct bpf_func_info`.
const RECORD: u32 = 8;

/// The functions of a program.
#[derive(Clone, Copy, Debug)]
pub(in super::super) struct Functions<'a> {
    /// The description of their types.
    pub(in super::super) btf: BorrowedFd<'a>,
    /// `struct bpf_func_info` of each.
    pub(in super::super) records: &'a [u8],
}

impl Functions<'_> {
    /// The attribute of a load, with these.
    pub(super) fn told(self, attr: Attr) -> io::Result<Attr> {
        let size = u32::try_from(self.records.len()).map_err(io::Error::other)?;
        Ok(attr
            .fd(72, self.btf)
            .u32(76, RECORD)
            .pointer(80, self.records.as_ptr())
            .u32(88, size / RECORD))
    }
}

/// Opens a description of types by its number.
pub(in super::super) fn open_btf(id: u32) -> io::Result<OwnedFd> {
    // SAFETY: no pointers; the command gives a descriptor.
    unsafe { Attr::new().u32(0, id).call_for_fd(BPF_BTF_GET_FD_BY_ID) }
}
