//! `bpf-linker`, built against one LLVM.

use anyhow::{Result, ensure};

use super::Inventory;
use crate::{progress, workspace};

/// The LLVM of Debian's compiler, assumed until that compiler is installed and can be queried.
pub(super) const DEBIAN_LLVM: u32 = 22;
const RELEASE: &str = "0.13.0";
/// The LLVM versions that this release can be built against.
const LLVMS: std::ops::RangeInclusive<u32> = 21..=23;

/// Returns the folder where Debian installs an LLVM.
pub(super) fn prefix(llvm: u32) -> String {
    format!("/usr/lib/llvm-{llvm}")
}

/// Returns the Debian packages that the linker's build needs.
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

/// Returns true if a linker of that LLVM is present and only its compiler is missing.
pub(super) fn is_fit(inventory: &Inventory, llvm: u32) -> bool {
    match &inventory.pair {
        Ok(_) => true,
        Err(missing) => missing
            .linkers
            .iter()
            .any(|linker| linker.llvm.is_none_or(|built| built == llvm)),
    }
}

/// Compiles and installs the linker: at the default of `cargo install` or, if that would replace a
/// linker of another LLVM, in the tools folder of this workspace.
pub(super) fn install(inventory: &Inventory, llvm: u32) -> Result<()> {
    ensure!(
        LLVMS.contains(&llvm),
        "bpf-linker {RELEASE} can be built against LLVM {} to {}, the compiler has LLVM {llvm}",
        LLVMS.start(),
        LLVMS.end(),
    );
    let has_other = inventory
        .pair
        .as_ref()
        .is_err_and(|missing| !missing.linkers.is_empty());
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
        // A separate target folder: builds of the workspace need not wait for it.
        .env_remove("CARGO_TARGET_DIR");
    if has_other {
        command.arg("--force").arg("--root").arg(workspace::tools());
    }
    progress::step(
        &format!("cargo install bpf-linker {RELEASE} for LLVM {llvm}"),
        &mut command,
    )
}
