//! Many entries of a map with one call (aya has no batches).

use std::{io, os::fd::BorrowedFd};

use zerocopy::{FromBytes, Immutable, IntoBytes};

use super::{Attr, BPF_MAP_TYPE_ARRAY, shape};

const BPF_MAP_LOOKUP_BATCH: i64 = 24;
const BPF_MAP_UPDATE_BATCH: i64 = 26;

/// Reads the values of an array from its beginning, as many as there is room for, with one call.
/// The map's values must be of this type.
pub(in crate::bpf) fn array_values<V: FromBytes>(
    map: BorrowedFd<'_>,
    entries: u32,
) -> io::Result<Vec<V>> {
    let length = usize::try_from(entries).map_err(io::Error::other)?;
    let held = shape(map)?;
    let is_ours =
        held.kind == BPF_MAP_TYPE_ARRAY && usize::try_from(held.value) == Ok(size_of::<V>());
    if !is_ours {
        return Err(io::Error::other(format!(
            "{held} is no array of such values"
        )));
    }
    let mut keys = vec![0_u32; length];
    let mut values = vec![0_u8; length.saturating_mul(size_of::<V>())];
    let mut next = 0_u32;
    let mut attr = Attr::new()
        .pointer(8, &raw mut next)
        .pointer(16, keys.as_mut_ptr())
        .pointer(24, values.as_mut_ptr())
        .u32(32, entries)
        .fd(36, map);
    // SAFETY: both buffers have room for as many keys and values as the attribute says; a key has
    // four bytes, and a value as many as its type.
    match unsafe { attr.call_mut(BPF_MAP_LOOKUP_BATCH) } {
        Ok(_) => {}
        // There are no more behind them.
        Err(error) if error.raw_os_error() == Some(libc::ENOENT) => {}
        Err(error) => return Err(error),
    }
    let values = values.chunks_exact(size_of::<V>());
    let values = values.map(V::read_from_bytes).collect::<Result<_, _>>();
    values.map_err(|_size| io::Error::other("a value of another size"))
}

/// Writes values, each under its key, with one call. Says how many were written, in their order, and
/// what ended it if those are not all. The map's keys and values must be of these types.
pub(in crate::bpf) fn write_many<K: IntoBytes + Immutable, V: IntoBytes + Immutable>(
    map: BorrowedFd<'_>,
    keys: &[K],
    values: &[V],
) -> (usize, io::Result<()>) {
    let length = keys.len().min(values.len());
    let Ok(count) = u32::try_from(length) else {
        return (0, Err(io::Error::other("too many values")));
    };
    if count == 0 {
        return (0, Ok(()));
    }
    let mut attr = Attr::new()
        .pointer(16, keys.as_bytes().as_ptr())
        .pointer(24, values.as_bytes().as_ptr())
        .u32(32, count)
        .fd(36, map);
    // SAFETY: both hold as many keys and values as the attribute says, and each of them has as many
    // bytes as its type, which is the map's. The kernel only reads them.
    match unsafe { attr.call_mut(BPF_MAP_UPDATE_BATCH) } {
        Ok(_) => (length, Ok(())),
        // The kernel writes down how many it came to, unless it didn't come to any.
        Err(error) => {
            let written = usize::try_from(attr.read_u32(32)).ok();
            let written = written.filter(|written| *written < length);
            (written.unwrap_or(0), Err(error))
        }
    }
}
