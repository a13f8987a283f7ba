//! The task that returns freed memory to the kernel. Without it, a daemon would keep the memory that it once needed,
//! for example for the buffers of many streams.

use std::{fs, io, time::Duration};

use nix::unistd::{SysconfVar, sysconf};
use tokio::{
    sync::watch,
    task::spawn_blocking,
    time::{Instant, interval},
};
use tracing::debug;

use crate::{allocator, drain};

/// The interval between two checks.
const INTERVAL: Duration = Duration::from_secs(1);
/// The number of consecutive checks that must find freed memory. A busy process soon uses freed memory again.
const CHECKS: u32 = 3;
/// The minimum amount of freed memory to return, in bytes.
const MIN_FREED: usize = 4 << 20;

/// Returns freed memory to the kernel, whenever there has been much of it for a few seconds, until the drain begins.
pub async fn give_back(mut draining: watch::Receiver<bool>) {
    let mut checks = Checks::default();
    let mut interval = interval(INTERVAL);
    loop {
        tokio::select! {
            () = drain::begun(&mut draining) => return,
            _ = interval.tick() => {}
        }
        let Ok(resident) = resident() else { continue };
        let Some(allocated) = checks.needs_look(resident).then(allocator::allocated) else {
            continue;
        };
        let Some(allocated) = allocated else { continue };
        if !checks.must_give_back(resident, allocated) {
            continue;
        }
        let start = Instant::now();
        // Other threads wait only while the arena that they use is trimmed.
        drop(spawn_blocking(allocator::give_back).await);
        let now = self::resident().unwrap_or(resident);
        checks.have_given_back(now, allocator::allocated().unwrap_or(allocated));
        let (before, after) = (resident >> 20, now >> 20);
        debug!(took = ?start.elapsed(), before, after, "returned freed memory (in MiB)");
    }
}

/// Returns the process's resident memory, in bytes, without the pages of files such as the program itself, which the
/// kernel reclaims on its own.
fn resident() -> io::Result<usize> {
    let text = fs::read_to_string("/proc/self/statm")?;
    let mut fields = text.split(' ').map(|pages| pages.parse::<usize>().ok());
    let (resident, shared) = (fields.nth(1).flatten(), fields.next().flatten());
    let pages = resident
        .zip(shared)
        .map(|(resident, shared)| resident.saturating_sub(shared));
    let size = sysconf(SysconfVar::PAGE_SIZE)?.and_then(|size| usize::try_from(size).ok());
    let bytes = pages
        .zip(size)
        .and_then(|(pages, size)| pages.checked_mul(size));
    bytes.ok_or_else(|| io::Error::other("/proc/self/statm has no resident size"))
}

/// The results of earlier checks.
#[derive(Debug, Default)]
struct Checks {
    /// The resident memory that is not allocated, such as the stacks of threads, and that can't be returned.
    overhead: Option<usize>,
    /// The number of consecutive checks that found freed memory.
    found: u32,
}

impl Checks {
    /// Returns true if there may be much freed memory, so that the allocator, which locks its arenas to count, must
    /// be asked.
    const fn needs_look(&mut self, resident: usize) -> bool {
        let Some(overhead) = self.overhead else {
            return true;
        };
        let may_have = resident.saturating_sub(overhead) >= MIN_FREED;
        if !may_have {
            self.found = 0;
        }
        may_have
    }

    /// Returns true if there has been much freed memory for a few checks.
    fn must_give_back(&mut self, resident: usize, allocated: usize) -> bool {
        let unused = resident.saturating_sub(allocated);
        let overhead = self.overhead.map_or(unused, |least| least.min(unused));
        self.overhead = Some(overhead);
        self.found = if unused - overhead >= MIN_FREED {
            self.found + 1
        } else {
            0
        };
        self.found >= CHECKS
    }

    /// Records that freed memory has been returned. The rest can't be returned.
    const fn have_given_back(&mut self, resident: usize, allocated: usize) {
        *self = Self {
            overhead: Some(resident.saturating_sub(allocated)),
            found: 0,
        };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MIB: usize = 1 << 20;

    /// Checks once, and returns true if memory must be given back.
    fn check(checks: &mut Checks, resident: usize, allocated: usize) -> bool {
        checks.needs_look(resident * MIB) && checks.must_give_back(resident * MIB, allocated * MIB)
    }

    #[test]
    fn memory_is_given_back_when_it_has_been_free_for_a_few_checks() {
        let mut checks = Checks::default();
        assert!(!check(&mut checks, 24, 4), "idle");
        for _ in 0..9 {
            assert!(!check(&mut checks, 424, 404), "all of it is in use");
        }
        for _ in 1..CHECKS {
            assert!(!check(&mut checks, 424, 4), "it may be needed again soon");
        }
        assert!(check(&mut checks, 424, 4));
    }

    #[test]
    fn memory_that_is_used_again_or_cannot_be_returned_is_kept() {
        let mut checks = Checks::default();
        assert!(!check(&mut checks, 24, 4));
        for _ in 0..9 {
            assert!(!check(&mut checks, 424, 4));
            assert!(!check(&mut checks, 424, 4));
            assert!(!check(&mut checks, 424, 402), "in use");
        }

        checks.have_given_back(300 * MIB, 4 * MIB);
        for _ in 0..9 {
            assert!(!check(&mut checks, 300, 4), "fragmented");
        }
        for _ in 1..CHECKS {
            assert!(!check(&mut checks, 340, 4));
        }
        assert!(check(&mut checks, 340, 4));
    }

    #[test]
    fn memory_that_is_freed_after_other_memory_was_returned_is_given_back() {
        let mut checks = Checks::default();
        assert!(!check(&mut checks, 24, 4));
        checks.have_given_back(60 * MIB, 40 * MIB);
        assert!(!check(&mut checks, 60, 40));
        for _ in 1..CHECKS {
            assert!(!check(&mut checks, 60, 4));
        }
        assert!(check(&mut checks, 60, 4));
    }

    #[test]
    fn the_memory_of_this_process_is_known() {
        let kept = vec![1_u8; 8 * MIB];
        assert!(resident().expect("read") > kept.len());
        assert!(allocator::allocated().is_none_or(|bytes| bytes > kept.len()));
    }
}
