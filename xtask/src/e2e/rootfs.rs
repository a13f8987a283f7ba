//! Fills the images' root directories.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};

use super::{debian, go, pause};
use crate::{host, progress};

/// Tools that Kubernetes' tests run in pods, besides `agnhost`.
const TOOLS: [&str; 54] = [
    "awk",
    "bash",
    "cat",
    "chmod",
    "conntrack",
    "curl",
    "cut",
    "dash",
    "date",
    "dd",
    "dig",
    "echo",
    "env",
    "expr",
    "false",
    "find",
    "getent",
    "grep",
    "head",
    "host",
    "hostname",
    "id",
    "ip",
    "ls",
    "md5sum",
    "mkdir",
    "nc",
    "nft",
    "nslookup",
    "printf",
    "ps",
    "rm",
    "sed",
    "seq",
    "sleep",
    "sort",
    "ss",
    "stat",
    "tail",
    "tar",
    "tee",
    "test",
    "timeout",
    "touch",
    "tr",
    "true",
    "uniq",
    "wc",
    "wget",
    "xargs",
    "basename",
    "mv",
    "cp",
    "ln",
];
/// Libraries that the C library loads for name lookups; `ldd` does not list them.
const NSS_LIBRARIES: [&str; 2] = ["libnss_files.so.2", "libnss_dns.so.2"];
/// Directory in the image that contains all libraries.
const LIBRARIES: &str = "lib/x86_64-linux-gnu";

const PASSWD: &str = "root:x:0:0:root:/root:/bin/sh\n\
                      user-defined-in-image:x:1000:1000::/:/bin/sh\n";
const GROUP: &str = "root:x:0:\ngroup-defined-in-image:x:50000:user-defined-in-image\n";

/// Copies a file into a root directory. An image with a single static program needs nothing else.
pub(super) fn copy_to_root(root: &Path, file: &Path) -> Result<()> {
    let name = file
        .file_name()
        .with_context(|| format!("the path {} has no file name", file.display()))?;
    copy(file, &root.join(name))
}

/// Fills the root directory of the image with `pause`, which keeps a pod's namespaces alive.
pub(super) fn pause(root: &Path) -> Result<()> {
    let path = root.join("pause");
    fs::write(&path, pause::program())
        .and_then(|()| fs::set_permissions(&path, fs::Permissions::from_mode(0o755)))
        .with_context(|| format!("cannot write {}", path.display()))
}

/// Fills the root directory of the image that most tests run: `agnhost`, and tools from Debian with their
/// libraries.
pub(super) fn agnhost(root: &Path, program: &Path, debian: &Path) -> Result<()> {
    for directory in [
        "bin", "dev", "etc", "lib64", "proc", "root", "run", "sys", "tmp", "uploads", "usr/bin",
        "var", LIBRARIES,
    ] {
        fs::create_dir_all(root.join(directory))?;
    }
    for writable in ["tmp", "uploads"] {
        fs::set_permissions(root.join(writable), fs::Permissions::from_mode(0o1777))?;
    }
    copy(program, &root.join("agnhost"))?;
    // Some tests run `agnhost` under this name.
    symlink("agnhost", root.join("agnhost-2"))?;
    for file in go::agnhost_certificate()? {
        copy_to_root(root, &file)?;
    }
    fs::write(root.join("etc/passwd"), PASSWD)?;
    fs::write(root.join("etc/group"), GROUP)?;
    fs::write(root.join("etc/nsswitch.conf"), "hosts: files dns\n")?;
    symlink("dash", root.join("bin/sh"))?;

    let mut libraries = BTreeSet::new();
    for name in TOOLS {
        let from = debian::find_program(debian, name)
            .or_else(|| host::find_program(name))
            .with_context(|| format!("the tool {name} is not installed on this machine"))?;
        copy(&from, &root.join("bin").join(name))?;
        libraries.extend(libraries_of(&from, debian)?);
    }
    // The NSS libraries are in the same directory as the C library.
    let nss_libraries: Vec<PathBuf> = libraries
        .iter()
        .filter(|path| path.ends_with("libc.so.6"))
        .flat_map(|path| NSS_LIBRARIES.map(|name| path.with_file_name(name)))
        .filter(|path| path.is_file())
        .collect();
    libraries.extend(nss_libraries);
    for library in &libraries {
        copy_to_root(&root.join(LIBRARIES), library)?;
    }
    let loader = "ld-linux-x86-64.so.2";
    symlink(
        format!("../{LIBRARIES}/{loader}"),
        root.join("lib64").join(loader),
    )?;
    Ok(())
}

/// Returns the libraries that the dynamic loader would load for a program; none if the program is static.
fn libraries_of(program: &Path, debian: &Path) -> Result<Vec<PathBuf>> {
    let mut command = Command::new("ldd");
    command
        .arg(program)
        .env("LD_LIBRARY_PATH", debian::library_path(debian));
    let output = progress::output(&mut command)?;
    Ok(parse_ldd(&output))
}

/// Parses the output of `ldd`: lines of the form `name => path (address)`, or `path (address)` for the
/// loader.
fn parse_ldd(output: &str) -> Vec<PathBuf> {
    let paths = output.lines().filter_map(|line| {
        let (path, _address) = line.trim().rsplit_once(" (")?;
        let path = path.rsplit_once(" => ").map_or(path, |(_, path)| path);
        path.starts_with('/').then_some(path)
    });
    paths.map(PathBuf::from).collect()
}

fn copy(from: &Path, to: &Path) -> Result<()> {
    fs::copy(from, to)
        .map(drop)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_and_the_files_that_it_loads_are_libraries_and_the_vdso_is_not() {
        let output = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibc.so.6 => /lib/libc.so.6 (0x00007f)\n\
                      \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";

        let wanted = ["/lib/libc.so.6", "/lib64/ld-linux-x86-64.so.2"];
        assert_eq!(parse_ldd(output), wanted.map(PathBuf::from));
    }
}
