//! The workspace's paths, and its `cargo`.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
    sync::LazyLock,
};

use anyhow::{Context as _, Result};

/// Returns the workspace's canonical path.
pub(crate) fn root() -> &'static Path {
    static ROOT: LazyLock<PathBuf> = LazyLock::new(|| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        root.canonicalize().unwrap_or(root)
    });
    &ROOT
}

/// Returns the directory into which `setup` installs tools.
pub(crate) fn tools() -> PathBuf {
    root().join("target/tools")
}

/// Returns a command for the `cargo` that started this process, to run in the workspace's root directory.
pub(crate) fn cargo(subcommand: &str) -> Command {
    let mut command = Command::new(env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root()).arg(subcommand);
    command
}

/// Returns all files below a directory that have the given extension, sorted by path. Skips `target`
/// directories and hidden files.
pub(crate) fn list_files(directory: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(directory)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("cannot list {}", directory.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() {
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                found.extend(list_files(&path, extension)?);
            }
        } else if path.extension().is_some_and(|it| it == extension) {
            found.push(path);
        }
    }
    found.sort();
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sources_of_this_crate_are_listed() {
        let directory = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let found = list_files(&directory, "rs").expect("readable");

        assert!(found.iter().any(|path| path.ends_with("src/workspace.rs")));
        assert!(found.iter().any(|path| path.ends_with("src/setup/apt.rs")));
    }
}
