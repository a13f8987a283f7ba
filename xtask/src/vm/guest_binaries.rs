//! Programs that virtual machines run: the tests and the programs under test, which are static, and a few of
//! the host's programs.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use super::initramfs::Overlay;
use crate::{
    host,
    static_build::Profile,
    workspace_binaries::{self, CULVERT, LAB},
};

/// Programs on this machine that tests start.
const HOST_PROGRAMS: [&str; 12] = [
    "ip", "tc", "cat", "chroot", "sh", "sleep", "true", "stat", "nice", "prlimit", "setpriv",
    "unshare",
];

/// The built programs that virtual machines run.
const BUILT_PROGRAMS: [&str; 5] = ["culvert", "culvert-lab", "culvert-guest", "netns", "packet"];

/// The programs that were built for virtual machines.
#[derive(Debug)]
pub(crate) struct MachinePrograms {
    /// Paths on the host, by program name.
    built: BTreeMap<String, PathBuf>,
}

impl MachinePrograms {
    /// Builds the programs.
    pub(crate) fn build() -> Result<Self> {
        Self::build_with(&[])
    }

    /// Builds the programs together with other targets, which are given as Cargo options.
    pub(crate) fn build_with(others: &[&str]) -> Result<Self> {
        let build = Profile::Vm.cargo("build")?;
        let [culvert, lab] = workspace_binaries::build(build, [CULVERT, LAB])?;
        // This is a separate build: together with the tests, Cargo would compile the daemon with the tests'
        // features, and would compile most crates twice.
        let mut command = Profile::Vm.cargo("build")?;
        command
            .args(["--package", "tunnel-tests", "--bin", "culvert-guest"])
            .args(["--test", "netns", "--test", "packet"])
            .args(others);
        let mut built = workspace_binaries::run_build(&mut command)?;
        built.insert("culvert".to_owned(), culvert);
        built.insert("culvert-lab".to_owned(), lab);
        built.retain(|name, _| BUILT_PROGRAMS.contains(&name.as_str()));
        for name in BUILT_PROGRAMS {
            ensure!(
                built.contains_key(name),
                "cargo build did not name the program {name}"
            );
        }
        Ok(Self { built })
    }

    /// Returns the path of a built program on the host.
    pub(crate) fn path(&self, name: &str) -> Result<&Path> {
        let path = self.built.get(name).map(PathBuf::as_path);
        path.with_context(|| format!("the program {name} was not built"))
    }

    /// Lists the tests in a test program that libtest selects with these options and whose names contain one
    /// of the filters.
    pub(super) fn list_tests(
        &self,
        name: &str,
        filter: &[String],
        options: &[&str],
    ) -> Result<Vec<String>> {
        let mut command = Command::new(self.path(name)?);
        let output = command.arg("--list").args(options).args(filter).output();
        let output = output.with_context(|| format!("cannot start {name}"))?;
        ensure!(
            output.status.success(),
            "{name} --list failed ({})",
            output.status
        );
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns the part of the initramfs that all virtual machines share: the built programs, and some of the
    /// host's programs with their libraries.
    pub(crate) fn overlay(&self) -> Result<Overlay> {
        let mut overlay = Overlay::default();
        overlay.add_file(self.path("culvert-guest")?, "/init", 0o755);
        for (name, path) in &self.built {
            if name != "culvert-guest" {
                overlay.add_file(path, &format!("/bin/{name}"), 0o755);
            }
        }
        overlay.add_symlink("/usr/bin/sh", "/bin/sh");
        let mut libraries = BTreeSet::new();
        for name in HOST_PROGRAMS {
            let program = host::find_program(name)
                .with_context(|| format!("{name}, which tests need, is not installed"))?;
            overlay.add_file(&program, &format!("/usr/bin/{name}"), 0o755);
            libraries.extend(linked_libraries(&program)?);
        }
        for library in &libraries {
            let path = Path::new(library);
            overlay.add_file(path, library, 0o755);
        }
        Ok(overlay)
    }
}

/// Returns the paths of the libraries that a program is linked against.
fn linked_libraries(program: &Path) -> Result<BTreeSet<String>> {
    let output = Command::new("ldd").arg(program).output();
    let output = output.context("cannot start ldd")?;
    let listing = String::from_utf8_lossy(&output.stdout);
    let all_found = output.status.success() && !listing.contains("not found");
    ensure!(
        all_found,
        "{} lacks libraries: {listing}",
        program.display()
    );
    Ok(parse_ldd(&listing))
}

/// Returns the paths in the output of `ldd`.
fn parse_ldd(listing: &str) -> BTreeSet<String> {
    let words = listing.split_whitespace();
    let paths = words.filter(|word| word.starts_with('/') && !word.ends_with(':'));
    paths.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_loader_and_libraries_with_a_path_are_linked_libraries() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffe)\n\
            \tlibmnl.so.0 => /lib/x86_64-linux-gnu/libmnl.so.0 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";

        let found = Vec::from_iter(parse_ldd(listing)).join(" ");
        let wanted = "/lib/x86_64-linux-gnu/libmnl.so.0 /lib64/ld-linux-x86-64.so.2";
        assert_eq!(found, wanted);
    }
}
