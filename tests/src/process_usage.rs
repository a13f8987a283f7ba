//! A process's memory usage, CPU time and open files, as read from `/proc`.

use std::{fs, time::Duration};

use anyhow::{Context as _, Result};
use nix::unistd::{SysconfVar, sysconf};

/// Returns a process's resident memory, in bytes.
pub fn resident_memory(pid: i32) -> Result<u64> {
    memory(pid, "VmRSS:")
}

/// Returns a process's peak resident memory so far, in bytes.
pub fn peak_memory(pid: i32) -> Result<u64> {
    memory(pid, "VmHWM:")
}

fn memory(pid: i32, field: &str) -> Result<u64> {
    let text = fs::read_to_string(format!("/proc/{pid}/status"))?;
    let kilobytes: u64 = status_field(&text, field)?
        .trim_end_matches(" kB")
        .parse()?;
    Ok(kilobytes * 1024)
}

/// Returns the value of a field in the contents of `/proc/<pid>/status`.
fn status_field<'a>(status: &'a str, field: &str) -> Result<&'a str> {
    let value = status.lines().find_map(|line| line.strip_prefix(field));
    Ok(value
        .with_context(|| format!("/proc/<pid>/status has no {field}"))?
        .trim())
}

/// Returns how many voluntary context switches a process's threads have made. Threads that have exited are
/// excluded.
pub fn voluntary_switches(pid: i32) -> Result<u64> {
    let mut sleeps = 0;
    for text in thread_files(pid, "status")? {
        sleeps += status_field(&text, "voluntary_ctxt_switches:")?.parse::<u64>()?;
    }
    Ok(sleeps)
}

/// Reads the given file in `/proc` for each thread of a process.
fn thread_files(pid: i32, file: &str) -> Result<Vec<String>> {
    let mut texts = Vec::new();
    for thread in fs::read_dir(format!("/proc/{pid}/task"))? {
        // The thread may have exited since the directory was read.
        if let Ok(text) = fs::read_to_string(thread?.path().join(file)) {
            texts.push(text);
        }
    }
    Ok(texts)
}

/// Returns the total system and user time of a process's threads, with nanosecond resolution (see
/// `Documentation/scheduler/sched-stats.rst` in the kernel source). Threads that have exited are excluded.
pub fn thread_cpu_time(pid: i32) -> Result<Duration> {
    let mut nanoseconds = 0;
    for text in thread_files(pid, "schedstat")? {
        let first = text
            .split(' ')
            .next()
            .context("a schedstat file is empty")?;
        nanoseconds += first
            .parse::<u64>()
            .context("a schedstat file doesn't begin with a number")?;
    }
    Ok(Duration::from_nanos(nanoseconds))
}

/// Returns how many files a process has open.
pub fn open_files(pid: i32) -> Result<usize> {
    Ok(fs::read_dir(format!("/proc/{pid}/fd"))?.count())
}

/// Returns the total system and user time of a process, with a resolution of one clock tick.
pub fn process_cpu_time(pid: i32) -> Result<Duration> {
    let text = fs::read_to_string(format!("/proc/{pid}/stat"))?;
    let (_, rest) = text
        .rsplit_once(") ")
        .context("/proc/<pid>/stat has no name in parentheses")?;
    // utime and stime are fields 14 and 15; `rest` starts with field 3.
    let ticks = rest
        .split(' ')
        .skip(11)
        .take(2)
        .map(str::parse::<u64>)
        .sum::<Result<u64, _>>()?;
    let second = sysconf(SysconfVar::CLK_TCK)?.context("the system doesn't define CLK_TCK")?;
    let second = u64::try_from(second)?.max(1);
    Ok(Duration::from_millis(ticks * 1000 / second))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wait;

    #[test]
    fn the_usage_of_this_process_is_read() -> Result<()> {
        let own = i32::try_from(std::process::id())?;

        assert!(resident_memory(own)? > 1 << 20);
        assert!(peak_memory(own)? >= resident_memory(own)? / 2);
        assert!(open_files(own)? >= 3);
        let before = (process_cpu_time(own)?, thread_cpu_time(own)?);
        wait::until(Duration::from_secs(10), || {
            std::hint::black_box((0..1_000_000_u64).sum::<u64>());
            process_cpu_time(own).is_ok_and(|now| now > before.0)
        })?;
        assert!(thread_cpu_time(own)? > before.1);
        let before = voluntary_switches(own)?;
        wait::until(Duration::from_secs(10), || {
            voluntary_switches(own).is_ok_and(|now| now > before)
        })?;
        Ok(())
    }
}
