//! A walk over everything that hangs on sockets in a socket storage, in every network namespace: a
//! BPF iterator (Linux 5.9). sock_diag(7) tells it of TCP sockets only (`inet_sk_diag_fill` leaves
//! before it comes to that for others).

use std::{
    fs::{self, File},
    io::{self, Read as _},
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use tunnel_common::origin::Origin;
use zerocopy::{FromBytes, Immutable, KnownLayout};

use super::{
    btf::{Btf, Kind},
    kernel_sockets::TYPES,
    sys,
};

/// What an iterator over a socket storage is attached to.
const TARGET: &str = "bpf_iter_bpf_sk_storage_map";
/// How much is read at once.
const ROOM: usize = 32 * 1024;

/// What the program writes of a socket.
#[derive(Clone, Copy, Debug, FromBytes, Immutable, KnownLayout)]
#[repr(C)]
pub(super) struct Record {
    /// The socket's cookie; 0 if nobody asked for one yet.
    pub(super) cookie: u64,
    /// The number of its network namespace, as the inode of `/proc/<pid>/ns/net`.
    pub(super) namespace: u32,
    /// Its state, as in `net/tcp_states.h`.
    pub(super) state: u32,
    /// What it remembers.
    pub(super) origin: Origin,
}

const RECORD: usize = size_of::<Record>();

const _: () = {
    assert!(RECORD == 80);
};

/// The iterator, attached to a socket storage.
#[derive(Debug)]
pub(super) struct Walk {
    link: OwnedFd,
}

impl Walk {
    /// Loads the program for a storage.
    pub(super) fn over(storage: BorrowedFd<'_>) -> io::Result<Self> {
        let description = fs::read(TYPES)?;
        let places = Places::find(&description).ok_or_else(|| {
            let text =
                format!("{TYPES} does not describe sockets, or iterators over socket storages");
            io::Error::new(io::ErrorKind::Unsupported, text)
        })?;
        drop(description);
        let program = sys::load_iterator(&program(&places), places.target)?;
        let link = sys::link_iterator(program.as_fd(), storage)?;
        Ok(Self { link })
    }

    /// Shows every socket that remembers something.
    pub(super) fn go(&self, mut show: impl FnMut(Record) -> io::Result<()>) -> io::Result<()> {
        let mut walk = File::from(sys::open_iterator(self.link.as_fd())?);
        let mut buffer = vec![0; ROOM];
        let mut held = 0;
        // Ends with the kernel's list. A record may be cut in two between two reads.
        loop {
            let room = buffer.get_mut(held..).unwrap_or_default();
            let read = match walk.read(room) {
                Ok(0) => return Ok(()),
                Ok(read) => read,
                // After a million sockets without a record the kernel lets others run first.
                Err(error) if is_passing(&error) => continue,
                Err(error) => return Err(error),
            };
            let filled = held.saturating_add(read);
            let whole = filled / RECORD * RECORD;
            let records = buffer.get(..whole).unwrap_or_default().chunks_exact(RECORD);
            for record in records {
                if let Ok(record) = Record::read_from_bytes(record) {
                    show(record)?;
                }
            }
            buffer.copy_within(whole..filled, 0);
            held = filled.saturating_sub(whole);
        }
    }
}

fn is_passing(error: &io::Error) -> bool {
    matches!(
        error.kind(),
        io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted
    )
}

/// Where this kernel keeps what the program reads.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
struct Places {
    /// The number of the function that the program is attached to.
    target: u32,
    /// Of `struct sock`.
    cookie: u32,
    state: u32,
    net: u32,
    /// Of `struct net`.
    number: u32,
}

impl Places {
    fn find(description: &[u8]) -> Option<Self> {
        let btf = Btf::parse(description)?;
        // The first member of `struct sock`.
        let common = btf.find(Kind::Struct, "sock_common")?;
        let net = btf.find(Kind::Struct, "net")?;
        let of_sock = |name: &str| Some(btf.member(common, name)?.offset);
        Some(Self {
            target: btf.find(Kind::Function, TARGET)?,
            cookie: of_sock("skc_cookie")?,
            state: of_sock("skc_state")?,
            net: of_sock("skc_net")?,
            number: btf.member_of(btf.member(net, "ns")?, "inum")?.offset,
        })
    }
}

/// Instructions of BPF, as RFC 9669 writes them.
const LOAD_8: u64 = 0x71;
const LOAD_32: u64 = 0x61;
const LOAD_64: u64 = 0x79;
const STORE_32: u64 = 0x63;
const STORE_64: u64 = 0x7b;
const MOVE: u64 = 0xbf;
const MOVE_CONST: u64 = 0xb7;
const ADD_CONST: u64 = 0x07;
const JUMP_IF_ZERO: u64 = 0x15;
const CALL: u64 = 0x85;
const EXIT: u64 = 0x95;
/// `bpf_seq_write`.
const SEQ_WRITE: i32 = 127;
/// The stack.
const STACK: u8 = 10;

/// One instruction.
fn instruction(code: u64, to: u8, from: u8, offset: i16, value: i32) -> u64 {
    let registers = u64::from(to) | u64::from(from) << 4;
    let offset = u64::from(u16::from_ne_bytes(offset.to_ne_bytes()));
    let value = u64::from(u32::from_ne_bytes(value.to_ne_bytes()));
    code | registers << 8 | offset << 16 | value << 32
}

/// Writes a [`Record`] of each socket. The context is `struct bpf_iter__bpf_sk_storage_map`: four
/// pointers, to what there is to know of the walk (whose first member is the file to write to), to
/// the map, the socket and the value; the last two are null at the end.
fn program(places: &Places) -> Vec<u64> {
    let at = |offset: u32| i16::try_from(offset).unwrap_or(i16::MAX);
    let size = i32::try_from(RECORD).unwrap_or(0);
    let start = -i16::try_from(RECORD).unwrap_or(0);
    let words = i16::try_from(size_of::<Origin>() / 8).unwrap_or(0);
    let mut copy = vec![
        instruction(LOAD_64, 1, 7, at(places.cookie), 0),
        instruction(STORE_64, STACK, 1, start, 0),
        instruction(LOAD_64, 1, 7, at(places.net), 0),
        instruction(LOAD_32, 1, 1, at(places.number), 0),
        instruction(STORE_32, STACK, 1, start.saturating_add(8), 0),
        instruction(LOAD_8, 1, 7, at(places.state), 0),
        instruction(STORE_32, STACK, 1, start.saturating_add(12), 0),
    ];
    for word in 0..words {
        let place = word.saturating_mul(8);
        copy.push(instruction(LOAD_64, 1, 8, place, 0));
        let stored = start.saturating_add(16).saturating_add(place);
        copy.push(instruction(STORE_64, STACK, 1, stored, 0));
    }
    copy.extend([
        instruction(LOAD_64, 1, 6, 0, 0),
        instruction(LOAD_64, 1, 1, 0, 0),
        instruction(MOVE, 2, STACK, 0, 0),
        instruction(ADD_CONST, 2, 0, 0, start.into()),
        instruction(MOVE_CONST, 3, 0, 0, size),
        instruction(CALL, 0, 0, 0, SEQ_WRITE),
    ]);
    let rest = i16::try_from(copy.len()).unwrap_or(i16::MAX);
    let mut program = vec![
        instruction(MOVE, 6, 1, 0, 0),
        instruction(LOAD_64, 7, 6, 16, 0),
        instruction(JUMP_IF_ZERO, 7, 0, rest.saturating_add(2), 0),
        instruction(LOAD_64, 8, 6, 24, 0),
        instruction(JUMP_IF_ZERO, 8, 0, rest, 0),
    ];
    program.append(&mut copy);
    program.push(instruction(MOVE_CONST, 0, 0, 0, 0));
    program.push(instruction(EXIT, 0, 0, 0, 0));
    program
}
