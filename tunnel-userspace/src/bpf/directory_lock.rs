//! Creates and locks the pin directory, in such a way that no other user can lock it.

use std::{
    fs::{self, DirBuilder, File, Permissions},
    os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _},
    path::Path,
};

use nix::{
    fcntl::{Flock, FlockArg},
    sys::{
        stat::{major, minor},
        statfs::BPF_FS_MAGIC,
    },
    unistd::geteuid,
};

use super::{
    path::{failed, file_system_type, nearest_existing},
    pin_directory::PinError,
};

/// Creates a directory on a BPF file system if it is missing, and locks it.
pub(super) fn lock_directory(root: &Path) -> Result<Flock<File>, PinError> {
    let parent = nearest_existing(root);
    let kind = file_system_type(parent)?;
    if kind != BPF_FS_MAGIC {
        let usual = Path::new("/sys/fs/bpf");
        let mount = if root.starts_with(usual) {
            usual
        } else {
            parent
        };
        let (path, mount) = (root.to_owned(), mount.to_owned());
        return Err(PinError::NotBpf { path, mount });
    }
    create_private(root)?;
    let directory = File::open(root).map_err(failed("open", root))?;
    match Flock::lock(directory, FlockArg::LockExclusiveNonblock) {
        Ok(lock) => Ok(lock),
        Err((directory, nix::errno::Errno::EWOULDBLOCK)) => Err(PinError::Locked {
            path: root.to_owned(),
            pid: find_lock_owner(&directory),
        }),
        Err((_, error)) => Err(failed("lock", root)(error.into()).into()),
    }
}

/// Creates a directory that only this user can open, or makes an existing one so.
fn create_private(root: &Path) -> Result<(), PinError> {
    let mut builder = DirBuilder::new();
    builder.recursive(true).mode(0o700);
    builder.create(root).map_err(failed("create", root))?;
    let own = geteuid().as_raw();
    let inspected = [fs::symlink_metadata(root), fs::metadata(root)];
    let mut is_private = true;
    for metadata in inspected {
        let metadata = metadata.map_err(failed("inspect", root))?;
        let owner = metadata.uid();
        if owner != own {
            let path = root.to_owned();
            return Err(PinError::Owner { path, owner, own });
        }
        is_private = metadata.mode() & 0o077 == 0;
    }
    if !is_private {
        let private = Permissions::from_mode(0o700);
        fs::set_permissions(root, private).map_err(failed("change the mode of", root))?;
    }
    Ok(())
}

/// Describes the process that holds the lock of the directory, for an error message.
pub(super) fn process_hint(pid: Option<&u32>) -> String {
    let Some(pid) = pid else {
        return String::new();
    };
    let owner = fs::metadata(format!("/proc/{pid}")).map(|process| process.uid());
    match owner {
        Ok(owner) if owner != geteuid().as_raw() => {
            format!(" or a process of user {owner} that locked the directory (process {pid})")
        }
        Ok(_) | Err(_) => format!(" (process {pid})"),
    }
}

/// Returns the id of the process that holds the lock, from `/proc/locks`:
/// `1: FLOCK ADVISORY WRITE <pid> <major>:<minor>:<inode> 0 EOF`.
fn find_lock_owner(directory: &File) -> Option<u32> {
    let metadata = directory.metadata().ok()?;
    let locks = fs::read_to_string("/proc/locks").ok()?;
    lock_owner_in(&locks, metadata.dev(), metadata.ino())
}

fn lock_owner_in(locks: &str, device: u64, inode: u64) -> Option<u32> {
    let (major, minor) = (major(device), minor(device));
    let file = format!("{major:02x}:{minor:02x}:{inode}");
    locks.lines().find_map(|line| {
        let mut words = line.split_whitespace().skip(4);
        let pid = words.next()?;
        (words.next()? == file).then(|| pid.parse().ok())?
    })
}

#[cfg(test)]
mod tests {
    use nix::sys::stat::makedev;

    use super::*;

    #[test]
    fn the_owner_of_a_lock_is_found_by_device_and_inode() {
        let locks = "1: FLOCK  ADVISORY  WRITE 11 00:2f:7 0 EOF\n\
                     1: -> FLOCK  ADVISORY  WRITE 12 00:30:7 0 EOF\n\
                     2: FLOCK  ADVISORY  WRITE 13 00:30:7 0 EOF\n\
                     3: FLOCK  ADVISORY  WRITE 14 103:02:17 0 EOF\n";
        for (device, inode, owner) in [
            (makedev(0, 0x30), 7, Some(13)),
            (makedev(0, 0x2f), 7, Some(11)),
            (makedev(0x103, 2), 17, Some(14)),
            (makedev(0, 0x30), 17, None),
        ] {
            assert_eq!(lock_owner_in(locks, device, inode), owner);
        }
    }
}
