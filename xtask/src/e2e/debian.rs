//! Unpacks Debian packages for the cluster: etcd, the container runtime, and tools for the images. The
//! packages are not installed, so that none of their services are started.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::vm::{
    debian_archive::{self, DebianArchive},
    download_cache,
};

/// Packages to unpack, even if they are already installed on this machine.
const PACKAGES: [&str; 12] = [
    "bind9-dnsutils",
    "conntrack",
    "containerd",
    "containernetworking-plugins",
    "curl",
    "etcd-server",
    "iptables",
    "netcat-openbsd",
    "nftables",
    "procps",
    "runc",
    "wget",
];

/// Directories in the unpacked tree that contain programs.
const PROGRAM_DIRECTORIES: [&str; 4] = ["usr/bin", "usr/sbin", "bin", "sbin"];
/// Directories in the unpacked tree that contain libraries.
const LIBRARY_DIRECTORIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// Symbolic links, as path and target, that the packages' installation scripts would create.
const LINKS: [(&str, &str); 7] = [
    ("usr/sbin/iptables", "xtables-nft-multi"),
    ("usr/sbin/iptables-save", "xtables-nft-multi"),
    ("usr/sbin/iptables-restore", "xtables-nft-multi"),
    ("usr/sbin/ip6tables", "xtables-nft-multi"),
    ("usr/sbin/ip6tables-save", "xtables-nft-multi"),
    ("usr/sbin/ip6tables-restore", "xtables-nft-multi"),
    ("usr/bin/nc", "../../bin/nc.openbsd"),
];

/// Downloads and unpacks the packages, and any of their dependencies that this machine lacks. Does nothing if
/// this has already been done for the same list of packages.
pub(super) fn unpack_packages(components: &Path) -> Result<()> {
    let directory = &components.join("debian");
    let stamp = components.join("stamps/debian");
    let inputs = PACKAGES.join("\n");
    if super::is_built_from(&stamp, &inputs) && directory.is_dir() {
        return Ok(());
    }
    let archive = DebianArchive::of_machine()?;
    archive.update()?;
    let mut packages = archive.simulate_install(&PACKAGES)?;
    packages.extend(PACKAGES.map(str::to_owned));
    packages.sort();
    packages.dedup();
    download_cache::create_directory(directory, |partial| {
        let debs = partial.join("debs");
        fs::create_dir_all(&debs)?;
        archive.download(&packages, &debs)?;
        debian_archive::unpack(&debian_archive::list_debs(&debs)?, partial)?;
        fs::remove_dir_all(&debs)?;
        for (link, target) in LINKS {
            create_link(&partial.join(link), target)?;
        }
        Ok(())
    })?;
    super::write_stamp(&stamp, &inputs)
}

/// Creates a symbolic link unless the path already exists.
fn create_link(link: &Path, target: &str) -> Result<()> {
    match symlink(target, link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot create {}", link.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns the path of a program in the unpacked tree.
pub(super) fn find_program(tree: &Path, name: &str) -> Option<PathBuf> {
    let candidates = PROGRAM_DIRECTORIES.map(|directory| tree.join(directory).join(name));
    candidates.into_iter().find(|path| path.is_file())
}

/// Returns the library directories in the unpacked tree, formatted for `LD_LIBRARY_PATH`.
pub(super) fn library_path(tree: &Path) -> String {
    LIBRARY_DIRECTORIES
        .map(|directory| tree.join(directory).display().to_string())
        .join(":")
}
