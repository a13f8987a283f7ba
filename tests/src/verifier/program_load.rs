//! Loads programs with bpf(2) and returns the verifier's log. aya discards that log after a successful load.
#![expect(unsafe_code, reason = "bpf(2) has no safe wrapper")]

use std::{
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use nix::libc;

const BPF_PROG_LOAD: i64 = 5;
const BPF_BTF_GET_FD_BY_ID: i64 = 19;

/// The size of `struct bpf_func_info`.
const FUNC_INFO_SIZE: u32 = 8;

/// A program to load.
#[derive(Clone, Copy, Debug)]
pub(super) struct Program<'a> {
    /// The program type, `BPF_PROG_TYPE_…`.
    pub(super) kind: u32,
    /// The expected attach type, or 0 if programs of this type have only one.
    pub(super) hook: u32,
    /// The encoded instructions.
    pub(super) instructions: &'a [u64],
    /// The BTF that contains the types of the program's functions.
    pub(super) btf: BorrowedFd<'a>,
    /// A `struct bpf_func_info` for each function.
    pub(super) func_info: &'a [u8],
}

/// The `union bpf_attr` for `BPF_PROG_LOAD`.
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
    btf: RawFd,
    record: u32,
    functions: u64,
    functions_count: u32,
    /// These fields are zero, so the kernel ignores them.
    rest: [u32; 9],
}

/// Loads a program with a verifier log. Returns the result, and the part of the log that fits into `log_size`
/// bytes.
pub(super) fn load(
    program: &Program<'_>,
    level: u32,
    log_size: u32,
) -> io::Result<(io::Result<OwnedFd>, String)> {
    let size = |length: usize| u32::try_from(length).map_err(io::Error::other);
    let address = |start: *const u8| u64::try_from(start.expose_provenance()).unwrap_or(0);
    let mut log = vec![0_u8; usize::try_from(log_size).map_err(io::Error::other)?];
    let attr = Attr {
        kind: program.kind,
        count: size(program.instructions.len())?,
        instructions: address(program.instructions.as_ptr().cast()),
        license: address(c"GPL".as_ptr().cast()),
        log_level: level,
        log_size,
        log: address(log.as_mut_ptr()),
        hook: program.hook,
        btf: program.btf.as_raw_fd(),
        record: FUNC_INFO_SIZE,
        functions: address(program.func_info.as_ptr()),
        functions_count: size(program.func_info.len())? / FUNC_INFO_SIZE,
        ..Attr::default()
    };
    // SAFETY: the attribute contains the actual lengths of the instructions, the function records and the
    // log; the licence is a C string; and all of them outlive the call.
    let loaded = unsafe { call(BPF_PROG_LOAD, &attr) };
    let written = log.split(|byte| *byte == 0).next().unwrap_or_default();
    Ok((loaded, String::from_utf8_lossy(written).into_owned()))
}

/// Opens a BTF object by its ID.
pub(super) fn open_btf(number: u32) -> io::Result<OwnedFd> {
    // In `union bpf_attr`, this command's ID has the same offset as the program type for `BPF_PROG_LOAD`.
    let attr = Attr {
        kind: number,
        ..Attr::default()
    };
    // SAFETY: this command takes no pointers.
    unsafe { call(BPF_BTF_GET_FD_BY_ID, &attr) }
}

/// Calls bpf(2) with a command that returns a new file descriptor.
///
/// # Safety
///
/// The pointers in the attribute must be valid for the command, and the command must return a new file
/// descriptor on success.
unsafe fn call(command: i64, attr: &Attr) -> io::Result<OwnedFd> {
    // SAFETY: the attribute outlives the call; the caller guarantees the rest.
    let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr, size_of::<Attr>()) };
    if result < 0 {
        return Err(io::Error::last_os_error());
    }
    let fd = RawFd::try_from(result).map_err(io::Error::other)?;
    // SAFETY: the kernel has just returned this descriptor, and nothing else owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd) })
}
