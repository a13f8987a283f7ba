//! Programs that need nothing of the machine they run on, and in which nothing tells of the machine
//! they were built on.

use std::{env, ffi::OsString, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::{compile, workspace};

/// The target is named so that the flags are for it alone, not for build scripts and macros too.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Random numbers come from the kernel alone: what else is gathered when a program draws its first,
/// from the unevenness of its own clock, takes an emulated machine most of a second.
const NO_JITTER: &str = "AWS_LC_SYS_NO_JITTER_ENTROPY";

/// How they are built.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Profile {
    /// To be used.
    Release,
    /// To be tested, also in emulated machines.
    Vm,
}

impl Profile {
    /// A `cargo build`, or another subcommand that builds, which is yet to be told of what.
    pub(crate) fn cargo(self, subcommand: &str) -> Result<Command> {
        let target = workspace::root().join("target/static");
        let mut command = workspace::cargo(subcommand);
        command.args(["--target", TARGET, "--target-dir"]);
        command.arg(&target);
        let mut flags: Vec<OsString> = vec!["-Ctarget-feature=+crt-static".into()];
        match self {
            Self::Release => {
                command.args(["--profile", "release"]);
                // Names of functions hold numbers that the linker made from the folder of the build.
                command.env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
            }
            Self::Vm => {
                command.args(["--profile", "vm"]).env(NO_JITTER, "1");
                // Nothing is relocated: a start costs an emulated machine 20 times as much.
                flags.push("-Crelocation-model=static".into());
            }
        }
        // The last prefix that fits wins: the target folder often lies in the workspace.
        let mut prefixes = vec![
            (workspace::root().to_owned(), "culvert"),
            (target, "target"),
            (sysroot()?.join("lib/rustlib/src/rust"), "rust"),
        ];
        prefixes.extend(compile::registries().into_iter().map(|it| (it, "crates")));
        for (folder, name) in prefixes {
            let flag = compile::joined("--remap-path-prefix=", &folder, &format!("={name}"));
            flags.push(flag);
        }
        command.env(
            "CARGO_ENCODED_RUSTFLAGS",
            flags.join(&OsString::from("\x1f")),
        );
        Ok(command)
    }
}

/// Where the standard library lies whose sources are named in a program.
fn sysroot() -> Result<PathBuf> {
    let rustc = env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let output = Command::new(&rustc)
        .current_dir(workspace::root())
        .args(["--print", "sysroot"])
        .output()
        .with_context(|| format!("cannot start {}", rustc.display()))?;
    ensure!(output.status.success(), "rustc knows no sysroot");
    let text = String::from_utf8(output.stdout).context("rustc --print sysroot")?;
    Ok(text.trim_end().into())
}
