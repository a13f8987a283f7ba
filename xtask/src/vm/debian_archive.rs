//! Downloads Debian packages from any suite. apt runs with its own lists and options, and does not modify
//! this machine.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};

use super::{apt_sources::Mirrors, download_cache};
use crate::progress;

/// Suites in Debian's archive, with their own package lists.
#[derive(Debug)]
pub(crate) struct DebianArchive {
    /// Directory that contains the package lists.
    directory: PathBuf,
    /// Names of the suites, for messages.
    pub(crate) suites: String,
    /// True if apt takes the packages installed on this machine into account.
    is_for_machine: bool,
}

impl DebianArchive {
    /// Opens a suite; apt assumes that no packages are installed.
    pub(crate) fn of_suite(suite: &str) -> Result<Self> {
        let mirrors = Mirrors::read()?;
        Self::open(&mirrors, &[suite.to_owned()], false)
    }

    /// Opens this machine's suites; apt takes its installed packages into account.
    pub(crate) fn of_machine() -> Result<Self> {
        let mirrors = Mirrors::read()?;
        let codename = &mirrors.codename;
        let suites = [codename.clone(), format!("{codename}-security")];
        Self::open(&mirrors, &suites, true)
    }

    fn open(mirrors: &Mirrors, suites: &[String], is_for_machine: bool) -> Result<Self> {
        let suite_names = suites.join("+");
        let directory = download_cache::path("apt").join(&suite_names);
        for part in ["lists/partial", "cache/archives/partial"] {
            let part = directory.join(part);
            fs::create_dir_all(&part)
                .with_context(|| format!("cannot create {}", part.display()))?;
        }
        let lines = suites.iter().map(|suite| mirrors.of(suite).line(suite));
        let path = directory.join("sources.list");
        fs::write(&path, lines.collect::<String>())
            .with_context(|| format!("cannot write {}", path.display()))?;
        Ok(Self {
            directory,
            suites: suite_names,
            is_for_machine,
        })
    }

    /// Downloads the package lists.
    pub(crate) fn update(&self) -> Result<()> {
        let label = format!("package lists of {}", self.suites);
        // By default, apt silently keeps old lists if it cannot download new ones.
        let fail_on_any_error = ["-o", "APT::Update::Error-Mode=any"];
        let mut command = self.apt("apt-get");
        progress::step(&label, command.args(fail_on_any_error).arg("update"))
    }

    /// Returns the control data for the newest version of each package.
    pub(crate) fn show(&self, packages: &[String]) -> Result<String> {
        let mut command = self.apt("apt-cache");
        command.args(["show", "--no-all-versions"]).args(packages);
        let names = packages.join(" ");
        progress::output(&mut command)
            .with_context(|| format!("the suite {} has no package {names}", self.suites))
    }

    /// Returns true if all of the given packages (each as `name=version`) are available.
    pub(crate) fn offers(&self, packages: &[String]) -> bool {
        let mut command = self.apt("apt-cache");
        progress::succeeds(command.arg("show").args(packages))
    }

    /// Downloads packages into a directory. apt checks their hashes against the signed package lists.
    pub(crate) fn download(&self, packages: &[String], into: &Path) -> Result<()> {
        let label = format!("download {} from {}", packages.join(" "), self.suites);
        let mut command = self.apt("apt-get");
        command.current_dir(into).arg("download").args(packages);
        progress::step(&label, &mut command)
    }

    /// Returns the names of all packages, including dependencies, that apt would install for the given
    /// packages.
    pub(crate) fn simulate_install(&self, packages: &[&str]) -> Result<Vec<String>> {
        let mut command = self.apt("apt-get");
        command.args(["install", "--simulate", "--no-install-recommends"]);
        let names = packages.join(" ");
        let simulation = progress::output(command.args(packages))
            .with_context(|| format!("apt cannot install {names} from {}", self.suites))?;
        Ok(parse_simulation(&simulation))
    }

    /// Returns an apt command that uses only this archive's lists and options.
    fn apt(&self, program: &str) -> Command {
        let mut command = Command::new(program);
        command
            .env("LC_ALL", "C")
            .env("DEBIAN_FRONTEND", "noninteractive");
        let path = |name: &str| self.directory.join(name).display().to_string();
        let mut options = vec![
            format!("Dir::Etc::SourceList={}", path("sources.list")),
            "Dir::Etc::SourceParts=/dev/null".to_owned(),
            "Dir::Etc::Preferences=/dev/null".to_owned(),
            "Dir::Etc::PreferencesParts=/dev/null".to_owned(),
            format!("Dir::State::Lists={}", path("lists")),
            format!("Dir::Cache={}", path("cache")),
            // By default, apt switches to a user who may not write to the directories.
            "APT::Sandbox::User=root".to_owned(),
            // These override weaker settings on this machine.
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

/// Unpacks package files into a directory.
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

/// Returns the sorted paths of the package files in a directory.
pub(crate) fn list_debs(directory: &Path) -> Result<Vec<PathBuf>> {
    let mut debs = Vec::new();
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.extension().is_some_and(|kind| kind == "deb") {
            debs.push(path);
        }
    }
    debs.sort();
    Ok(debs)
}

/// Returns the SHA-256 of a file, in hexadecimal.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let mut command = Command::new("sha256sum");
    let output = progress::output(command.arg("--binary").arg("--").arg(path))?;
    let sum = output.split_whitespace().next().unwrap_or_default();
    Ok(sum.to_owned())
}

/// Fails if a file's SHA-256 is not the expected one.
pub(crate) fn check_hash(path: &Path, expected: &str) -> Result<()> {
    let sum = sha256(path)?;
    ensure!(
        sum == expected,
        "{} has the SHA-256 {sum}, but {expected} is pinned",
        path.display()
    );
    Ok(())
}

/// Returns the package names in the output of `apt-get install --simulate`.
fn parse_simulation(output: &str) -> Vec<String> {
    let lines = output.lines().filter_map(|line| line.strip_prefix("Inst "));
    let names = lines.filter_map(|line| line.split([' ', ':']).next());
    names.map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_simulation_of_apt_names_the_packages_that_it_would_install() {
        let output = "NOTE: This is only a simulation!\nRemv qemu-utils [1:10.0]\n\
                      Inst libaio1 (0.3.113-4 Debian:12.15/oldstable [amd64])\n\
                      Inst libfdt1:amd64 [1.5] (1.6.1-4+b1 Debian:12.15/oldstable [amd64])\n\
                      Conf libaio1 (0.3.113-4 Debian:12.15/oldstable [amd64])\n";

        assert_eq!(parse_simulation(output), ["libaio1", "libfdt1"]);
    }

    #[test]
    fn a_file_with_another_hash_is_refused_by_name() {
        let empty_file = "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";
        check_hash(Path::new("/dev/null"), empty_file).expect("the same hash");

        let error = check_hash(Path::new("/dev/null"), &"0".repeat(64)).expect_err("another");

        let error = error.to_string();
        assert!(error.contains("/dev/null has the SHA-256 e3b0"), "{error}");
    }
}
