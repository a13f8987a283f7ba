//! The emulator for guests: the machine's own, or one unpacked from Debian's packages.
//!
//! QEMU is never installed: its packages would replace newer parts of QEMU.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, bail, ensure};

use super::{
    archive::{self, Archive},
    cache, control,
};
use crate::workspace;

const PROGRAM: &str = "qemu-system-x86_64";
const PACKAGE: &str = "qemu-system-x86";
/// The packages to unpack before the search for missing libraries.
const PACKAGES: [&str; 4] = [PACKAGE, "qemu-system-common", "qemu-system-data", "seabios"];
/// The folders of firmware in the packages.
const DATA: [&str; 2] = ["usr/share/qemu", "usr/share/seabios"];

/// An emulator that runs.
#[derive(Debug)]
pub(crate) struct Qemu {
    program: PathBuf,
    /// The folder that it was unpacked into.
    unpacked: Option<PathBuf>,
    /// The version, as QEMU prints it.
    version: String,
}

/// Finds the emulator, on the machine or in the cache, or fetches it.
pub(crate) fn ready(offline: bool) -> Result<Qemu> {
    if let Some(program) = workspace::program(PROGRAM) {
        return Qemu::new(program, None);
    }
    let _lock = cache::lock("qemu")?;
    let folder = cache::place("qemu");
    if folder.is_dir() {
        match Qemu::unpacked(&folder) {
            Ok(qemu) => return Ok(qemu),
            Err(error) if offline => {
                return Err(error.context("the QEMU in the cache doesn't run; fetch it anew"));
            }
            // It was fetched for other libraries than the machine has now.
            Err(error) => println!("QEMU is fetched anew: {error:#}"),
        }
    }
    ensure!(
        !offline,
        "there is no {PROGRAM} in PATH nor in the cache; fetch it once without --offline, or \
         install the package {PACKAGE}"
    );
    fetch(&folder).with_context(|| format!("cannot fetch {PACKAGE} of this machine's suite"))?;
    Qemu::unpacked(&folder)
}

impl Qemu {
    /// Returns a command that runs QEMU, with the paths of libraries and firmware.
    pub(crate) fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        if let Some(folder) = &self.unpacked {
            command.env("LD_LIBRARY_PATH", library_path(folder));
            for data in DATA {
                command.arg("-L").arg(folder.join(data));
            }
        }
        command
    }

    /// Returns the version, as QEMU prints it.
    pub(crate) fn version(&self) -> &str {
        &self.version
    }

    fn unpacked(folder: &Path) -> Result<Self> {
        Self::new(program_in(folder), Some(folder.to_owned()))
    }

    fn new(program: PathBuf, unpacked: Option<PathBuf>) -> Result<Self> {
        let mut qemu = Self {
            program,
            unpacked,
            version: String::new(),
        };
        let said = archive::output(qemu.command().arg("--version"))?;
        said.lines()
            .next()
            .unwrap_or_default()
            .clone_into(&mut qemu.version);
        Ok(qemu)
    }
}

/// Unpacks the packages, then the missing libraries of QEMU and of those libraries.
fn fetch(folder: &Path) -> Result<()> {
    let archive = Archive::of_machine()?;
    archive.update()?;
    let new = archive.would_install(&[PACKAGE])?;
    cache::folder(folder, |partial| {
        let mut taken = Vec::new();
        let mut next: Vec<String> = PACKAGES.map(str::to_owned).into();
        loop {
            add(&archive, &next, partial)?;
            let missing = missing_libraries(partial)?;
            if missing.is_empty() {
                return Ok(());
            }
            taken.append(&mut next);
            let needed = control::dependencies(&archive.show(&needing(&taken))?);
            next = libraries(&needed, &new, &taken);
            if next.is_empty() {
                bail!("no package has {}", missing.join(", "));
            }
        }
    })
}

/// Returns the packages whose libraries are needed: QEMU's other parts have many that are unused here.
fn needing(taken: &[String]) -> Vec<String> {
    let is_program = |name: &&String| *name == PACKAGE || !PACKAGES.contains(&name.as_str());
    taken.iter().filter(is_program).cloned().collect()
}

/// Returns the needed libraries that are new to the machine and not unpacked yet.
fn libraries(needed: &[String], new: &[String], taken: &[String]) -> Vec<String> {
    let is_next =
        |name: &&String| name.starts_with("lib") && new.contains(*name) && !taken.contains(*name);
    let next: BTreeSet<&String> = needed.iter().filter(is_next).collect();
    next.into_iter().cloned().collect()
}

fn add(archive: &Archive, packages: &[String], folder: &Path) -> Result<()> {
    let debs = folder.join("debs");
    fs::create_dir_all(&debs)?;
    archive.download(packages, &debs)?;
    archive::unpack(&archive::packages_in(&debs)?, folder)?;
    fs::remove_dir_all(&debs)?;
    Ok(())
}

fn missing_libraries(folder: &Path) -> Result<Vec<String>> {
    let mut command = Command::new("ldd");
    command
        .arg(program_in(folder))
        .env("LD_LIBRARY_PATH", library_path(folder));
    Ok(not_found(&archive::output(&mut command)?))
}

/// Returns the libraries that the loader does not find.
fn not_found(said: &str) -> Vec<String> {
    let lines = said
        .lines()
        .filter_map(|line| line.trim().strip_suffix(" => not found"));
    let names: BTreeSet<&str> = lines.collect();
    names.into_iter().map(str::to_owned).collect()
}

fn program_in(folder: &Path) -> PathBuf {
    folder.join("usr/bin").join(PROGRAM)
}

/// Returns the folders of libraries in an unpacked tree.
fn library_path(folder: &Path) -> String {
    let parts = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];
    parts
        .map(|part| folder.join(part).display().to_string())
        .join(":")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn owned(names: &str) -> Vec<String> {
        names.split(' ').map(str::to_owned).collect()
    }

    #[test]
    fn libraries_are_taken_when_needed_new_and_not_taken() {
        let needed = owned("libc6 libslirp0 libfdt1 ipxe-qemu libslirp0 libaio1");
        let new = owned("ipxe-qemu libaio1 libfdt1 libslirp0 libspice-server1");

        let next = libraries(&needed, &new, &owned("libaio1"));

        assert_eq!(next, ["libfdt1", "libslirp0"]);
    }

    #[test]
    fn the_other_parts_of_qemu_need_no_libraries() {
        let taken = owned("qemu-system-x86 qemu-system-common seabios libpmem1");

        assert_eq!(needing(&taken), ["qemu-system-x86", "libpmem1"]);
    }

    #[test]
    fn the_loader_names_what_it_does_not_find() {
        let said = "\tlinux-vdso.so.1 (0x00007ffd)\n\tlibfdt.so.1 => not found\n\
                    \tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \tlibaio.so.1 => not found\n\tlibfdt.so.1 => not found\n";

        assert_eq!(not_found(said), ["libaio.so.1", "libfdt.so.1"]);
    }
}
