//! A BPF array of counters, mapped into this process's memory (Linux 5.5). Programs change the counters
//! concurrently, so every access is atomic.

use std::{io, num::NonZero, path::Path, ptr::NonNull, sync::atomic::AtomicU64};

use nix::sys::mman::{MapFlags, ProtFlags, mmap, munmap};
use tunnel_common::table::CONNS;

use super::open_map;
use crate::reconcile::ReadError;

/// The counters in a BPF array. The memory mapping keeps the BPF map alive.
#[derive(Debug)]
pub(in crate::bpf) struct MappedCounters(NonNull<[AtomicU64]>);

// SAFETY: the memory stays mapped until the value is dropped, and is only accessed by atomic operations.
unsafe impl Send for MappedCounters {}
// SAFETY: as above.
unsafe impl Sync for MappedCounters {}

impl MappedCounters {
    /// Memory-maps the array `conns` that is pinned in a directory.
    pub(in crate::bpf) fn open(directory: &Path) -> Result<Self, ReadError> {
        let (map, entries) = open_map::<u32, u64>(directory, &CONNS)?;
        let mapped = || -> io::Result<Self> {
            let count = usize::try_from(entries).map_err(io::Error::other)?;
            // If the length saturates, mmap fails.
            let length = NonZero::new(count.saturating_mul(size_of::<AtomicU64>()));
            let length = length.ok_or_else(|| io::Error::other("the map has no entries"))?;
            let access = ProtFlags::PROT_READ | ProtFlags::PROT_WRITE;
            // SAFETY: this is a new mapping of an open file, at an address that the kernel chooses.
            let start = unsafe { mmap(None, length, access, MapFlags::MAP_SHARED, &map, 0)? };
            Ok(Self(NonNull::slice_from_raw_parts(start.cast(), count)))
        };
        mapped().map_err(|source| ReadError {
            map: CONNS.name,
            source,
        })
    }

    /// Returns the counters.
    pub(in crate::bpf) const fn get(&self) -> &[AtomicU64] {
        // SAFETY: the mapping starts at a page and has at least eight bytes per entry; it lives as long as
        // `self`, and `AtomicU64` has the layout of `u64`.
        unsafe { self.0.as_ref() }
    }
}

impl Drop for MappedCounters {
    fn drop(&mut self) {
        let length = size_of_val(self.get());
        // SAFETY: this value owns the complete mapping, and no references into the mapping are left.
        if let Err(error) = unsafe { munmap(self.0.cast(), length) } {
            tracing::debug!(%error, "cannot unmap a BPF array");
        }
    }
}
