//! The lab's cgroups, which are always below a hierarchy's root and never the root itself.

use std::{
    ffi::OsString,
    fs, io,
    os::unix::ffi::{OsStrExt as _, OsStringExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    errno::Errno,
    sys::signal::{Signal, kill},
    unistd::Pid,
};

use crate::wait;

/// The time limit for a cgroup's processes to exit after they are killed.
const TIME_LIMIT: Duration = Duration::from_secs(5);

/// Returns the mount point of the cgroup v2 hierarchy, even if v1 hierarchies are mounted as well.
pub fn mount_point() -> Result<PathBuf> {
    let mounted = mount_points("cgroup2")?.into_iter().next();
    mounted.context("no cgroup2 file system is mounted")
}

/// Returns the mount points of the cgroup v1 hierarchies, usually one per controller. The list is empty if
/// only v2 is mounted.
pub fn v1_mount_points() -> Result<Vec<PathBuf>> {
    mount_points("cgroup")
}

fn mount_points(kind: &str) -> Result<Vec<PathBuf>> {
    let mounts = fs::read("/proc/self/mounts").context("cannot read /proc/self/mounts")?;
    Ok(parse_mounts(&mounts, kind))
}

/// Returns the mount points of all file systems of the given type in a mount table.
fn parse_mounts(mounts: &[u8], kind: &str) -> Vec<PathBuf> {
    let target = |line: &[u8]| {
        let mut fields = line.split(|byte| *byte == b' ');
        let target = fields.nth(1)?;
        (fields.next()? == kind.as_bytes()).then(|| unescape(target))
    };
    let lines = mounts.split(|byte| *byte == b'\n');
    lines.filter_map(target).collect()
}

/// Unescapes a field in the mount table, which escapes a space, tab, newline or backslash as `\` and three
/// octal digits.
fn unescape(field: &[u8]) -> PathBuf {
    let mut plain = Vec::with_capacity(field.len());
    let mut rest = field;
    while let Some((byte, tail)) = rest.split_first() {
        let digits = tail.get(..3).filter(|_| *byte == b'\\');
        let escaped = digits
            .and_then(|digits| std::str::from_utf8(digits).ok())
            .and_then(|digits| u8::from_str_radix(digits, 8).ok());
        plain.push(escaped.unwrap_or(*byte));
        rest = if escaped.is_some() { &tail[3..] } else { tail };
    }
    PathBuf::from(OsString::from_vec(plain))
}

/// Creates a cgroup, including any missing parents.
pub fn create(path: &Path) -> Result<()> {
    fs::create_dir_all(path).with_context(|| format!("cannot create cgroup {}", path.display()))
}

/// Moves the calling process into a cgroup.
pub fn enter(path: &Path) -> Result<()> {
    fs::write(path.join("cgroup.procs"), "0")
        .with_context(|| format!("cannot enter cgroup {}", path.display()))
}

/// Kills all processes in a cgroup and its descendants, and removes these cgroups, deepest first.
pub fn remove(path: &Path) -> Result<()> {
    wait::until(TIME_LIMIT, || match remove_once(path) {
        Ok(()) => true,
        Err(error) => error.kind() == io::ErrorKind::NotFound,
    })
    .with_context(|| format!("cannot remove cgroup {}", path.display()))
}

fn remove_once(path: &Path) -> io::Result<()> {
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            remove_once(&entry.path())?;
        }
    }
    for process in processes(path)? {
        match kill(process, Signal::SIGKILL) {
            // The process may have exited since the list of processes was read.
            Ok(()) | Err(Errno::ESRCH) => {}
            Err(error) => return Err(error.into()),
        }
    }
    fs::remove_dir(path)
}

/// Returns the processes in a cgroup and its descendants.
pub fn processes_below(path: &Path) -> io::Result<Vec<Pid>> {
    let mut found = processes(path)?;
    for entry in fs::read_dir(path)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            // The child cgroup may have been removed since the directory was read.
            found.extend(processes_below(&entry.path()).unwrap_or_default());
        }
    }
    Ok(found)
}

/// Returns the processes in the cgroup itself, excluding those in its descendants.
fn processes(path: &Path) -> io::Result<Vec<Pid>> {
    let text = fs::read_to_string(path.join("cgroup.procs"))?;
    // The kernel lists a process in another PID namespace as 0.
    Ok(text
        .lines()
        .filter_map(|line| line.parse().ok())
        .filter(|pid| *pid > 0)
        .map(Pid::from_raw)
        .collect())
}

/// Returns the directories directly below `root` whose names `keep` accepts.
pub(crate) fn subdirectories(root: &Path, keep: impl Fn(&str) -> bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(root).into_iter().flatten().flatten();
    entries
        .filter(|entry| std::str::from_utf8(entry.file_name().as_bytes()).is_ok_and(&keep))
        .map(|entry| entry.path())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_versions_are_found_even_with_blanks_in_the_path() {
        let mounts = b"tmpfs /sys/fs/cgroup tmpfs rw 0 0\n\
            cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n\
            cgroup2 /mnt/control\\040groups cgroup2 rw,relatime 0 0\n";

        for (kind, expected) in [
            ("cgroup2", &["/mnt/control groups"][..]),
            ("cgroup", &["/sys/fs/cgroup/cpu"]),
            ("bpf", &[]),
        ] {
            let expected: Vec<_> = expected.iter().map(PathBuf::from).collect();
            assert_eq!(parse_mounts(mounts, kind), expected, "{kind}");
        }
    }
}
