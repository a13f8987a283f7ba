//! Finds QEMU on this machine, or unpacks it from Debian's packages.
//!
//! The packages are not installed, since they would replace newer QEMU packages.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use super::{
    debian_archive::{self, DebianArchive},
    debian_control, download_cache,
};
use crate::{host, progress};

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";
/// Packages to unpack first; the packages of missing libraries follow.
const PACKAGES: [&str; 4] = [PACKAGE, "qemu-system-common", "qemu-system-data", "seabios"];
/// Directories in the unpacked tree that contain firmware.
const FIRMWARE_DIRECTORIES: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];

/// An installed or unpacked QEMU.
#[derive(Debug)]
pub(crate) struct Qemu {
    program: PathBuf,
    /// Directory into which QEMU was unpacked; `None` if it is installed.
    unpacked: Option<PathBuf>,
    /// Version, as QEMU prints it.
    version: String,
}

/// Finds QEMU on this machine or in the cache, or else downloads it.
pub(crate) fn find_or_download(offline: bool) -> Result<Qemu> {
    if let Some(program) = host::find_program(PROGRAM) {
        return Qemu::new(program, None);
    }
    let _lock = download_cache::lock("qemu")?;
    let directory = download_cache::path("qemu");
    if directory.is_dir() {
        match Qemu::unpacked(&directory) {
            Ok(qemu) => return Ok(qemu),
            Err(error) if offline => {
                let hint = "QEMU in the cache does not run; download it again without --offline";
                return Err(error.context(hint));
            }
            // This machine's libraries have changed since QEMU was downloaded.
            Err(error) => println!("downloading QEMU again: {error:#}"),
        }
    }
    ensure!(
        !offline,
        "{PROGRAM} is neither in PATH nor in the cache; download it once without --offline, or \
         install the package {PACKAGE}"
    );
    download(&directory)
        .with_context(|| format!("cannot download {PACKAGE} from this machine's suite"))?;
    Qemu::unpacked(&directory)
}

impl Qemu {
    /// Returns a command that runs QEMU with the paths of its libraries and firmware.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        if let Some(directory) = &self.unpacked {
            command.env("LD_LIBRARY_PATH", library_path(directory));
            for firmware in FIRMWARE_DIRECTORIES {
                command.arg("-L").arg(directory.join(firmware));
            }
        }
        command
    }

    /// Returns the version, as QEMU prints it.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    fn unpacked(directory: &Path) -> Result<Self> {
        Self::new(unpacked_program(directory), Some(directory.to_owned()))
    }

    /// Runs QEMU to determine its version.
    fn new(program: PathBuf, unpacked: Option<PathBuf>) -> Result<Self> {
        let mut qemu = Self {
            program,
            unpacked,
            version: String::new(),
        };
        let output = progress::output(qemu.command().arg("--version"))?;
        output
            .lines()
            .next()
            .unwrap_or_default()
            .clone_into(&mut qemu.version);
        Ok(qemu)
    }
}

/// Downloads and unpacks QEMU, then the libraries that it lacks, then the libraries that those lack.
fn download(directory: &Path) -> Result<()> {
    let archive = DebianArchive::of_machine()?;
    archive.update()?;
    let not_installed = archive.simulate_install(&[PACKAGE])?;
    download_cache::create_directory(directory, |partial| {
        let mut unpacked = Vec::new();
        let mut next: Vec<String> = PACKAGES.map(str::to_owned).into();
        loop {
            unpack(&archive, &next, partial)?;
            let missing = missing_libraries(partial)?;
            if missing.is_empty() {
                return Ok(());
            }
            unpacked.append(&mut next);
            let shown = archive.show(&with_libraries(&unpacked))?;
            let dependencies = debian_control::dependencies(&shown);
            next = next_libraries(&dependencies, &not_installed, &unpacked);
            if next.is_empty() {
                bail!("no package has the libraries {}", missing.join(", "));
            }
        }
    })
}

/// Returns the packages whose dependencies are needed. QEMU's other packages have many dependencies that are
/// not used.
fn with_libraries(unpacked: &[String]) -> Vec<String> {
    let is_needed = |name: &&String| *name == PACKAGE || !PACKAGES.contains(&name.as_str());
    unpacked.iter().filter(is_needed).cloned().collect()
}

/// Returns the dependencies that are libraries and that are neither installed nor unpacked.
fn next_libraries(
    dependencies: &[String],
    not_installed: &[String],
    unpacked: &[String],
) -> Vec<String> {
    let is_next = |name: &&String| {
        name.starts_with("lib") && not_installed.contains(*name) && !unpacked.contains(*name)
    };
    let next: BTreeSet<&String> = dependencies.iter().filter(is_next).collect();
    next.into_iter().cloned().collect()
}

/// Downloads packages and unpacks them into a directory.
fn unpack(archive: &DebianArchive, packages: &[String], directory: &Path) -> Result<()> {
    let debs = directory.join("debs");
    fs::create_dir_all(&debs)?;
    archive.download(packages, &debs)?;
    debian_archive::unpack(&debian_archive::list_debs(&debs)?, directory)?;
    fs::remove_dir_all(&debs)?;
    Ok(())
}

fn missing_libraries(directory: &Path) -> Result<Vec<String>> {
    let mut command = Command::new("ldd");
    command
        .arg(unpacked_program(directory))
        .env("LD_LIBRARY_PATH", library_path(directory));
    Ok(parse_missing(&progress::output(&mut command)?))
}

/// Returns the libraries that were not found, according to the output of `ldd`.
fn parse_missing(output: &str) -> Vec<String> {
    let lines = output
        .lines()
        .filter_map(|line| line.trim().strip_suffix(" => not found"));
    let names: BTreeSet<&str> = lines.collect();
    names.into_iter().map(str::to_owned).collect()
}

fn unpacked_program(directory: &Path) -> PathBuf {
    directory.join("usr/bin").join(PROGRAM)
}

/// Returns the library directories in the unpacked tree, formatted for `LD_LIBRARY_PATH`.
fn library_path(directory: &Path) -> String {
    let directories = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
    directories
        .map(|name| directory.join(name).display().to_string())
        .join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(names: &str) -> Vec<String> {
        names.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn needed_libraries_are_unpacked_once_and_only_if_not_installed() {
        let dependencies = owned("libc6 libslirp0 libfdt1 ipxe-qemu libslirp0 libaio1");
        let not_installed = owned("ipxe-qemu libaio1 libfdt1 libslirp0 libspice-server1");

        let next = next_libraries(&dependencies, &not_installed, &owned("libaio1"));

        assert_eq!(next, ["libfdt1", "libslirp0"]);
    }

    #[test]
    fn dependencies_of_other_packages_of_qemu_are_ignored() {
        let unpacked = owned("qemu-system-x86 qemu-system-common seabios libpmem1");

        let names = with_libraries(&unpacked);
        assert_eq!(names, ["qemu-system-x86", "libpmem1"]);
    }

    #[test]
    fn missing_libraries_are_read_from_the_output_of_ldd() {
        let output = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibfdt.so.1 => not found\n\
                      \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                      \tlibaio.so.1 => not found\n\tlibfdt.so.1 => not found\n";

        assert_eq!(parse_missing(output), ["libaio.so.1", "libfdt.so.1"]);
    }
}
