//! What a process uses, as the kernel tells.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use nix::unistd::{SysconfVar, sysconf};

/// How many bytes of memory a process has resident.
///
/// # Errors
///
/// When the process is gone.
pub fn resident(pid: i32) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("VmRSS:"))
        .context("no VmRSS")?;
    let kilobytes: u64 = line.trim().trim_end_matches(" kB").parse()?;
    Ok(kilobytes * 1024)
}

/// How many files a process holds open.
///
/// # Errors
///
/// When the process is gone.
pub fn open_files(pid: i32) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// How long a process has run on a CPU, in the kernel and outside.
///
/// # Errors
///
/// When the process is gone.
pub fn cpu(pid: i32) -> Result<Duration> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = text.rsplit_once(") ").context("no name")?;
    // utime and stime are fields 14 and 15; the first behind the name is field 3.
    let ticks = rest
        .split(' ')
        .skip(11)
        .take(2)
        .map(str::parse::<u64>)
        .sum::<Result<u64, _>>()?;
    let second = sysconf(SysconfVar::CLK_TCK)?.context("no CLK_TCK")?;
    let second = u64::try_from(second)?.max(1);
    Ok(Duration::from_millis(ticks * 1000 / second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait;

    #[test]
    fn the_kernel_tells_of_this_process() -> Result<()> {
        let own = i32::try_from(std::process::id())?;

        assert!(resident(own)? > 1 << 20);
        assert!(open_files(own)? >= 3);
        let before = cpu(own)?;
        wait::until(Duration::from_secs(10), || {
            std::hint::black_box((0..1_000_000_u64).sum::<u64>());
            cpu(own).is_ok_and(|now| now > before)
        })
    }
}
