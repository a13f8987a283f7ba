//! Settings of the allocator: the freed memory that it keeps, and the time when it is returned.

/// Makes glibc keep a few MiB of freed pages per arena. By default it returns the pages of freed buffers
/// at once, and each byte of the tunnel would pay for mapping, clearing and faulting pages again. Freed
/// memory beyond these thresholds is returned as usual.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no crate sets this")]
pub(crate) fn keep() {
    for (what, bytes) in [
        (libc::M_MMAP_THRESHOLD, 4 << 20),
        (libc::M_TRIM_THRESHOLD, 16 << 20),
        (libc::M_TOP_PAD, 1 << 20),
    ] {
        // SAFETY: takes two numbers, and no other thread runs yet. Its refusal changes nothing.
        unsafe {
            libc::mallopt(what, bytes);
        }
    }
}

/// Returns free memory to the kernel: the start needs much memory for the objects that it reads, and the
/// time after it little.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no crate calls this")]
pub(crate) fn give_back() {
    // SAFETY: takes a number, and may run concurrently with other threads. Its result is not needed.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Does nothing: other C libraries have no such settings.
#[cfg(not(target_env = "gnu"))]
pub(crate) const fn keep() {}

/// Does nothing, as above.
#[cfg(not(target_env = "gnu"))]
pub(crate) const fn give_back() {}
