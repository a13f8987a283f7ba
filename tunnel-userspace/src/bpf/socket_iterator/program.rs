//! Builds the programs of the iterators, which write a record for each socket that has a value in a socket storage map.

use std::os::fd::RawFd;

use super::super::btf::{Btf, TypeKind};

/// The kinds of objects over which an iterator can look for sockets.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Source {
    /// The values of the socket storage map, in all network namespaces.
    Storage,
    /// The files that the processes in this process's PID namespace have open, in all network namespaces.
    Files,
    /// The TCP sockets in this process's network namespace.
    Tcp,
    /// The UDP sockets in this process's network namespace.
    Udp,
}

impl Source {
    /// Returns the kernel function that the program is attached to.
    pub(super) const fn target(self) -> &'static str {
        match self {
            Self::Storage => "bpf_iter_bpf_sk_storage_map",
            Self::Files => "bpf_iter_task_file",
            Self::Tcp => "bpf_iter_tcp",
            Self::Udp => "bpf_iter_udp",
        }
    }

    /// Returns true if the iterator is attached to the socket storage map.
    pub(super) fn is_storage(self) -> bool {
        self == Self::Storage
    }
}

/// The byte offsets in kernel structures that the programs need.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Offsets {
    /// Offsets in `struct sock`.
    cookie: i16,
    state: i16,
    net: i16,
    /// Offset in `struct net`.
    namespace_number: i16,
    /// Offset in `struct socket`.
    sock: i16,
}

impl Offsets {
    pub(super) fn find(btf: &Btf<'_>) -> Option<Self> {
        // `sock_common` is the first member of `struct sock`, so offsets in it are valid in `struct sock`,
        // too.
        let common = btf.find(TypeKind::Struct, "sock_common")?;
        let socket = btf.find(TypeKind::Struct, "socket")?;
        let offset = |id, name: &str| i16::try_from(btf.member(id, name)?.offset).ok();
        let ns = btf.member(btf.find(TypeKind::Struct, "net")?, "ns")?;
        Some(Self {
            cookie: offset(common, "skc_cookie")?,
            state: offset(common, "skc_state")?,
            net: offset(common, "skc_net")?,
            namespace_number: i16::try_from(btf.member_of(ns, "inum")?.offset).ok()?,
            sock: offset(socket, "sk")?,
        })
    }
}

/// Opcodes of BPF instructions (RFC 9669).
const LOAD_8: u64 = 0x71;
const LOAD_32: u64 = 0x61;
const LOAD_64: u64 = 0x79;
const LOAD_CONST_64: u64 = 0x18;
const STORE_32: u64 = 0x63;
const STORE_64: u64 = 0x7b;
const MOVE: u64 = 0xbf;
const MOVE_CONST: u64 = 0xb7;
const ADD_CONST: u64 = 0x07;
const JUMP_UNLESS_ZERO: u64 = 0x55;
const CALL: u64 = 0x85;
const EXIT: u64 = 0x95;
/// The second register of [`LOAD_CONST_64`] if the constant is the descriptor of a map.
const PSEUDO_MAP_FD: u8 = 1;
/// The numbers of helpers: `bpf_sk_storage_get`, `bpf_seq_write`, `bpf_skc_to_tcp_sock`, `bpf_sock_from_file`.
const SK_STORAGE_GET: i32 = 107;
const SEQ_WRITE: i32 = 127;
const SKC_TO_TCP_SOCK: i32 = 137;
const SOCK_FROM_FILE: i32 = 162;
/// The register that holds the result of a helper.
const RESULT: u8 = 0;
/// The registers that hold the program's context, the socket, and its value in the map.
const CONTEXT: u8 = 6;
const SOCKET: u8 = 7;
const VALUE: u8 = 8;
/// The register that holds the frame pointer.
const STACK: u8 = 10;

/// Encodes one instruction.
fn instruction(code: u64, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    let registers = u64::from(to) | u64::from(from) << 4;
    let offset = u64::from(offset.cast_unsigned());
    code | registers << 8 | offset << 16 | u64::from(value.cast_unsigned()) << 32
}

fn load(to: u8, from: u8, offset: i16) -> u64 {
    instruction(LOAD_64, to, from, offset, 0)
}

fn copy(to: u8, from: u8) -> u64 {
    instruction(MOVE, to, from, 0, 0)
}

fn set(to: u8, value: i32) -> u64 {
    instruction(MOVE_CONST, to, 0, 0, value)
}

fn call(helper: i32) -> u64 {
    instruction(CALL, 0, 0, 0, helper)
}

fn exit() -> [u64; 2] {
    [set(RESULT, 0), instruction(EXIT, 0, 0, 0, 0)]
}

fn exit_if_null(register: u8) -> [u64; 3] {
    let [result, exit] = exit();
    [
        instruction(JUMP_UNLESS_ZERO, register, 0, 2, 0),
        result,
        exit,
    ]
}

/// Returns the program that writes a [`TranslatedSocket`](crate::sockets::TranslatedSocket) for each socket with a value in the map
/// with the descriptor `storage`. The first pointer in the context of every iterator leads to metadata, whose first member is the `seq_file` to write to.
/// At the end of the iteration, the other pointers are null.
pub(super) fn build(source: Source, offsets: &Offsets, storage: RawFd) -> Vec<u64> {
    let mut program = vec![copy(CONTEXT, 1)];
    program.extend(find_socket(source, offsets));
    program.extend(exit_if_null(SOCKET));
    if source.is_storage() {
        // `struct bpf_iter__bpf_sk_storage_map`: metadata, map, socket, value.
        program.push(load(VALUE, CONTEXT, 24));
    } else {
        program.extend([
            instruction(LOAD_CONST_64, 1, PSEUDO_MAP_FD, 0, storage),
            0,
            copy(2, SOCKET),
            set(3, 0),
            set(4, 0),
            call(SK_STORAGE_GET),
            copy(VALUE, RESULT),
        ]);
    }
    program.extend(exit_if_null(VALUE));
    program.extend(write_record(offsets));
    program.extend(exit());
    program
}

/// Returns the instructions that find the socket of one step of the iteration. It may be null.
fn find_socket(source: Source, offsets: &Offsets) -> Vec<u64> {
    match source {
        Source::Storage => vec![load(SOCKET, CONTEXT, 16)],
        Source::Files => {
            // `struct bpf_iter__task_file`: metadata, task, descriptor, file.
            let mut program = vec![load(1, CONTEXT, 24)];
            program.extend(exit_if_null(1));
            program.push(call(SOCK_FROM_FILE));
            program.extend(exit_if_null(RESULT));
            program.push(load(SOCKET, RESULT, offsets.sock));
            program
        }
        Source::Tcp => {
            // `struct bpf_iter__tcp`: metadata, `sock_common`, user. The helper returns null for sockets that are no `tcp_sock`.
            let mut program = vec![load(1, CONTEXT, 8)];
            program.extend(exit_if_null(1));
            program.extend([call(SKC_TO_TCP_SOCK), copy(SOCKET, RESULT)]);
            program
        }
        // `struct bpf_iter__udp`: metadata, `udp_sock`, user, bucket.
        Source::Udp => vec![load(SOCKET, CONTEXT, 8)],
    }
}

/// Returns the instructions that write the record of a socket and its value.
fn write_record(offsets: &Offsets) -> Vec<u64> {
    let mut program = vec![
        load(1, SOCKET, offsets.cookie),
        instruction(STORE_64, STACK, 1, -80, 0),
        load(1, SOCKET, offsets.net),
        instruction(LOAD_32, 1, 1, offsets.namespace_number, 0),
        instruction(STORE_32, STACK, 1, -72, 0),
        instruction(LOAD_8, 1, SOCKET, offsets.state, 0),
        instruction(STORE_32, STACK, 1, -68, 0),
    ];
    for word in (0..64).step_by(8) {
        program.push(load(1, VALUE, word));
        program.push(instruction(STORE_64, STACK, 1, word - 64, 0));
    }
    program.extend([
        load(1, CONTEXT, 0),
        load(1, 1, 0),
        copy(2, STACK),
        instruction(ADD_CONST, 2, 0, 0, -80),
        set(3, 80),
        call(SEQ_WRITE),
    ]);
    program
}
