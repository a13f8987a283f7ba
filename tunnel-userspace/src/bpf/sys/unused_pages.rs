//! Gives the memory of the program file's pages back to the page cache.

use std::{
    ffi::c_void,
    fs,
    ptr::{self, NonNull},
};

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
    // SAFETY: the pages are mapped from the program file, and nothing has written to them, because they are constant.
    unsafe {
        release_pages(NonNull::from(whole).cast(), length);
    }
}

/// Releases the memory of the program's code: much of it runs only at the start. The kernel maps what runs again from the page
/// cache. Does nothing if the kernel refuses.
pub(in crate::bpf) fn release_code() {
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    let Ok(program) = fs::read_link("/proc/self/exe") else {
        return;
    };
    let program = program.to_string_lossy();
    let Some((start, end)) = maps.lines().find_map(|line| code_of(&program, line)) else {
        return;
    };
    if let Some(pages) = NonNull::new(ptr::with_exposed_provenance_mut(start)) {
        // SAFETY: the pages are mapped from the program file, and nothing has written to them, because they are not writable.
        unsafe {
            release_pages(pages, end - start);
        }
    }
}

/// Returns the addresses of the code of a program file, if a line of `/proc/self/maps` describes it (proc_pid_maps(5)).
fn code_of(program: &str, line: &str) -> Option<(usize, usize)> {
    let (addresses, rest) = line.split_once(' ')?;
    if !rest.starts_with("r-xp") || !rest.ends_with(program) {
        return None;
    }
    let (start, end) = addresses.split_once('-')?;
    let parse = |address| usize::from_str_radix(address, 16).ok();
    Some((parse(start)?, parse(end)?))
}

/// Releases whole pages.
///
/// # Safety
///
/// The pages must be mapped from a file, and unchanged.
unsafe fn release_pages(start: NonNull<c_void>, length: usize) {
    // SAFETY: the kernel reads the pages from the file again when they are used.
    let advised = unsafe { madvise(start, length, MmapAdvise::MADV_DONTNEED) };
    if let Err(error) = advised {
        tracing::debug!(%error, "pages of the program file stay in memory");
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

    #[test]
    fn released_code_runs_on_and_takes_less_memory() {
        let resident = || {
            let status = fs::read_to_string("/proc/self/status").expect("this process");
            let line = status.lines().find(|line| line.starts_with("RssFile:"));
            let field = line.and_then(|line| line.split_whitespace().nth(1));
            field.and_then(|kib| kib.parse().ok()).unwrap_or(0_u64)
        };
        // Other tests of this process may use more of the code meanwhile.
        let takes_less = || {
            let before = resident();
            release_code();
            resident() < before
        };
        assert!((0..1000).any(|_| takes_less()));
    }
}
