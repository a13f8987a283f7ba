//! How much freed memory the allocator keeps, and when it gives that back.

/// The C library gives the pages of freed buffers back at once, and each byte of the tunnel would pay
/// for pages that are mapped, cleared and faulted in anew. So a few MiB of them stay, for each of its
/// arenas; what is freed beyond goes back as ever.
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

/// Gives back what is free: a start needs much memory for what it reads, and what comes after it
/// little.
#[cfg(target_env = "gnu")]
#[expect(unsafe_code, reason = "no crate calls this")]
pub(crate) fn give_back() {
    // SAFETY: takes a number, and works beside other threads. It says whether there was anything.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Other C libraries have nothing to set.
#[cfg(not(target_env = "gnu"))]
pub(crate) const fn keep() {}

/// Nor to call.
#[cfg(not(target_env = "gnu"))]
pub(crate) const fn give_back() {}
