//! What the laboratory takes from its environment; the only module here that reads it.

use std::{
    env,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

/// The program under test: `CULVERT_BIN`, else `culvert` beside the laboratory's own program.
pub fn culvert() -> Result<PathBuf> {
    find("CULVERT_BIN", "culvert").context("build it with `cargo build`, or set CULVERT_BIN")
}

/// The laboratory's own program, which holds places and runs servers and loads in them:
/// `CULVERT_LAB_BIN`, else this process, else `culvert-lab` near it.
pub fn culvert_lab() -> Result<PathBuf> {
    find("CULVERT_LAB_BIN", "culvert-lab")
        .context("build it with `cargo build --package tunnel-tests`, or set CULVERT_LAB_BIN")
}

/// The factor of `CULVERT_SCALE`, as written.
pub(crate) fn scale() -> Option<String> {
    env::var_os("CULVERT_SCALE")?.into_string().ok()
}

/// The factor of `CULVERT_LASTING`, as written.
pub(crate) fn lasting() -> Option<String> {
    env::var_os("CULVERT_LASTING")?.into_string().ok()
}

/// How many random clusters are compared with the reference model: `CULVERT_CLUSTERS`.
#[must_use]
pub fn clusters() -> Option<u64> {
    number("CULVERT_CLUSTERS")
}

/// The first of the seeds that random clusters grow from: `CULVERT_SEED`.
#[must_use]
pub fn seed() -> Option<u64> {
    number("CULVERT_SEED")
}

fn number(variable: &str) -> Option<u64> {
    env::var_os(variable)?.into_string().ok()?.parse().ok()
}

/// The file that tests which can't be run here are written to: `CULVERT_SKIPS`.
pub(crate) fn skips() -> Option<PathBuf> {
    env::var_os("CULVERT_SKIPS").map(PathBuf::from)
}

fn find(variable: &str, name: &str) -> Result<PathBuf> {
    if let Some(path) = env::var_os(variable) {
        let path = PathBuf::from(path);
        if !path.is_file() {
            bail!("{variable} names {}, which is no file", path.display());
        }
        return Ok(path);
    }
    let own = env::current_exe().context("cannot find this program's own file")?;
    // Test programs lie in `deps`, one folder below the programs that cargo builds.
    own.ancestors()
        .skip(1)
        .take(2)
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
        .with_context(|| format!("there is no {name} near {}", parent(&own).display()))
}

fn parent(path: &Path) -> &Path {
    path.parent().unwrap_or(path)
}
