//! BPF iterators over the sockets that have a value in a socket storage map (Linux 5.9).
//! sock_diag(7) returns socket storage only for TCP sockets (`inet_sk_diag_fill` returns earlier for others).
//!
//! - `program`: builds the programs that run for each socket

mod program;

use std::{
    collections::HashSet,
    fs::{self, File},
    io::{self, Read as _},
    mem::offset_of,
    os::fd::{AsFd as _, AsRawFd as _, BorrowedFd, OwnedFd, RawFd},
};

use tunnel_common::origin::Origin;
use zerocopy::FromBytes as _;

use self::program::{Offsets, Source};
use super::{
    btf::{Btf, TypeKind, VMLINUX_BTF},
    sys,
};
use crate::sockets::{TranslatedSocket, is_in_initial_pid_namespace};

/// A function of kernels (Linux 7.0 and later) that crash if a socket is closed while an iterator over socket storage visits it:
/// this function sets the pointer `local_storage` of a value to null, and `__bpf_sk_storage_map_seq_show` reads the socket through
/// that pointer without a check.
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

/// The iterators that find the sockets with a value in a socket storage map.
#[derive(Debug)]
pub(super) struct SocketIterator {
    links: Vec<OwnedFd>,
    /// True if a socket may be found more than once.
    has_duplicates: bool,
}

impl SocketIterator {
    /// Loads the iterator programs for a socket storage map, and attaches them.
    pub(super) fn attach(storage: BorrowedFd<'_>) -> io::Result<Self> {
        let btf = fs::read(VMLINUX_BTF)?;
        let btf = parse(&btf)?;
        let sources = sources(&btf)?;
        let attach = |source: &Source| {
            let program = load(&btf, *source, storage.as_raw_fd())?;
            let map = source.is_storage().then_some(storage);
            sys::attach_iterator(program.as_fd(), map)
        };
        Ok(Self {
            links: sources.iter().map(attach).collect::<io::Result<_>>()?,
            has_duplicates: sources.contains(&Source::Files),
        })
    }

    /// Calls `visit` for every socket that has a value in the map. On kernels that crash while they iterate over socket storage,
    /// this includes only sockets that a process has open, and if this process is not in the initial PID namespace, only sockets
    /// in its network namespace.
    pub(super) fn for_each(
        &self,
        visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut seen = HashSet::new();
        let mut visit_once = |socket: TranslatedSocket| {
            let is_new = !self.has_duplicates || socket.cookie == 0 || seen.insert(socket.cookie);
            if is_new { visit(socket) } else { Ok(()) }
        };
        for link in &self.links {
            read_all(link.as_fd(), &mut visit_once)?;
        }
        Ok(())
    }
}

/// Runs an iterator, and calls `visit` for every record that it writes.
fn read_all(
    link: BorrowedFd<'_>,
    visit: &mut dyn FnMut(TranslatedSocket) -> io::Result<()>,
) -> io::Result<()> {
    let mut records = File::from(sys::open_iterator(link)?);
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

/// Chooses where to look for sockets on the kernel with this BTF.
fn sources(btf: &Btf<'_>) -> io::Result<&'static [Source]> {
    Ok(if !may_crash(btf) {
        &[Source::Storage]
    } else if is_in_initial_pid_namespace()? {
        &[Source::Files]
    } else {
        &[Source::Tcp, Source::Udp]
    })
}

/// Returns true if the kernel with this BTF may crash while it iterates over socket storage.
fn may_crash(btf: &Btf<'_>) -> bool {
    // A compiler may have inlined the function. The member came with it.
    let value = btf.find(TypeKind::Struct, "bpf_local_storage_elem");
    let state = value.and_then(|value| btf.member(value, "state"));
    state.is_some() || btf.find(TypeKind::Function, CRASHING).is_some()
}

/// Parses the kernel's BTF.
fn parse(btf: &[u8]) -> io::Result<Btf<'_>> {
    Btf::parse(btf).ok_or_else(|| unsupported(format!("{VMLINUX_BTF} is no BTF")))
}

fn unsupported(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::Unsupported, text)
}

/// Loads the iterator program for a source of sockets. `storage` is the descriptor of a socket storage map, which the program for
/// [`Source::Storage`] does not use.
fn load(btf: &Btf<'_>, source: Source, storage: RawFd) -> io::Result<OwnedFd> {
    let target = btf.find(TypeKind::Function, source.target());
    let (target, offsets) = target.zip(Offsets::find(btf)).ok_or_else(|| {
        let target = source.target();
        unsupported(format!(
            "{VMLINUX_BTF} has no BTF for sockets, or for {target}"
        ))
    })?;
    sys::load_iterator(&program::build(source, &offsets, storage), target)
}

/// Returns true if this kernel accepts iterator programs from a process with all capabilities. A kernel may be built without BTF,
/// or reject all programs of type tracing.
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
    let loaded = fs::read(VMLINUX_BTF).and_then(|btf| load(&parse(&btf)?, Source::Storage, -1));
    match loaded {
        Ok(_program) => Ok(true),
        Err(error) if is_rejected(&error) => Ok(false),
        Err(error) => Err(error),
    }
}
