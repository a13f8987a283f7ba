//! An array of numbers in the kernel, mapped into this process (Linux 5.5). Programs add to them
//! concurrently, so every access is atomic.

use std::{io, num::NonZero, path::Path, ptr::NonNull, sync::atomic::AtomicU64};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use tunnel_common::table::CONNS;

use super::open_map;
use crate::reconcile::ReadError;

/// The numbers of an array. The mapping keeps the map alive.
#[derive(Debug)]
pub(in crate::bpf) struct Words(NonNull<[AtomicU64]>);

// SAFETY: the memory is mapped until the value is dropped, and only atomics are given out.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Maps the array `conns` that is pinned in a folder.
    pub(in crate::bpf) fn open(folder: &Path) -> Result<Self, ReadError> {
        let (map, entries) = open_map::<u32, u64>(folder, &CONNS)?;
        let mapped = || -> io::Result<Self> {
            let count = usize::try_from(entries).map_err(io::Error::other)?;
            // A saturated length is refused by the kernel.
            let length = NonZero::new(count.saturating_mul(size_of::<AtomicU64>()));
            let length = length.ok_or_else(|| io::Error::other("it has no entries"))?;
            let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: a new mapping, wherever the kernel likes; of a file that is open.
            let start = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, &map, 0)? };
            Ok(Self(NonNull::slice_from_raw_parts(start.cast(), count)))
        };
        mapped().map_err(|source| ReadError {
            map: CONNS.name,
            source,
        })
    }

    /// Returns the numbers.
    pub(in crate::bpf) const fn get(&self) -> &[AtomicU64] {
        // SAFETY: the kernel mapped at least as many words as the array has entries of eight bytes,
        // on a page of their own; they stay mapped as long as `self`, and have the layout of atomics.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        let length = size_of_val(self.get());
        // SAFETY: the mapping is ours and complete, and no reference into it is left.
        if let Err(error) = unsafe { munmap(self.0.cast(), length) } {
            tracing::debug!(%error, "an array stays mapped");
        }
    }
}
