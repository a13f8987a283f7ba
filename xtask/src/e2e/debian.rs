//! The cluster's parts from Debian: etcd, the container runtime, and tools for the images. Packages are
//! unpacked, never installed, so none of their services is ever started.

use std::{
    fs, io,
    os::unix::fs::symlink,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::vm::{
    archive::{self, Archive},
    cache,
};

/// The packages to unpack, even if the machine has them.
const PACKAGES: [&str; 13] = [
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
    "tcpdump",
    "wget",
];

/// The folders of programs in an unpacked tree.
const PROGRAMS: [&str; 4] = ["usr/bin", "usr/sbin", "bin", "sbin"];
/// The folders of libraries.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// Links that the packages' own scripts would have created.
const NAMES: [(&str, &str); 7] = [
    ("usr/sbin/iptables", "xtables-nft-multi"),
    ("usr/sbin/iptables-save", "xtables-nft-multi"),
    ("usr/sbin/iptables-restore", "xtables-nft-multi"),
    ("usr/sbin/ip6tables", "xtables-nft-multi"),
    ("usr/sbin/ip6tables-save", "xtables-nft-multi"),
    ("usr/sbin/ip6tables-restore", "xtables-nft-multi"),
    ("usr/bin/nc", "../../bin/nc.openbsd"),
];

/// Fetches and unpacks the packages and their dependencies that the machine lacks, once.
pub(super) fn ready(place: &Path) -> Result<()> {
    let folder = &place.join("debian");
    // Another list of packages than the last time requires a new folder.
    let stamp = place.join("stamps/debian");
    let source = PACKAGES.join("\n");
    if super::is_made_from(&stamp, &source) && folder.is_dir() {
        return Ok(());
    }
    let archive = Archive::of_machine()?;
    archive.update()?;
    let mut packages = archive.would_install(&PACKAGES)?;
    packages.extend(PACKAGES.map(str::to_owned));
    packages.sort();
    packages.dedup();
    cache::folder(folder, |partial| {
        let debs = partial.join("debs");
        fs::create_dir_all(&debs)?;
        archive.download(&packages, &debs)?;
        archive::unpack(&archive::packages_in(&debs)?, partial)?;
        fs::remove_dir_all(&debs)?;
        for (name, target) in NAMES {
            name_program(&partial.join(name), target)?;
        }
        Ok(())
    })?;
    super::stamp(&stamp, &source)
}

fn name_program(link: &Path, target: &str) -> Result<()> {
    match symlink(target, link) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            Err(error).with_context(|| format!("cannot make {}", link.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns the path of a program in the tree.
pub(super) fn program(folder: &Path, name: &str) -> Option<PathBuf> {
    let places = PROGRAMS.map(|place| folder.join(place).join(name));
    places.into_iter().find(|path| path.is_file())
}

/// Returns the folders of libraries in the tree, in the loader's format.
pub(super) fn library_path(folder: &Path) -> String {
    LIBRARIES
        .map(|part| folder.join(part).display().to_string())
        .join(":")
}
