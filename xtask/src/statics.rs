//! Static programs: they need nothing of the machine they run on, and contain no path of the machine
//! they were built on.

use std::{env, ffi::OsString, path::PathBuf, process::Command};

use anyhow::{Context as _, Result, ensure};
use clap::ValueEnum;

use crate::{compile, workspace};

/// An explicit target, so that the flags apply to it alone, not to build scripts and macros, too.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Random numbers come from the kernel alone: otherwise the first one also gathers entropy from clock
/// jitter, which takes most of a second on an emulated machine.
const NO_JITTER: &str = "AWS_LC_SYS_NO_JITTER_ENTROPY";

/// The build profile.
#[derive(Clone, Copy, Debug, ValueEnum)]
pub(crate) enum Profile {
    /// For production.
    Release,
    /// For tests, also on emulated machines.
    Vm,
}

impl Profile {
    /// Returns a `cargo build`, or another building subcommand, without its packages.
    pub(crate) fn cargo(self, subcommand: &str) -> Result<Command> {
        let target = workspace::root().join("target/static");
        let mut command = workspace::cargo(subcommand);
        command.args(["--target", TARGET, "--target-dir"]);
        command.arg(&target);
        let mut flags: Vec<OsString> = vec!["-Ctarget-feature=+crt-static".into()];
        match self {
            Self::Release => {
                command.args(["--profile", "release"]);
                // Symbol names contain numbers that the linker derives from the build folder.
                command.env("CARGO_PROFILE_RELEASE_STRIP", "symbols");
            }
            Self::Vm => {
                command.args(["--profile", "vm"]).env(NO_JITTER, "1");
                // No relocation at start, which would take 20 times as long on an emulated machine.
                flags.push("-Crelocation-model=static".into());
            }
        }
        // The last matching prefix wins: the target folder is often inside the workspace.
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

/// Returns the sysroot of the standard library, whose source paths are in a program.
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
