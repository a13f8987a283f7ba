//! Tunes glibc's malloc: how much freed memory it keeps, and when it returns memory to the kernel.

/// Makes glibc keep a few MiB of freed memory per arena. By default it returns the pages of freed buffers to
/// the kernel at once, so the kernel would have to map and zero pages again for every tunnel buffer. Freed
/// memory beyond these thresholds is returned as usual.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe crate wraps mallopt")]
pub(crate) fn keep_freed_memory() {
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

/// Returns free memory to the kernel. Reading all objects at startup takes much more memory than the daemon
/// needs afterwards.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no safe crate wraps malloc_trim")]
pub(crate) fn give_back() {
    // SAFETY: malloc_trim takes an integer and is thread-safe.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Does nothing: other C libraries lack `mallopt`.
#[cfg(not(target_env = "gnu"))]
pub(crate) const fn keep_freed_memory() {}

/// Does nothing: other C libraries lack `malloc_trim`.
#[cfg(not(target_env = "gnu"))]
pub(crate) const fn give_back() {}
