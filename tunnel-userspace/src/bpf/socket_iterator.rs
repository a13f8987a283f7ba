//! A BPF iterator (Linux 5.9) over all values in a socket storage map, across all network namespaces.
//! sock_diag(7) returns socket storage only for TCP sockets (`inet_sk_diag_fill` returns earlier for others).

use std::{
    fs::{self, File},
    io::{self, Read as _},
    mem::offset_of,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use tunnel_common::origin::Origin;
use zerocopy::FromBytes as _;

use super::{
    btf::{Btf, TypeKind, VMLINUX_BTF},
    sys,
};
use crate::sockets::TranslatedSocket;

/// The kernel function that an iterator over a socket storage map is attached to.
const TARGET: &str = "bpf_iter_bpf_sk_storage_map";
/// A function of kernels (Linux 7.0 and later) that crash if a socket is closed while the iterator visits it: this function sets
/// the pointer `local_storage` of a value to null, and `__bpf_sk_storage_map_seq_show` reads the socket through that pointer
/// without a check.
///
/// Sources: [kernel/bpf/bpf_local_storage.c](https://github.com/torvalds/linux/blob/0542972950ef26670a5696e43c0ea2b7b6ac96d4/kernel/bpf/bpf_local_storage.c),
/// [net/core/bpf_sk_storage.c](https://github.com/torvalds/linux/blob/c3d77b22b8adb6a95a977c313f22060717ba90d9/net/core/bpf_sk_storage.c)
const CRASHING: &str = "bpf_selem_unlink_nofail";
/// The size of the record that the program writes for each socket: a [`TranslatedSocket`]. It ends with the
/// [`Origin`] with which the map's value begins.
const RECORD_SIZE: usize = size_of::<TranslatedSocket>();
/// The maximum number of bytes to read in one batch of records.
const BATCH_SIZE: usize = 400 * RECORD_SIZE;

const _: () = {
    assert!(RECORD_SIZE == 80 && size_of::<Origin>() == 64);
    assert!(offset_of!(TranslatedSocket, cookie) == 0);
    assert!(offset_of!(TranslatedSocket, namespace) == 8);
    assert!(offset_of!(TranslatedSocket, state) == 12);
    assert!(offset_of!(TranslatedSocket, origin) == 16);
};

/// An iterator that is attached to a socket storage map.
#[derive(Debug)]
pub(super) struct SocketIterator {
    link: OwnedFd,
}

impl SocketIterator {
    /// Loads the iterator program and attaches it to a socket storage map.
    pub(super) fn attach(storage: BorrowedFd<'_>) -> io::Result<Self> {
        let link = sys::attach_iterator(load()?.as_fd(), storage)?;
        Ok(Self { link })
    }

    /// Calls `visit` for every socket that has a value in the map.
    pub(super) fn for_each(
        &self,
        visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut records = File::from(sys::open_iterator(self.link.as_fd())?);
        let mut batch = Vec::with_capacity(BATCH_SIZE);
        // The loop ends after the last socket.
        loop {
            // A read may end in the middle of a record. Every batch except the last is full.
            let room = u64::try_from(BATCH_SIZE - batch.len()).unwrap_or(0);
            match records.by_ref().take(room).read_to_end(&mut batch) {
                Ok(_) => {}
                // After a million sockets without a record, the kernel returns EAGAIN to let other tasks run.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
                Err(error) => return Err(error),
            }
            for record in batch.chunks_exact(RECORD_SIZE) {
                if let Ok(record) = TranslatedSocket::read_from_bytes(record) {
                    visit(record)?;
                }
            }
            if batch.len() < BATCH_SIZE {
                return Ok(());
            }
            batch.clear();
        }
    }
}

/// Loads the iterator program.
fn load() -> io::Result<OwnedFd> {
    let unsupported = |text: String| io::Error::new(io::ErrorKind::Unsupported, text);
    let btf = fs::read(VMLINUX_BTF)?;
    if may_crash(&btf) {
        return Err(unsupported(format!(
            "this kernel may crash while it iterates over socket storage (it has the function {CRASHING}, Linux 7.0)"
        )));
    }
    let offsets = IteratorOffsets::find(&btf).ok_or_else(|| {
        unsupported(format!(
            "{VMLINUX_BTF} has no BTF for sockets, or for iterators over socket storage"
        ))
    })?;
    sys::load_iterator(&build_program(&offsets), offsets.target_id)
}

/// Returns true if the kernel with this BTF may crash while it iterates over socket storage.
fn may_crash(btf: &[u8]) -> bool {
    let btf = Btf::parse(btf);
    btf.is_some_and(|btf| btf.find(TypeKind::Function, CRASHING).is_some())
}

/// Returns true if this kernel accepts the iterator program from a process with all capabilities. A kernel
/// may be built without BTF, reject all programs of type tracing, or crash while it iterates.
///
/// # Errors
///
/// Returns an error if the program can't be loaded for another reason, such as a lack of memory.
pub fn supports_socket_iterator() -> io::Result<bool> {
    let is_rejected = |error: &io::Error| {
        let kinds = [
            io::ErrorKind::NotFound,
            io::ErrorKind::Unsupported,
            io::ErrorKind::PermissionDenied,
        ];
        kinds.contains(&error.kind())
    };
    match load() {
        Ok(_program) => Ok(true),
        Err(error) if is_rejected(&error) => Ok(false),
        Err(error) => Err(error),
    }
}

/// The BTF id, and the byte offsets in kernel structures, that the program needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct IteratorOffsets {
    /// The BTF id of the kernel function that the program is attached to.
    target_id: u32,
    /// Offsets in `struct sock`.
    cookie: i16,
    state: i16,
    net: i16,
    /// Offset in `struct net`.
    namespace_number: i16,
}

impl IteratorOffsets {
    fn find(btf: &[u8]) -> Option<Self> {
        let btf = Btf::parse(btf)?;
        // `sock_common` is the first member of `struct sock`, so offsets in it are valid in `struct sock`,
        // too.
        let common = btf.find(TypeKind::Struct, "sock_common")?;
        let of_sock = |name: &str| i16::try_from(btf.member(common, name)?.offset).ok();
        let ns = btf.member(btf.find(TypeKind::Struct, "net")?, "ns")?;
        Some(Self {
            target_id: btf.find(TypeKind::Function, TARGET)?,
            cookie: of_sock("skc_cookie")?,
            state: of_sock("skc_state")?,
            net: of_sock("skc_net")?,
            namespace_number: i16::try_from(btf.member_of(ns, "inum")?.offset).ok()?,
        })
    }
}

/// Opcodes of BPF instructions (RFC 9669).
const LOAD_8: u64 = 0x71;
const LOAD_32: u64 = 0x61;
const LOAD_64: u64 = 0x79;
const STORE_32: u64 = 0x63;
const STORE_64: u64 = 0x7b;
const MOVE: u64 = 0xbf;
const MOVE_CONST: u64 = 0xb7;
const ADD_CONST: u64 = 0x07;
const JUMP_UNLESS_ZERO: u64 = 0x55;
const CALL: u64 = 0x85;
const EXIT: u64 = 0x95;
/// The number of the helper `bpf_seq_write`.
const SEQ_WRITE: i32 = 127;
/// The register that holds the frame pointer.
const STACK: u8 = 10;

/// Encodes one instruction.
fn instruction(code: u64, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    let registers = u64::from(to) | u64::from(from) << 4;
    let offset = u64::from(offset.cast_unsigned());
    code | registers << 8 | offset << 16 | u64::from(value.cast_unsigned()) << 32
}

/// Returns the program that writes a [`TranslatedSocket`] for each socket. Its context,
/// `struct bpf_iter__bpf_sk_storage_map`, has four pointers: metadata (whose first member is the `seq_file`
/// to write to), map, socket and value. At the end of the iteration, the socket and the value are null.
fn build_program(offsets: &IteratorOffsets) -> Vec<u64> {
    let mut program = vec![
        instruction(MOVE_CONST, 0, 0, 0, 0),
        instruction(MOVE, 6, 1, 0, 0),
        instruction(LOAD_64, 7, 6, 16, 0),
        instruction(JUMP_UNLESS_ZERO, 7, 0, 1, 0),
        instruction(EXIT, 0, 0, 0, 0),
        instruction(LOAD_64, 8, 6, 24, 0),
        instruction(JUMP_UNLESS_ZERO, 8, 0, 1, 0),
        instruction(EXIT, 0, 0, 0, 0),
        instruction(LOAD_64, 1, 7, offsets.cookie, 0),
        instruction(STORE_64, STACK, 1, -80, 0),
        instruction(LOAD_64, 1, 7, offsets.net, 0),
        instruction(LOAD_32, 1, 1, offsets.namespace_number, 0),
        instruction(STORE_32, STACK, 1, -72, 0),
        instruction(LOAD_8, 1, 7, offsets.state, 0),
        instruction(STORE_32, STACK, 1, -68, 0),
    ];
    for word in (0..64).step_by(8) {
        program.push(instruction(LOAD_64, 1, 8, word, 0));
        program.push(instruction(STORE_64, STACK, 1, word - 64, 0));
    }
    program.extend([
        instruction(LOAD_64, 1, 6, 0, 0),
        instruction(LOAD_64, 1, 1, 0, 0),
        instruction(MOVE, 2, STACK, 0, 0),
        instruction(ADD_CONST, 2, 0, 0, -80),
        instruction(MOVE_CONST, 3, 0, 0, 80),
        instruction(CALL, 0, 0, 0, SEQ_WRITE),
        instruction(MOVE_CONST, 0, 0, 0, 0),
        instruction(EXIT, 0, 0, 0, 0),
    ]);
    program
}
