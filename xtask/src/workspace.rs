//! The paths, the user, and the `cargo` that builds the workspace.

use std::{
    collections::BTreeMap,
    env, fs,
    io::BufRead as _,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::LazyLock,
};

use anyhow::{Context as _, Result, ensure};

/// Returns the folder of the workspace, by its real path.
pub(crate) fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        root.canonicalize().unwrap_or(root)
    });
    &ROOT
}

/// Returns the folder of tools that `setup` installs.
pub(crate) fn tools() -> PathBuf {
    root().join("target/tools")
}

pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Returns true if the run is automated (CI).
pub(crate) fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false" && value != "0")
}

/// Returns the `cargo` that started this process, in the root of the workspace.
pub(crate) fn cargo(subcommand: &str) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).arg(subcommand);
    command
}

/// Returns the path of a program in PATH.
pub(crate) fn program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // The folders of system programs, which other users lack in PATH.
    let folders = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    folders
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

/// A program of the workspace: its package and its name.
pub(crate) type Program = (&'static str, &'static str);

/// The daemon.
pub(crate) const CULVERT: Program = ("tunnel-userspace", "culvert");
/// The laboratory, which tests, the demo and the benchmarks start.
pub(crate) const LAB: Program = ("tunnel-tests", "culvert-lab");

/// Builds programs by a `cargo build`, and returns their paths.
pub(crate) fn build_programs<const N: usize>(
    mut command: Command,
    programs: [Program; N],
) -> Result<[PathBuf; N]> {
    for (package, name) in programs {
        command.args(["--package", package, "--bin", name]);
    }
    let mut built = built(&mut command)?;
    let mut paths = [const { PathBuf::new() }; N];
    for (path, (_, name)) in paths.iter_mut().zip(programs) {
        let named = built.remove(name);
        *path = named.with_context(|| format!("cargo build did not name the program {name}"))?;
    }
    Ok(paths)
}

/// Runs a build, and returns the path of each program.
pub(crate) fn built(command: &mut Command) -> Result<BTreeMap<String, PathBuf>> {
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
