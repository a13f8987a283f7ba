//! Builds programs in the workspace.

use std::{
    collections::BTreeMap,
    io::BufRead as _,
    path::PathBuf,
    process::{Command, Stdio},
};

use anyhow::{Context as _, Result, ensure};

/// A program in the workspace: its package and its name.
pub(crate) type Program = (&'static str, &'static str);

/// The daemon and command-line program.
pub(crate) const CULVERT: Program = ("tunnel-userspace", "culvert");
/// The lab program, which the tests, the demo and the benchmarks start.
pub(crate) const LAB: Program = ("tunnel-tests", "culvert-lab");

/// Builds programs with the given `cargo build` command, and returns their paths.
pub(crate) fn build<const N: usize>(
    mut command: Command,
    programs: [Program; N],
) -> Result<[PathBuf; N]> {
    for (package, name) in programs {
        command.args(["--package", package, "--bin", name]);
    }
    let mut built = run_build(&mut command)?;
    let mut paths = [const { PathBuf::new() }; N];
    for (path, (_, name)) in paths.iter_mut().zip(programs) {
        let found = built.remove(name);
        *path = found.with_context(|| format!("cargo build did not name the program {name}"))?;
    }
    Ok(paths)
}

/// Runs a Cargo build command, and returns the paths of the built programs by name.
pub(crate) fn run_build(command: &mut Command) -> Result<BTreeMap<String, PathBuf>> {
    command
        .arg("--message-format=json-render-diagnostics")
        .stdout(Stdio::piped());
    let mut child = command.spawn().context("cannot start cargo build")?;
    let mut built = BTreeMap::new();
    for line in child
        .stdout
        .take()
        .into_iter()
        .flat_map(|out| std::io::BufReader::new(out).lines())
    {
        let message: serde_json::Value = serde_json::from_str(&line?)?;
        let name = message["target"]["name"].as_str();
        if let (Some(name), Some(path)) = (name, message["executable"].as_str()) {
            built.insert(name.to_owned(), PathBuf::from(path));
        }
    }
    ensure!(child.wait()?.success(), "cargo build failed");
    Ok(built)
}
