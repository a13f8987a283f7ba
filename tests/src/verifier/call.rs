//! Loads of bpf(2) that keep the verifier's log (aya keeps none of a success).
#![expect(unsafe_code, reason = "bpf(2) has no safe wrapper")]

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use nix::libc;

const BPF_PROG_LOAD: i64 = 5;
const BPF_BTF_GET_FD_BY_ID: i64 = 19;

/// Bytes of `struct bpf_func_info`.
const RECORD: u32 = 8;

/// A program as the kernel takes it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Program<'a> {
    /// `BPF_PROG_TYPE_…`.
    pub(super) kind: u32,
    /// The hook that it is for; 0 where its type has only one.
    pub(super) hook: u32,
    /// Its instructions, each as it lies in memory.
    pub(super) instructions: &'a [u64],
    /// The description of the types of its functions.
    pub(super) types: BorrowedFd<'a>,
    /// `struct bpf_func_info` of each function.
    pub(super) functions: &'a [u8],
}

/// `union bpf_attr` of `BPF_PROG_LOAD`.
#[repr(C)]
#[derive(Default)]
struct Attr {
    kind: u32,
    count: u32,
    instructions: u64,
    license: u64,
    log_level: u32,
    log_size: u32,
    log: u64,
    kernel_version: u32,
    flags: u32,
    name: [u8; 16],
    device: u32,
    hook: u32,
    types: RawFd,
    record: u32,
    functions: u64,
    functions_count: u32,
    /// The rest is not looked at where it is zero.
    rest: [u32; 9],
}

/// Loads a program and has the verifier write a log. Whether it loaded, and what there was room for of
/// the log.
pub(super) fn load(
    program: &Program<'_>,
    level: u32,
    room: u32,
) -> io::Result<(io::Result<OwnedFd>, String)> {
    let size = |length: usize| u32::try_from(length).map_err(io::Error::other);
    let address = |start: *const u8| u64::try_from(start.expose_provenance()).unwrap_or(0);
    let mut log = vec![0_u8; usize::try_from(room).map_err(io::Error::other)?];
    let attr = Attr {
        kind: program.kind,
        count: size(program.instructions.len())?,
        instructions: address(program.instructions.as_ptr().cast()),
        license: address(c"GPL".as_ptr().cast()),
        log_level: level,
        log_size: room,
        log: address(log.as_mut_ptr()),
        hook: program.hook,
        types: program.types.as_raw_fd(),
        record: RECORD,
        functions: address(program.functions.as_ptr()),
        functions_count: size(program.functions.len())? / RECORD,
        ..Attr::default()
    };
    // SAFETY: the instructions and records are as many as the attribute says, the licence is a C string,
    // the log has the room that is said, and all outlive the call.
    let loaded = unsafe { call(BPF_PROG_LOAD, &attr) };
    let written = log.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok((loaded, String::from_utf8_lossy(written).into_owned()))
}

/// Opens a description of types by its number.
pub(super) fn open_btf(number: u32) -> io::Result<OwnedFd> {
    // The number is where a load has the type of the program.
    let attr = Attr {
        kind: number,
        ..Attr::default()
    };
    // SAFETY: no pointers.
    unsafe { call(BPF_BTF_GET_FD_BY_ID, &attr) }
}

/// Calls the kernel for a new file descriptor.
///
/// # Safety
///
/// The pointers in the attribute must be valid for what the command does with them, and the command must
/// be one that gives a descriptor.
unsafe fn call(command: i64, attr: &Attr) -> io::Result<OwnedFd> {
    // SAFETY: the attribute outlives the call; the caller vouches for the rest.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr, size_of::<Attr>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = RawFd::try_from(result).map_err(io::Error::other)?;
    // SAFETY: the kernel has just given us this descriptor.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
