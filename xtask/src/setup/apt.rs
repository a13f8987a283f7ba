//! Installs Debian packages.

use std::process::Command;

use anyhow::{Context as _, Result, bail};

use crate::{host, progress};

/// The packages that contain Debian's newest Rust compiler and its `core` for BPF.
pub(super) const COMPILER: [&str; 2] = ["rustc-web", "libstd-rust-web-dev-bpf"];

/// Installs whichever of the given packages are missing; does not call apt if none are.
pub(super) fn install(packages: &[&str]) -> Result<()> {
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    if !unknown(&missing)?.is_empty() {
        update()?;
        let unknown = unknown(&missing)?;
        if !unknown.is_empty() {
            bail!("{}", unknown_message(&unknown));
        }
    }
    let label = format!("apt-get install {}", missing.join(" "));
    if let Err(first_error) = progress::step(&label, &mut install_command(&missing)) {
        // Outdated package lists refer to files that the archive no longer has.
        println!("{label} failed; trying again with updated package lists");
        update()?;
        progress::step(&label, &mut install_command(&missing))
            .with_context(|| format!("the first try failed with: {first_error}"))?;
    }
    Ok(())
}

/// Fails if any package is missing. The error names the commands that install it as root.
pub(super) fn refuse_without_root(packages: &[&str]) -> Result<()> {
    let missing = missing(packages)?;
    if missing.is_empty() {
        return Ok(());
    }
    bail!(
        "Debian packages are missing. Type as root:\n  apt-get update\n  apt-get install \
         --no-install-recommends {}\nthen, as yourself: cargo xtask setup",
        missing.join(" ")
    )
}

/// Returns true if apt knows an installable version of the package.
pub(super) fn has_candidate(package: &str) -> bool {
    unknown(&[package]).is_ok_and(|unknown| unknown.is_empty())
}

fn missing<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    if packages.is_empty() {
        return Ok(Vec::new());
    }
    if host::find_program("dpkg-query").is_none() {
        bail!(
            "dpkg-query is not installed: setup installs packages only on Debian. Elsewhere, \
             install a Rust toolchain with rust-src and a bpf-linker of the same LLVM, and set {} \
             and {} to their paths",
            crate::toolchain::RUSTC_VARIABLE,
            crate::toolchain::LINKER_VARIABLE,
        );
    }
    let output = Command::new("dpkg-query")
        .args([
            "--show",
            "--showformat",
            "${Package} ${db:Status-Status}\\n",
        ])
        .args(packages)
        .output()
        .context("cannot start dpkg-query")?;
    let listing = String::from_utf8_lossy(&output.stdout).into_owned();
    Ok(without_installed(packages, &listing))
}

fn without_installed<'a>(packages: &[&'a str], listing: &str) -> Vec<&'a str> {
    let is_installed = |package: &str| {
        listing
            .lines()
            .any(|line| line.strip_suffix(" installed") == Some(package))
    };
    packages
        .iter()
        .copied()
        .filter(|package| !is_installed(package))
        .collect()
}

/// Returns the given packages that apt cannot install from its configured sources.
fn unknown<'a>(packages: &[&'a str]) -> Result<Vec<&'a str>> {
    let output = Command::new("apt-cache")
        .env("LC_ALL", "C")
        .arg("policy")
        .args(packages)
        .output()
        .context("cannot start apt-cache")?;
    Ok(without_candidate(
        packages,
        &String::from_utf8_lossy(&output.stdout),
    ))
}

fn without_candidate<'a>(packages: &[&'a str], policy: &str) -> Vec<&'a str> {
    let mut known = Vec::new();
    let mut package = "";
    for line in policy.lines() {
        if let Some(name) = line.strip_suffix(':').filter(|name| !name.starts_with(' ')) {
            package = name;
        } else if let Some(version) = line.trim().strip_prefix("Candidate: ")
            && version != "(none)"
        {
            known.push(package);
        }
    }
    packages
        .iter()
        .copied()
        .filter(|package| !known.contains(package))
        .collect()
}

fn unknown_message(packages: &[&str]) -> String {
    format!(
        "apt cannot find the packages {}. On Debian 12 they are in the suites bookworm and \
         bookworm-security (component main): enable both in /etc/apt/sources.list or \
         /etc/apt/sources.list.d, then type: apt-get update && cargo xtask setup",
        packages.join(", ")
    )
}

fn update() -> Result<()> {
    progress::step("apt-get update", apt_get().arg("update"))
        .context("cannot update the package lists; are the sources of apt reachable?")
}

fn install_command(packages: &[&str]) -> Command {
    let mut command = apt_get();
    command
        .args(["install", "--yes", "--no-install-recommends"])
        .args(packages);
    command
}

fn apt_get() -> Command {
    let mut command = Command::new("apt-get");
    command
        .env("DEBIAN_FRONTEND", "noninteractive")
        .args(["-o", "DPkg::Lock::Timeout=120"]);
    command
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_packages_in_state_installed_count_as_installed() {
        let listing = "gcc installed\nllvm-22-dev config-files\nllvm-22 installed\n";

        let missing = without_installed(&["gcc", "llvm-22-dev", "llvm-22", "zlib1g-dev"], listing);

        assert_eq!(missing, ["llvm-22-dev", "zlib1g-dev"]);
    }

    #[test]
    fn a_package_without_candidate_is_unknown() {
        let policy = "rustc-web:\n  Installed: (none)\n  Candidate: 1.96.0\n  Version table:\n     \
                      1.96.0 500\nrust-web-clippy:\n  Installed: 1.85.0\n  Candidate: (none)\n";

        let unknown = without_candidate(&["rustc-web", "rust-web-clippy", "no-such"], policy);

        assert_eq!(unknown, ["rust-web-clippy", "no-such"]);
    }

    #[test]
    fn the_error_names_an_unknown_package_and_its_suite() {
        let message = unknown_message(&["libstd-rust-web-dev-bpf"]);

        assert!(message.contains("libstd-rust-web-dev-bpf"));
        assert!(message.contains("bookworm-security"));
    }
}
