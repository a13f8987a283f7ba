//! Builds static programs, which need no shared libraries at run time and contain no paths from the build
//! machine.

use std::{env, ffi::OsString, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::{compile, workspace};

/// The target, which is named explicitly so that Cargo does not apply the flags to build scripts and macros.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Variable that makes the crypto library take entropy only from the kernel. By default, it also measures
/// clock jitter for its first random number, which takes most of a second on an emulated CPU.
const NO_JITTER: &str = "AWS_LC_SYS_NO_JITTER_ENTROPY";

/// A build profile for static programs.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Profile {
    /// For production.
    Release,
    /// For tests, including tests on emulated CPUs.
    Vm,
}

impl Profile {
    /// Returns a Cargo command that builds with this profile, such as `cargo build`; the caller adds the
    /// packages.
    pub(crate) fn cargo(self, subcommand: &str) -> Result<Command> {
        let target = workspace::root().join("target/static");
        let mut command = workspace::cargo(subcommand);
        command.args(["--target", TARGET, "--target-dir"]);
        command.arg(&target);
        let mut flags: Vec<OsString> = vec!["-Ctarget-feature=+crt-static".into()];
        match self {
            Self::Release => {
                command.args(["--profile", "release"]);
                // The linker derives parts of symbol names from the build directory's path.
                command.env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
            }
            Self::Vm => {
                command.args(["--profile", "vm"]).env(NO_JITTER, "1");
                // Without relocations, a program starts 20 times as fast on an emulated CPU.
                flags.push("-Crelocation-model=static".into());
            }
        }
        // The last matching prefix wins; the target directory is often inside the workspace.
        let mut prefixes = vec![
            (workspace::root().to_owned(), "culvert"),
            (target, "target"),
            (sysroot()?.join("lib/rustlib/src/rust"), "rust"),
        ];
        prefixes.extend(compile::registries().into_iter().map(|it| (it, "crates")));
        for (directory, name) in prefixes {
            let flag = compile::joined("--remap-path-prefix=", &directory, &format!("={name}"));
            flags.push(flag);
        }
        command.env(
            "CARGO_ENCODED_RUSTFLAGS",
            flags.join(&OsString::from("\x1f")),
        );
        Ok(command)
    }
}

/// Returns the compiler's sysroot; programs contain source paths from its standard library.
fn sysroot() -> Result<PathBuf> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(&rustc)
        .current_dir(workspace::root())
        .args(["--print", "sysroot"])
        .output()
        .with_context(|| format!("cannot start {}", rustc.display()))?;
    ensure!(
        output.status.success(),
        "rustc --print sysroot failed ({})",
        output.status
    );
    let text = String::from_utf8(output.stdout).context("the sysroot of rustc is not UTF-8")?;
    Ok(text.trim_end().into())
}
