//! Finds and enters the network namespaces of processes.

use std::{
    collections::BTreeSet,
    fs::{self, File},
    io,
    os::unix::fs::MetadataExt as _,
    path::Path,
};

use nix::{
    errno::Errno,
    sched::{CloneFlags, setns},
};

use crate::capabilities::{self, SYS_ADMIN, SYS_PTRACE};

/// The inode number of the initial PID namespace (`PROC_PID_INIT_INO` in `linux/proc_ns.h`).
const INITIAL_PID_NAMESPACE: u64 = 0xeffffffc;
const PID_NAMESPACE: &str = "/proc/self/ns/pid";

/// Returns the inode number of the calling thread's network namespace.
pub(super) fn own() -> io::Result<u32> {
    number(&fs::metadata("/proc/thread-self/ns/net")?)
}

/// Opens the network namespaces with the given inode numbers through `/proc/<pid>/ns/net`. Skips namespaces
/// in which there is no process that this process is allowed to inspect.
pub(super) fn find(proc: &Path, numbers: &BTreeSet<u32>) -> io::Result<Vec<(u32, File)>> {
    let mut missing = numbers.clone();
    let mut found = Vec::new();
    for entry in fs::read_dir(proc)? {
        if missing.is_empty() {
            break;
        }
        let entry = entry?;
        if !entry.file_name().to_str().is_some_and(is_number) {
            continue;
        }
        // Errors are ignored, since the process may have exited in the meantime.
        if let Ok(file) = File::open(entry.path().join("ns/net"))
            && let Ok(metadata) = file.metadata()
            && let Ok(number) = number(&metadata)
            && missing.remove(&number)
        {
            found.push((number, file));
        }
    }
    Ok(found)
}

fn is_number(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_digit())
}

fn number(metadata: &fs::Metadata) -> io::Result<u32> {
    u32::try_from(metadata.ino()).map_err(io::Error::other)
}

/// Returns the reason why this process can't find and enter the network namespaces of all processes, or
/// `None` if it can.
#[must_use]
pub fn obstacle_to_entering() -> Option<String> {
    match capabilities::missing(&[SYS_ADMIN, SYS_PTRACE]) {
        Ok(missing) if missing.is_empty() => {}
        Ok(missing) => return Some(format!("this process lacks {}", missing.join(" and "))),
        Err(error) => return Some(format!("cannot read /proc/thread-self/status: {error}")),
    }
    match is_in_initial_pid_namespace() {
        Ok(true) => None,
        Ok(false) => Some("this process is not in the host's PID namespace (hostPID)".to_owned()),
        Err(error) => Some(format!("cannot read {PID_NAMESPACE}: {error}")),
    }
}

/// Returns true if this process is in the host's PID namespace.
pub fn is_in_initial_pid_namespace() -> io::Result<bool> {
    Ok(fs::metadata(PID_NAMESPACE)?.ino() == INITIAL_PID_NAMESPACE)
}

/// Moves the calling thread into a network namespace.
pub(super) fn enter(namespace: &File) -> Result<(), Errno> {
    setns(namespace, CloneFlags::CLONE_NEWNET)
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Creates a directory that looks like `/proc`, given processes and the names of their network
    /// namespaces.
    fn proc(processes: &[(&str, &str)]) -> io::Result<tempfile::TempDir> {
        let directory = tempfile::tempdir()?;
        for (process, namespace) in processes {
            let ns = directory.path().join(process).join("ns");
            fs::create_dir_all(&ns)?;
            let target = directory.path().join(namespace);
            fs::write(&target, "")?;
            symlink(target, ns.join("net"))?;
        }
        Ok(directory)
    }

    #[test]
    fn each_wanted_namespace_is_found_once() -> io::Result<()> {
        let directory = proc(&[
            ("1", "host"),
            ("20", "pod"),
            ("21", "pod"),
            ("30", "other"),
            ("irq", "no-process"),
        ])?;
        fs::create_dir_all(directory.path().join("99"))?;
        let number_of =
            |name: &str| -> io::Result<u32> { number(&fs::metadata(directory.path().join(name))?) };
        let wanted = BTreeSet::from([number_of("pod")?, number_of("no-process")?]);

        let found = find(directory.path(), &wanted)?;

        let found: Vec<u32> = found.iter().map(|(number, _)| *number).collect();
        assert_eq!(found, [number_of("pod")?]);
        Ok(())
    }
}
