//! The environment variables that the lab uses. Only this module reads them.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

/// Finds the program under test: the path in `CULVERT_BIN` if it is set, otherwise `culvert` in this
/// program's directory or its parent.
pub fn culvert() -> Result<PathBuf> {
    find("CULVERT_BIN", "culvert").context("build it with `cargo build`, or set CULVERT_BIN")
}

/// Finds the lab's own program, which creates sandboxes and runs servers and loads in them: the path in
/// `CULVERT_LAB_BIN` if it is set, otherwise `culvert-lab` in this program's directory or its parent.
pub fn culvert_lab() -> Result<PathBuf> {
    find("CULVERT_LAB_BIN", "culvert-lab")
        .context("build it with `cargo build --package tunnel-tests`, or set CULVERT_LAB_BIN")
}

/// Returns the value of `CULVERT_SCALE`, a factor for the counts and rates of loads.
pub(crate) fn load_factor() -> Option<String> {
    env::var_os("CULVERT_SCALE")?.into_string().ok()
}

/// Returns the value of `CULVERT_LASTING`, a factor for the durations of loads.
pub(crate) fn duration_factor() -> Option<String> {
    env::var_os("CULVERT_LASTING")?.into_string().ok()
}

/// Returns the number of random clusters to compare with the reference model, as set in `CULVERT_CLUSTERS`.
#[must_use]
pub fn clusters() -> Option<u64> {
    number("CULVERT_CLUSTERS")
}

/// Returns the seed for the first random cluster, as set in `CULVERT_SEED`.
#[must_use]
pub fn seed() -> Option<u64> {
    number("CULVERT_SEED")
}

fn number(variable: &str) -> Option<u64> {
    env::var_os(variable)?.into_string().ok()?.parse().ok()
}

/// Returns the path of the file to which skipped tests are appended, as set in `CULVERT_SKIPS`.
pub(crate) fn skips() -> Option<PathBuf> {
    env::var_os("CULVERT_SKIPS").map(PathBuf::from)
}

fn find(variable: &str, name: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        let path = PathBuf::from(path);
        if !path.is_file() {
            bail!("{variable} is {}, which is not a file", path.display());
        }
        return Ok(path);
    }
    let own = env::current_exe().context("cannot find the path of this program")?;
    // Cargo puts test programs into `deps`, a subdirectory of the directory with the other programs.
    own.ancestors()
        .skip(1)
        .take(2)
        .map(|directory| directory.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("no program {name} in or above {}", parent(&own).display()))
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}
