//! Queries about this machine and this process's environment.

use std::{env, fs, os::unix::fs::MetadataExt as _, path::PathBuf};

/// Returns true if this process runs as root.
pub(crate) fn is_root() -> bool {
    fs::metadata("/proc/self").is_ok_and(|process| process.uid() == 0)
}

/// Returns true if the variable `CI` indicates an automated run.
pub(crate) fn is_ci() -> bool {
    env::var_os("CI").is_some_and(|value| !value.is_empty() && value != "false" && value != "0")
}

/// Returns the path of a program in `PATH` or in a directory for system programs.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = env::var_os("PATH").unwrap_or_default();
    // Users other than root often don't have these directories in their `PATH`.
    let directories = env::split_paths(&path).chain(["/usr/sbin".into(), "/sbin".into()]);
    directories
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
}
