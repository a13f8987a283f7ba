//! Isolated calls of apt: with separate lists of separate suites, and no change of the machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use super::{cache, sources::Mirrors};
use crate::progress;

/// Some suites of Debian.
#[derive(Debug)]
pub(crate) struct Archive {
    folder: PathBuf,
    /// The suites, for messages.
    pub(crate) suites: String,
    /// True if apt sees the installed packages of the machine.
    is_for_machine: bool,
}

impl Archive {
    /// Opens a suite as if no package was installed.
    pub(crate) fn of_suite(suite: &str) -> Result<Self> {
        let mirrors = Mirrors::read()?;
        Self::open(&mirrors, &[suite.to_owned()], false)
    }

    /// Opens the suites of this machine, with its installed packages.
    pub(crate) fn of_machine() -> Result<Self> {
        let mirrors = Mirrors::read()?;
        let codename = &mirrors.codename;
        let suites = [codename.clone(), format!("{codename}-security")];
        Self::open(&mirrors, &suites, true)
    }

    fn open(mirrors: &Mirrors, suites: &[String], is_for_machine: bool) -> Result<Self> {
        let suite_names = suites.join("+");
        let folder = cache::place("apt").join(&suite_names);
        for part in ["lists/partial", "cache/archives/partial"] {
            let part = folder.join(part);
            fs::create_dir_all(&part)
                .with_context(|| format!("cannot create {}", part.display()))?;
        }
        let lines = suites.iter().map(|suite| mirrors.of(suite).line(suite));
        let path = folder.join("sources.list");
        fs::write(&path, lines.collect::<String>())
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self {
            folder,
            suites: suite_names,
            is_for_machine,
        })
    }

    /// Fetches the lists of packages.
    pub(crate) fn update(&self) -> Result<()> {
        let label = format!("lists of {}", self.suites);
        // Otherwise apt silently keeps old lists if it can't fetch new ones.
        let any = ["-o", "APT::Update::Error-Mode=any"];
        progress::step(&label, self.apt("apt-get").args(any).arg("update"))
    }

    /// Returns the control data of the newest versions of packages.
    pub(crate) fn show(&self, packages: &[String]) -> Result<String> {
        let mut command = self.apt("apt-cache");
        command.args(["show", "--no-all-versions"]).args(packages);
        let names = packages.join(" ");
        output(&mut command).with_context(|| format!("{} has no package {names}", self.suites))
    }

    /// Returns true if each of the packages, as `name=version`, is available.
    pub(crate) fn offers(&self, packages: &[String]) -> bool {
        let mut command = self.apt("apt-cache");
        progress::succeeds(command.arg("show").args(packages))
    }

    /// Downloads packages into a folder, and checks their hashes against the signed lists.
    pub(crate) fn download(&self, packages: &[String], into: &Path) -> Result<()> {
        let label = format!("download {} of {}", packages.join(" "), self.suites);
        let mut command = self.apt("apt-get");
        command.current_dir(into).arg("download").args(packages);
        progress::step(&label, &mut command)
    }

    /// Returns the packages that an installation would add to this machine.
    pub(crate) fn would_install(&self, packages: &[&str]) -> Result<Vec<String>> {
        let mut command = self.apt("apt-get");
        command.args(["install", "--simulate", "--no-install-recommends"]);
        let names = packages.join(" ");
        let plan = output(command.args(packages))
            .with_context(|| format!("{} cannot have {names} installed", self.suites))?;
        Ok(installed_by(&plan))
    }

    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        let path = |name: &str| self.folder.join(name).display().to_string();
        let mut options = vec![
            format!("Dir::Etc::SourceList={}", path("sources.list")),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            "Dir::Etc::Preferences=/dev/null".to_owned(),
            "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={}", path("lists")),
            format!("Dir::Cache={}", path("cache")),
            // The user that apt switches to otherwise may not write here.
            "APT::Sandbox::User=root".to_owned(),
            // Overrides weaker settings of this machine.
            "APT::Get::AllowUnauthenticated=false".to_owned(),
            "Acquire::AllowInsecureRepositories=false".to_owned(),
            "Acquire::AllowWeakRepositories=false".to_owned(),
            "Acquire::Languages=none".to_owned(),
            "Acquire::Retries=3".to_owned(),
            "Acquire::http::Timeout=60".to_owned(),
        ];
        for index in ["DEP-11", "DEP-11-icons", "Contents-deb", "CNF"] {
            options.push(format!(
                "Acquire::IndexTargets::deb::{index}::DefaultEnabled=false"
            ));
        }
        if !self.is_for_machine {
            options.push("Dir::State::Status=/dev/null".to_owned());
            options.push("APT::Architecture=amd64".to_owned());
        }
        command.arg("-q");
        for option in options {
            command.args(["-o", &option]);
        }
        command
    }
}

/// Unpacks all packages of a folder into another.
pub(crate) fn unpack(debs: &[PathBuf], into: &Path) -> Result<()> {
    for deb in debs {
        let mut command = Command::new("dpkg-deb");
        let output = command.arg("-x").arg(deb).arg(into).output();
        let output = output.context("cannot start dpkg-deb")?;
        ensure!(
            output.status.success(),
            "cannot unpack {}: {}",
            deb.display(),
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(())
}

/// Returns the packages in a folder, in the order of their names.
pub(crate) fn packages_in(folder: &Path) -> Result<Vec<PathBuf>> {
    let mut debs = Vec::new();
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "deb") {
            debs.push(path);
        }
    }
    debs.sort();
    Ok(debs)
}

/// Returns the hash of a file.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let mut command = Command::new("sha256sum");
    let said = output(command.arg("--binary").arg("--").arg(path))?;
    let sum = said.split_whitespace().next().unwrap_or_default();
    Ok(sum.to_owned())
}

/// Fails if a file doesn't have this hash.
pub(crate) fn check_hash(path: &Path, expected: &str) -> Result<()> {
    let sum = sha256(path)?;
    ensure!(
        sum == expected,
        "{} has the SHA-256 {sum}, and {expected} is pinned",
        path.display()
    );
    Ok(())
}

/// Returns the output of a program, if it succeeds.
pub(crate) fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", command.get_program().display()))?;
    ensure!(
        output.status.success(),
        "{} failed ({}): {}",
        command.get_program().display(),
        output.status,
        String::from_utf8_lossy(&output.stderr).trim()
    );
    Ok(String::from_utf8_lossy(&output.stdout).into_owned())
}

/// Returns the names in the plan that apt prints.
fn installed_by(plan: &str) -> Vec<String> {
    let lines = plan.lines().filter_map(|line| line.strip_prefix("Inst "));
    let names = lines.filter_map(|line| line.split([' ', ':']).next());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_plan_of_apt_names_what_it_installs() {
        let plan = "NOTE: This is only a simulation!\nRemv qemu-utils [1:10.0]\n\
                    Inst libaio1 (0.3.113-4 Debian:12.15/oldstable [amd64])\n\
                    Inst libfdt1:amd64 [1.5] (1.6.1-4+b1 Debian:12.15/oldstable [amd64])\n\
                    Conf libaio1 (0.3.113-4 Debian:12.15/oldstable [amd64])\n";

        assert_eq!(installed_by(plan), ["libaio1", "libfdt1"]);
    }

    #[test]
    fn a_file_with_another_hash_is_refused_by_name() {
        // The hash of an empty file.
        let nothing = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        check_hash(Path::new("/dev/null"), nothing).expect("the same");

        let error = check_hash(Path::new("/dev/null"), &"0".repeat(64)).expect_err("another");

        let error = error.to_string();
        assert!(error.contains("/dev/null has the SHA-256 e3b0"), "{error}");
    }
}
