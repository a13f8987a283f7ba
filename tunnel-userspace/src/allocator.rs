//! Tunes glibc's malloc: how much freed memory it keeps, and when it returns memory to the kernel.

/// Makes glibc keep a few MiB of freed memory per arena. By default it returns the pages of freed buffers to
/// the kernel at once, so the kernel would have to map and zero pages again for every tunnel buffer. Freed
/// memory beyond these thresholds is returned by [`give_back`].
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe crate wraps mallopt")]
pub fn keep_freed_memory() {
    for (option, bytes) in [
        (libc::M_MMAP_THRESHOLD, 4 << 20),
        (libc::M_TRIM_THRESHOLD, 16 << 20),
        (libc::M_TOP_PAD, 1 << 20),
    ] {
        // SAFETY: mallopt takes two integers, and no other thread is running yet. If it fails, the default
        // stays in effect.
        unsafe {
            libc::mallopt(option, bytes);
        }
    }
}

/// Returns free memory to the kernel. By itself, glibc returns only memory at the end of an arena, which long-lived
/// allocations often keep.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe crate wraps malloc_trim")]
pub fn give_back() {
    // SAFETY: malloc_trim takes an integer and is thread-safe.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Returns how many bytes are allocated, or `None` if the C library doesn't count them.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe crate wraps mallinfo2")]
pub(crate) fn allocated() -> Option<usize> {
    // SAFETY: mallinfo2 takes no arguments and is thread-safe.
    let info = unsafe { libc::mallinfo2() };
    Some(info.uordblks.saturating_add(info.hblkhd))
}

/// Does nothing: other C libraries lack `mallopt`.
#[cfg(not(target_env = "gnu"))]
pub const fn keep_freed_memory() {}

/// Does nothing: other C libraries lack `malloc_trim`.
#[cfg(not(target_env = "gnu"))]
pub const fn give_back() {}

/// Returns `None`: other C libraries lack `mallinfo2`.
#[cfg(not(target_env = "gnu"))]
pub(crate) const fn allocated() -> Option<usize> {
    None
}
