//! An array of numbers in the kernel, mapped into this process (Linux 5.5). Programs add to it at the
//! same time, so that every access is atomic.

use std::{
    io,
    os::fd::{AsFd as _, AsRawFd as _, OwnedFd},
    path::Path,
    ptr::{self, NonNull},
    slice,
    sync::atomic::AtomicU64,
};

use tunnel_common::table::CONNS;

use super::{Shape, open_pin, shape};

/// The numbers of an array, for as long as this lives; the map lives as long.
#[derive(Debug)]
pub(in crate::bpf) struct Words {
    start: NonNull<AtomicU64>,
    count: usize,
}

// SAFETY: the memory is mapped until the value is dropped, and only atomics are given out.
unsafe impl Send for Words {}
// SAFETY: as above.
unsafe impl Sync for Words {}

impl Words {
    /// Maps an array of the shape of `conns` that is pinned at a path.
    pub(in crate::bpf) fn open(pin: &Path) -> io::Result<Self> {
        let map: OwnedFd = open_pin(pin)?;
        let (found, entries) = shape(map.as_fd())?;
        let wanted = Shape::of(&CONNS);
        if found != wanted {
            return Err(io::Error::other(format!("it is {found}, not {wanted}")));
        }
        let count = usize::try_from(entries).map_err(io::Error::other)?;
        // SAFETY: a new mapping, wherever the kernel likes; of a file that is open.
        let start = unsafe {
            libc::mmap(
                ptr::null_mut(),
                length(count),
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                map.as_raw_fd(),
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = NonNull::new(start.cast());
        let start = start.ok_or_else(|| io::Error::other("mapped at address 0"))?;
        Ok(Self { start, count })
    }

    /// The numbers.
    pub(in crate::bpf) const fn get(&self) -> &[AtomicU64] {
        // SAFETY: the kernel mapped at least as many words as the array has entries of eight bytes,
        // on a page of their own; they stay mapped as long as `self`, and have the layout of atomics.
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.count) }
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        // SAFETY: the mapping is ours, whole, and nobody has a reference into it any more.
        let result = unsafe { libc::munmap(self.start.as_ptr().cast(), length(self.count)) };
        if result != 0 {
            let error = io::Error::last_os_error();
            tracing::debug!(%error, "an array stays mapped");
        }
    }
}

const fn length(count: usize) -> usize {
    count.saturating_mul(size_of::<AtomicU64>())
}
