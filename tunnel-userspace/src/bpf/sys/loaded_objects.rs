//! Finds programs, links and maps that exist in the kernel, by their numbers instead of their pins. Except for
//! the programs at a hook, this needs CAP_SYS_ADMIN.

use std::{
    io,
    os::fd::{AsFd as _, BorrowedFd, OwnedFd},
};

use zerocopy::IntoBytes as _;

use super::{Attr, BPF_OBJ_GET_INFO_BY_FD, LinkIds, LinkInfo, link_ids, link_info, map_spec};
use crate::bpf::map_spec::MapSpec;

const BPF_PROG_GET_FD_BY_ID: i64 = 13;
const BPF_MAP_GET_FD_BY_ID: i64 = 14;
const BPF_PROG_QUERY: i64 = 16;
const BPF_LINK_GET_FD_BY_ID: i64 = 30;
const BPF_LINK_GET_NEXT_ID: i64 = 31;

const BPF_F_QUERY_EFFECTIVE: u32 = 1;

/// The maximum number of programs to read for a hook. A cgroup can have 64 programs of its own, and inherits
/// those of its ancestors.
const MAX_PROGRAMS: u32 = 1024;

/// The maximum number of maps that a program of Culvert uses.
const MAX_MAPS: u32 = 64;

/// Returns the numbers of the programs that run for a cgroup's hook, in the order in which they run. If
/// `with_ancestors` is false, leaves out those that are attached to the cgroup's ancestors.
pub(in crate::bpf) fn attached_programs(
    cgroup: BorrowedFd<'_>,
    hook: u32,
    with_ancestors: bool,
) -> io::Result<Vec<u32>> {
    let flags = if with_ancestors {
        BPF_F_QUERY_EFFECTIVE
    } else {
        0
    };
    query_programs(Attr::new().fd(0, cgroup).u32(8, flags), hook)
}

/// Returns the numbers of the programs that run for a hook of a device, in the order in which they run. Leaves out filters.
pub(in crate::bpf) fn programs_on_device(device: u32, hook: u32) -> io::Result<Vec<u32>> {
    query_programs(Attr::new().u32(0, device), hook)
}

/// Returns the numbers of the programs that run for a hook of the target in an attribute.
fn query_programs(target: Attr, hook: u32) -> io::Result<Vec<u32>> {
    let mut ids = vec![0_u32; usize::try_from(MAX_PROGRAMS).map_err(io::Error::other)?];
    let mut attr = target
        .u32(4, hook)
        .pointer(16, ids.as_mut_ptr())
        .u32(24, MAX_PROGRAMS);
    // SAFETY: the buffer has room for as many numbers as the attribute declares, and outlives the call.
    unsafe { attr.call(BPF_PROG_QUERY) }?;
    let count = usize::try_from(attr.read_u32(24)).map_err(io::Error::other)?;
    ids.truncate(count);
    Ok(ids)
}

/// A program in the kernel.
#[derive(Debug)]
pub(in crate::bpf) struct LoadedProgram {
    /// The type, `BPF_PROG_TYPE_…`.
    pub(in crate::bpf) kind: u32,
    pub(in crate::bpf) name: String,
    /// The numbers of the maps that the program uses.
    pub(in crate::bpf) maps: Vec<u32>,
}

/// Reads the properties of the program with this number.
///
/// In `struct bpf_prog_info`, the type is at offset 0, the number of maps at 52, the pointer to their numbers
/// at 56, and the name at 64.
pub(in crate::bpf) fn program_by_id(id: u32) -> io::Result<LoadedProgram> {
    let program = fd_by_id(BPF_PROG_GET_FD_BY_ID, id)?;
    let mut maps = vec![0_u32; usize::try_from(MAX_MAPS).map_err(io::Error::other)?];
    let mut info = Attr::new().u32(52, MAX_MAPS).pointer(56, maps.as_mut_ptr());
    let mut attr = Attr::new()
        .fd(0, program.as_fd())
        .u32(4, 80)
        .pointer(8, &raw mut info);
    // SAFETY: both buffers have the sizes that are declared, and outlive the call.
    unsafe { attr.call(BPF_OBJ_GET_INFO_BY_FD) }?;
    let count = info.read_u32(52).min(MAX_MAPS);
    maps.truncate(usize::try_from(count).map_err(io::Error::other)?);
    let name = [64, 68, 72, 76].map(|offset| info.read_u32(offset));
    Ok(LoadedProgram {
        kind: info.read_u32(0),
        name: name_from(&name),
        maps,
    })
}

/// A map in the kernel.
#[derive(Debug)]
pub(in crate::bpf) struct LoadedMap {
    pub(in crate::bpf) id: u32,
    pub(in crate::bpf) name: String,
    pub(in crate::bpf) spec: MapSpec,
    pub(in crate::bpf) fd: OwnedFd,
}

/// Opens the map with this number.
///
/// In `struct bpf_map_info`, the name is at offset 24.
pub(in crate::bpf) fn map_by_id(id: u32) -> io::Result<LoadedMap> {
    let fd = fd_by_id(BPF_MAP_GET_FD_BY_ID, id)?;
    let (spec, _entries) = map_spec(fd.as_fd())?;
    let [_, _, _, _, _, _, a, b, c, d, ..] = super::object_info(fd.as_fd())?;
    Ok(LoadedMap {
        id,
        name: name_from(&[a, b, c, d]),
        spec,
        fd,
    })
}

/// Opens the link with this number. Returns `None` if it has been removed meanwhile.
pub(in crate::bpf) fn link_by_id(id: u32) -> io::Result<Option<OwnedFd>> {
    match fd_by_id(BPF_LINK_GET_FD_BY_ID, id) {
        Ok(link) => Ok(Some(link)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

/// Returns the numbers and the properties of all cgroup and tcx links.
pub(in crate::bpf) fn loaded_links() -> io::Result<Vec<(LinkIds, LinkInfo)>> {
    let mut found = Vec::new();
    let mut last = 0;
    // The loop ends after the last link.
    while let Some(id) = link_after(last)? {
        last = id;
        let link = match link_by_id(id) {
            Ok(link) => link,
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => return Err(error),
            // A link that is being created can't be opened yet.
            Err(_) => None,
        };
        let Some(link) = link else { continue };
        if let (Some(ids), Some(info)) = (link_ids(link.as_fd())?, link_info(link.as_fd())?) {
            found.push((ids, info));
        }
    }
    Ok(found)
}

fn link_after(last: u32) -> io::Result<Option<u32>> {
    let mut attr = Attr::new().u32(0, last);
    // SAFETY: the attribute contains no pointers.
    match unsafe { attr.call(BPF_LINK_GET_NEXT_ID) } {
        Ok(_) => Ok(Some(attr.read_u32(4))),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(None),
        Err(error) => Err(error),
    }
}

fn fd_by_id(command: i64, id: u32) -> io::Result<OwnedFd> {
    let attr = Attr::new().u32(0, id);
    // SAFETY: the attribute contains no pointers; the command returns a descriptor.
    unsafe { attr.call_for_fd(command) }
}

/// Returns a name that ends with a zero byte.
fn name_from(words: &[u32; 4]) -> String {
    let bytes = words.as_bytes().split(|byte| *byte == 0).next();
    String::from_utf8_lossy(bytes.unwrap_or_default()).into_owned()
}
