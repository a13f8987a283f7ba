//! Builds and installs `bpf-linker` for a compiler's LLVM.

use anyhow::{Result, ensure};

use super::Inventory;
use crate::{progress, workspace};

/// The LLVM version of Debian's compiler, which is assumed until that compiler is installed and can be
/// queried.
pub(super) const DEBIAN_LLVM: u32 = 22;
/// The release of `bpf-linker` to install.
const RELEASE: &str = "0.13.0";
/// The LLVM versions against which this release can be built.
const LLVMS: std::ops::RangeInclusive<u32> = 21..=23;

/// Returns the directory in which Debian installs an LLVM version.
pub(super) fn prefix(llvm: u32) -> String {
    format!("/usr/lib/llvm-{llvm}")
}

/// Returns the Debian packages that are needed to build the linker.
pub(super) fn packages(llvm: u32) -> Vec<String> {
    let mut packages = vec![format!("llvm-{llvm}-dev"), format!("libpolly-{llvm}-dev")];
    packages.extend(
        [
            "gcc",
            "libc6-dev",
            "zlib1g-dev",
            "libzstd-dev",
            "libxml2-dev",
        ]
        .map(str::to_owned),
    );
    packages
}

/// Returns true if a linker is installed that was built for this LLVM or for an unknown one.
pub(super) fn is_installed(inventory: &Inventory, llvm: u32) -> bool {
    match &inventory.toolchain {
        Ok(_) => true,
        Err(not_found) => not_found
            .linkers
            .iter()
            .any(|linker| linker.llvm.is_none_or(|built| built == llvm)),
    }
}

/// Compiles the linker and installs it in the default directory of `cargo install`, or in this workspace's
/// tools directory if it would otherwise replace a linker for another LLVM.
pub(super) fn install(inventory: &Inventory, llvm: u32) -> Result<()> {
    ensure!(
        LLVMS.contains(&llvm),
        "bpf-linker {RELEASE} can be built against LLVM {} to {}, but the compiler has LLVM \
         {llvm}. Install a Rust toolchain with one of these",
        LLVMS.start(),
        LLVMS.end(),
    );
    let has_other = inventory
        .toolchain
        .as_ref()
        .is_err_and(|not_found| !not_found.linkers.is_empty());
    let mut command = workspace::cargo("install");
    command
        .args([
            "bpf-linker",
            "--version",
            RELEASE,
            "--locked",
            "--no-default-features",
        ])
        .args(["--features", &format!("llvm-{llvm}")])
        .env("LLVM_PREFIX", prefix(llvm))
        // Use a temporary target directory, so that builds in the workspace do not wait for its lock.
        .env_remove("CARGO_TARGET_DIR");
    if has_other {
        command.arg("--force").arg("--root").arg(workspace::tools());
    }
    progress::step(
        &format!("cargo install bpf-linker {RELEASE} for LLVM {llvm}"),
        &mut command,
    )
}
