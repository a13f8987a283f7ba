//! Uses of bpf(2) that aya 0.14 lacks: pinning links to cgroups (which aya 0.16 supports), finding the type
//! of a pinned object, iterators, and maps of maps without a program.
#![expect(unsafe_code, reason = "bpf(2) has no safe wrapper")]

mod grace;
mod loaded_objects;
mod map_handle;
mod mapped_counters;
mod unused_pages;

use std::{
    ffi::CString,
    io,
    os::{
        fd::{AsFd as _, AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
        unix::ffi::OsStrExt as _,
    },
    path::Path,
    ptr,
};

use aya::programs::ProgramFd;
use tunnel_common::table::{AttachPoint, GUARD, Map, ProgramType};
use zerocopy::IntoBytes as _;

pub use self::grace::RcuGrace;
pub(super) use self::{
    loaded_objects::{
        LoadedMap, attached_programs, link_by_id, loaded_links, map_by_id, program_by_id,
        programs_on_device,
    },
    map_handle::{MapHandle, Plain},
    mapped_counters::MappedCounters,
    unused_pages::{release as release_pages, release_code},
};
use super::map_spec::MapSpec;
use crate::reconcile::ReadError;

const BPF_MAP_UPDATE_ELEM: i64 = 2;
const BPF_PROG_LOAD: i64 = 5;
const BPF_OBJ_PIN: i64 = 6;
const BPF_OBJ_GET: i64 = 7;
const BPF_OBJ_GET_INFO_BY_FD: i64 = 15;
const BPF_LINK_CREATE: i64 = 28;
const BPF_LINK_UPDATE: i64 = 29;
const BPF_ITER_CREATE: i64 = 33;
const BPF_LINK_DETACH: i64 = 34;

const BPF_LINK_TYPE_CGROUP: u32 = 3;
const BPF_LINK_TYPE_TCX: u32 = 11;
const BPF_PROG_TYPE_TRACING: u32 = 26;
const BPF_TRACE_ITER: u32 = 28;
const BPF_F_BEFORE: u32 = 8;
const BPF_F_AFTER: u32 = 16;
const BPF_F_LINK: u32 = 1 << 13;

/// The attribute for bpf(2) (`union bpf_attr`), large enough for every command used here. Bytes that are not
/// set are zero.
#[repr(C, align(8))]
struct Attr([u8; 128]);

impl Attr {
    const fn new() -> Self {
        Self([0; 128])
    }

    fn with_bytes<const N: usize>(mut self, offset: usize, bytes: [u8; N]) -> Self {
        if let Some(target) = self.0.get_mut(offset..offset + N) {
            target.copy_from_slice(&bytes);
        }
        self
    }

    fn u32(self, offset: usize, value: u32) -> Self {
        self.with_bytes(offset, value.to_ne_bytes())
    }

    fn read_u32(&self, offset: usize) -> u32 {
        let bytes = self.0.get(offset..).and_then(<[u8]>::first_chunk);
        bytes.map_or(0, |bytes| u32::from_ne_bytes(*bytes))
    }

    fn fd(self, offset: usize, fd: BorrowedFd<'_>) -> Self {
        self.with_bytes(offset, fd.as_raw_fd().to_ne_bytes())
    }

    fn pointer<T: ?Sized>(self, offset: usize, target: *const T) -> Self {
        self.with_bytes(
            offset,
            target.cast::<u8>().expose_provenance().to_ne_bytes(),
        )
    }

    /// Calls bpf(2).
    ///
    /// # Safety
    ///
    /// Every pointer in the attribute must be valid for the command.
    unsafe fn call(&mut self, command: i64) -> io::Result<i64> {
        let attr = ptr::from_mut(self);
        // SAFETY: the attribute is borrowed exclusively, and is at least as large as the part that the
        // command reads and writes; the caller guarantees that its pointers are valid.
        let result = unsafe { libc::syscall(libc::SYS_bpf, command, attr, size_of::<Self>()) };
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(result)
        }
    }

    /// Calls bpf(2) with a command that returns a new file descriptor.
    ///
    /// # Safety
    ///
    /// As for `call`; in addition, the command must return a new file descriptor.
    unsafe fn call_for_fd(mut self, command: i64) -> io::Result<OwnedFd> {
        // SAFETY: guaranteed by the caller.
        let fd = unsafe { self.call(command)? };
        let fd = RawFd::try_from(fd).map_err(io::Error::other)?;
        // SAFETY: the kernel has just returned this descriptor, so nothing else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }
}

fn c_path(path: &Path) -> io::Result<CString> {
    CString::new(path.as_os_str().as_bytes()).map_err(io::Error::other)
}

/// Opens the object that is pinned at a path.
pub(super) fn open_pin(path: &Path) -> io::Result<OwnedFd> {
    let path = c_path(path)?;
    let attr = Attr::new().pointer(0, path.as_ptr());
    // SAFETY: the path is a C string that outlives the call; the command returns a descriptor.
    unsafe { attr.call_for_fd(BPF_OBJ_GET) }
}

/// Pins a map, program or link at a path.
pub(super) fn pin(fd: BorrowedFd<'_>, path: &Path) -> io::Result<()> {
    let path = c_path(path)?;
    let mut attr = Attr::new().pointer(0, path.as_ptr()).fd(8, fd);
    // SAFETY: the path is a C string that outlives the call.
    unsafe { attr.call(BPF_OBJ_PIN) }.map(drop)
}

/// The target of a link.
#[derive(Clone, Copy, Debug)]
pub(super) enum LinkTarget<'a> {
    /// A cgroup, given by its directory and its id, which is its inode number.
    Cgroup(BorrowedFd<'a>, u64),
    /// A network device, given by its index.
    Device(u32),
    /// A network device, given by its index. The program runs right behind that of a link to the same device and hook.
    DeviceBehind(u32, BorrowedFd<'a>),
}

impl LinkTarget<'_> {
    /// Returns the properties of a link that attaches a program to this target and hook.
    pub(super) fn link_info(self, hook: u32) -> LinkInfo {
        let (attach_point, target_id) = match self {
            Self::Cgroup(_, number) => (AttachPoint::Cgroup, number),
            Self::Device(device) | Self::DeviceBehind(device, _) => {
                (AttachPoint::Devices, device.into())
            }
        };
        LinkInfo {
            attach_point,
            target_id,
            hook,
        }
    }
}

/// Attaches a program through a new link. On a device, unless the target names another link, the program runs before all
/// others for packets that arrive, and after all others for packets that leave.
pub(super) fn create_link(
    program: BorrowedFd<'_>,
    target: LinkTarget<'_>,
    hook: u32,
) -> io::Result<OwnedFd> {
    let attr = Attr::new().fd(0, program).u32(8, hook);
    let attr = match target {
        LinkTarget::Cgroup(directory, _) => attr.fd(4, directory),
        LinkTarget::Device(device) => {
            let order = if hook == GUARD.hook {
                BPF_F_BEFORE
            } else {
                BPF_F_AFTER
            };
            attr.u32(4, device).u32(12, order)
        }
        LinkTarget::DeviceBehind(device, link) => {
            let flags = BPF_F_AFTER | BPF_F_LINK;
            attr.u32(4, device).u32(12, flags).fd(16, link)
        }
    };
    // SAFETY: the attribute contains no pointers; the command returns a descriptor.
    unsafe { attr.call_for_fd(BPF_LINK_CREATE) }
}

/// Returns true if tc programs can be attached through links. Attaching one to a device that does not exist
/// fails with ENODEV on kernels with tcx, and with EINVAL on others.
pub(super) fn supports_tcx(instructions: &[u64]) -> io::Result<bool> {
    let program = load_program(instructions, ProgramType::Classifier.number(), 0, 0)?;
    let nowhere = LinkTarget::Device(i32::MAX.unsigned_abs());
    match create_link(program.as_fd(), nowhere, GUARD.hook) {
        Err(error) if error.raw_os_error() == Some(libc::ENODEV) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(error),
        Ok(_) => Err(io::Error::other(
            "a device has the index 2147483647, which the probe expects to be unused",
        )),
    }
}

/// Atomically replaces a link's program.
pub(super) fn update_link(link: BorrowedFd<'_>, program: &ProgramFd) -> io::Result<()> {
    let mut attr = Attr::new().fd(0, link).fd(4, program.as_fd());
    // SAFETY: the attribute contains no pointers.
    unsafe { attr.call(BPF_LINK_UPDATE) }.map(drop)
}

/// Detaches a link's program immediately. The kernel frees the link itself some time after it has been closed
/// and unpinned.
pub(super) fn detach_link(link: BorrowedFd<'_>) -> io::Result<()> {
    let mut attr = Attr::new().fd(0, link);
    // SAFETY: the attribute contains no pointers.
    unsafe { attr.call(BPF_LINK_DETACH) }.map(drop)
}

/// The properties of a link.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct LinkInfo {
    /// The attach point.
    pub(super) attach_point: AttachPoint,
    /// The cgroup's id, which is its inode number, or the device's index; 0 if the cgroup or device was
    /// removed.
    pub(super) target_id: u64,
    /// The hook.
    pub(super) hook: u32,
}

/// A link's number, and the number of its program. The kernel never uses the same number for two links or for
/// two programs that exist at the same time.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct LinkIds {
    pub(super) link: u32,
    pub(super) program: u32,
}

/// Reads the numbers of a link and of its program. Returns `None` if the object is not a link.
pub(super) fn link_ids(object: BorrowedFd<'_>) -> io::Result<Option<LinkIds>> {
    if !is_bpf_object("link", object)? {
        return Ok(None);
    }
    let [_, link, program, ..] = object_info(object)?;
    Ok(Some(LinkIds { link, program }))
}

/// Reads the number of a map or program, which is the second field of the kernel's information about each.
pub(super) fn object_id(object: BorrowedFd<'_>) -> io::Result<u32> {
    let [_, id, ..] = object_info(object)?;
    Ok(id)
}

/// Reads the number of a map. Returns `None` if the object is not a map.
pub(super) fn map_id(object: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let is_map = is_bpf_object("map", object)?;
    is_map.then(|| object_id(object)).transpose()
}

/// Reads the properties of a link. Returns `None` if the object is neither a cgroup link nor a tcx link.
///
/// The fields of `struct bpf_link_info` are the type, the id, the program id, then the cgroup's id or the
/// device's index, then the hook.
pub(super) fn link_info(object: BorrowedFd<'_>) -> io::Result<Option<LinkInfo>> {
    if !is_bpf_object("link", object)? {
        return Ok(None);
    }
    let [kind, _, _, _, first, second, third, ..] = object_info(object)?;
    Ok(match kind {
        BPF_LINK_TYPE_CGROUP => Some(LinkInfo {
            attach_point: AttachPoint::Cgroup,
            target_id: u64::from(second) << 32 | u64::from(first),
            hook: third,
        }),
        BPF_LINK_TYPE_TCX => Some(LinkInfo {
            attach_point: AttachPoint::Devices,
            target_id: first.into(),
            hook: second,
        }),
        _ => None,
    })
}

/// Returns true if an object is a tc program with this name.
///
/// In `struct bpf_prog_info`, the type is at offset 0 and the name at offset 64.
pub(super) fn is_classifier(object: BorrowedFd<'_>, name: &str) -> io::Result<bool> {
    if !is_bpf_object("prog", object)? {
        return Ok(false);
    }
    let [kind, .., a, b, c, d] = object_info(object)?;
    let found = [a, b, c, d];
    let found = found.as_bytes().split(|byte| *byte == 0).next();
    Ok(kind == ProgramType::Classifier.number() && found == Some(name.as_bytes()))
}

/// Returns true if a file descriptor refers to a BPF object of this kind, judging by the name of its
/// anonymous inode. The name differs between kernels: `bpf_link` or `bpf-link`, with or without brackets.
fn is_bpf_object(kind: &str, object: BorrowedFd<'_>) -> io::Result<bool> {
    let file = std::fs::read_link(format!("/proc/self/fd/{}", object.as_raw_fd()))?;
    let name = file.to_string_lossy().replace(['[', ']'], "");
    Ok(name.replace('_', "-") == format!("anon-inode:bpf-{kind}"))
}

/// Opens the map that a row of the table describes, through its pin in a directory. Also returns the map's
/// number of entries. Fails if the map's type, sizes or flags differ from the row, or if its key and value
/// sizes differ from the sizes of `K` and `V`.
pub(super) fn open_map<K, V>(directory: &Path, row: &Map) -> Result<(OwnedFd, u32), ReadError> {
    let open = || {
        let map = open_pin(&directory.join(row.name))?;
        let entries = check_map::<K, V>(map.as_fd(), row)?;
        Ok((map, entries))
    };
    open().map_err(|source| ReadError {
        map: row.name,
        source,
    })
}

/// Checks the properties of a map as [`open_map`] does. Returns the map's number of entries.
fn check_map<K, V>(map: BorrowedFd<'_>, row: &Map) -> io::Result<u32> {
    let (found, entries) = map_spec(map)?;
    let (wanted, sizes) = (
        MapSpec::from_table(row),
        [row.key, row.value].map(usize::try_from),
    );
    if found != wanted || sizes != [Ok(size_of::<K>()), Ok(size_of::<V>())] {
        return Err(io::Error::other(format!("it is {found}, not {wanted}")));
    }
    Ok(entries)
}

/// Reads a map's type, sizes and flags, and its number of entries.
///
/// The fields of `struct bpf_map_info` are the type, the id, the key size, the value size, the number of
/// entries, and the flags.
pub(super) fn map_spec(map: BorrowedFd<'_>) -> io::Result<(MapSpec, u32)> {
    let [kind, _, key, value, entries, flags, ..] = object_info(map)?;
    let spec = MapSpec {
        kind,
        key,
        value,
        flags,
    };
    Ok((spec, entries))
}

/// Reads the first 20 words of the kernel's information about a map, program or link.
fn object_info(object: BorrowedFd<'_>) -> io::Result<[u32; 20]> {
    let mut info = [0; 20];
    let mut attr = Attr::new()
        .fd(0, object)
        .u32(4, 80)
        .pointer(8, info.as_mut_ptr());
    // SAFETY: the buffer has 80 bytes, as the attribute declares, and outlives the call.
    unsafe { attr.call(BPF_OBJ_GET_INFO_BY_FD) }?;
    Ok(info)
}

/// Returns true if a program with these instructions can be loaded for a socket-address hook. The verifier
/// returns EINVAL for an unknown helper, and EACCES for an invalid call to a known one.
pub(super) fn can_load(instructions: &[u64], hook: u32) -> io::Result<bool> {
    match load_program(instructions, ProgramType::SocketAddress.number(), hook, 0) {
        Ok(_program) => Ok(true),
        Err(error) if error.raw_os_error() == Some(libc::EINVAL) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Loads a program for a hook. `target` is the BTF id of the kernel function that the program will be
/// attached to, or 0 if there is none.
fn load_program(instructions: &[u64], kind: u32, hook: u32, target: u32) -> io::Result<OwnedFd> {
    let license = c"GPL";
    let attr = Attr::new()
        .u32(0, kind)
        .u32(
            4,
            u32::try_from(instructions.len()).map_err(io::Error::other)?,
        )
        .pointer(8, instructions.as_ptr())
        .pointer(16, license.as_ptr())
        .u32(68, hook)
        .u32(108, target);
    // SAFETY: there are as many instructions as the attribute declares, the licence is a C string, and both
    // outlive the call; the command returns a descriptor.
    unsafe { attr.call_for_fd(BPF_PROG_LOAD) }
}

/// Loads an iterator program for the kernel function with the BTF id `target`.
pub(super) fn load_iterator(instructions: &[u64], target: u32) -> io::Result<OwnedFd> {
    load_program(instructions, BPF_PROG_TYPE_TRACING, BPF_TRACE_ITER, target)
}

/// Attaches an iterator program. `map` is the map to iterate over, if it iterates over one.
pub(super) fn attach_iterator(
    program: BorrowedFd<'_>,
    map: Option<BorrowedFd<'_>>,
) -> io::Result<OwnedFd> {
    // This is a `union bpf_iter_link_info`, which holds only the map's descriptor.
    let info = map.map(|map| map.as_raw_fd());
    let attr = Attr::new().fd(0, program).u32(8, BPF_TRACE_ITER);
    let attr = match &info {
        Some(info) => attr.pointer(16, &raw const *info).u32(24, 4),
        None => attr,
    };
    // SAFETY: `info` has four bytes, as the attribute declares, and outlives the call; the command returns a
    // descriptor.
    unsafe { attr.call_for_fd(BPF_LINK_CREATE) }
}

/// Starts an iteration. Its results can be read from the returned file descriptor.
pub(super) fn open_iterator(link: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let attr = Attr::new().fd(0, link);
    // SAFETY: the attribute contains no pointers; the command returns a descriptor.
    unsafe { attr.call_for_fd(BPF_ITER_CREATE) }
}
