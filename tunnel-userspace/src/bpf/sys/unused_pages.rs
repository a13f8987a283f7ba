//! Gives the memory of file-backed data back to the page cache.

use std::{ffi::c_void, ptr::NonNull};

use nix::{
    sys::mman::{MmapAdvise, madvise},
    unistd::{SysconfVar, sysconf},
};

/// Releases the memory of constant data, which the kernel reads from the program file again when it is used. Does nothing if
/// the kernel refuses.
pub(in crate::bpf) fn release(data: &'static [u8]) {
    let page = sysconf(SysconfVar::PAGE_SIZE).ok().flatten();
    let page = page.and_then(|size| usize::try_from(size).ok());
    let Some(page) = page.filter(|size| size.is_power_of_two()) else {
        return;
    };
    // Only whole pages, because their neighbours may be in use.
    let skipped = data.as_ptr().align_offset(page);
    let Some(whole) = data.get(skipped..) else {
        return;
    };
    let length = whole.len() & !(page - 1);
    if length == 0 {
        return;
    }
    let start = NonNull::from(whole).cast::<c_void>();
    // SAFETY: the pages are mapped from the program file, and nothing has written to them, because they are constant.
    let advised = unsafe { madvise(start, length, MmapAdvise::MADV_DONTNEED) };
    if let Err(error) = advised {
        tracing::debug!(%error, "the memory of constant data stays in use");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn released_data_is_read_again_when_it_is_used() {
        static DATA: [u8; 1 << 16] = [7; 1 << 16];

        release(&DATA);
        assert!(DATA.iter().all(|byte| *byte == 7));
    }
}
