//! The network namespaces of running processes.

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

/// The number of the namespace of processes that the kernel starts with (`PROC_PID_INIT_INO` in
/// `linux/proc_ns.h`).
const FIRST_PROCESSES: u64 = 0xeffffffc;

/// The number of the network namespace of the calling thread.
pub(super) fn own() -> io::Result<u32> {
    let metadata = fs::metadata("/proc/thread-self/ns/net")?;
    number(&metadata).ok_or_else(|| io::Error::other("a namespace without a number"))
}

/// Looks for network namespaces by their numbers: one way to each that a process is in whose
/// namespace this one may see.
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
        let path = entry.path().join("ns/net");
        // A process may end meanwhile, and another have its number by then.
        let is_missing =
            |metadata: &fs::Metadata| number(metadata).filter(|number| missing.contains(number));
        if fs::metadata(&path)
            .ok()
            .as_ref()
            .and_then(is_missing)
            .is_some()
            && let Ok(file) = File::open(&path)
            && let Some(number) = file.metadata().ok().as_ref().and_then(is_missing)
        {
            missing.remove(&number);
            found.push((number, file));
        }
    }
    Ok(found)
}

fn is_number(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_digit())
}

fn number(metadata: &fs::Metadata) -> Option<u32> {
    u32::try_from(metadata.ino()).ok()
}

/// Why this process can't end sockets in the namespaces of pods; nothing if it can.
#[must_use]
pub fn obstacle() -> Option<String> {
    let status = match fs::read_to_string("/proc/thread-self/status") {
        Ok(status) => status,
        Err(error) => return Some(format!("cannot read /proc/thread-self/status: {error}")),
    };
    let lacking = lacking(&status);
    if !lacking.is_empty() {
        return Some(format!("this process lacks {}", lacking.join(" and ")));
    }
    match fs::metadata("/proc/self/ns/pid").map(|metadata| metadata.ino()) {
        Ok(FIRST_PROCESSES) => None,
        Ok(_) => Some("this process can't see those of the host (hostPID)".to_owned()),
        Err(error) => Some(format!("cannot look at /proc/self/ns/pid: {error}")),
    }
}

/// Puts the calling thread into a network namespace.
pub(super) fn enter(namespace: &File) -> Result<(), Errno> {
    setns(namespace, CloneFlags::CLONE_NEWNET)
}

/// The capabilities that it takes to see the namespaces of all processes and to enter them, with
/// their numbers in `linux/capability.h`.
const NEEDED: [(&str, u32); 2] = [("CAP_SYS_ADMIN", 21), ("CAP_SYS_PTRACE", 19)];

/// Which of them a process lacks, as its `/proc/<pid>/status` tells.
fn lacking(status: &str) -> Vec<&'static str> {
    let effective = status.lines().find_map(|line| line.strip_prefix("CapEff:"));
    let effective = effective.and_then(|word| u64::from_str_radix(word.trim(), 16).ok());
    let effective = effective.unwrap_or(0);
    let lacks = |(_, number): &&(&str, u32)| effective & 1 << *number == 0;
    NEEDED.iter().filter(lacks).map(|(name, _)| *name).collect()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// A folder like `/proc`: processes with the file that stands for their namespace.
    fn proc(processes: &[(&str, &str)]) -> io::Result<tempfile::TempDir> {
        let folder = tempfile::tempdir()?;
        for (process, namespace) in processes {
            let ns = folder.path().join(process).join("ns");
            fs::create_dir_all(&ns)?;
            let target = folder.path().join(namespace);
            fs::write(&target, "")?;
            symlink(target, ns.join("net"))?;
        }
        Ok(folder)
    }

    #[test]
    fn each_namespace_that_is_looked_for_is_found_once() -> io::Result<()> {
        let folder = proc(&[
            ("1", "host"),
            ("20", "pod"),
            ("21", "pod"),
            ("30", "other"),
            ("irq", "no-process"),
        ])?;
        fs::create_dir_all(folder.path().join("99"))?;
        let number_of = |name: &str| -> io::Result<u32> {
            Ok(number(&fs::metadata(folder.path().join(name))?).unwrap_or(0))
        };
        let wanted = BTreeSet::from([number_of("pod")?, number_of("no-process")?]);

        let found = find(folder.path(), &wanted)?;

        let found: Vec<u32> = found.iter().map(|(number, _)| *number).collect();
        assert_eq!(found, [number_of("pod")?]);
        Ok(())
    }

    #[test]
    fn a_capability_that_is_lacking_is_named() {
        let of = |word: &str| lacking(&format!("Name:\tculvert\nCapEff:\t{word}\n"));

        assert_eq!(of("0000000000280000"), [""; 0]);
        assert_eq!(of("0000000000200000"), ["CAP_SYS_PTRACE"]);
        assert_eq!(of("000000c000001000"), ["CAP_SYS_ADMIN", "CAP_SYS_PTRACE"]);
        assert_eq!(lacking(""), ["CAP_SYS_ADMIN", "CAP_SYS_PTRACE"]);
    }
}
