//! Limits the length of source files: a longer one is split before it is merged.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

/// The maximum number of lines of a file, including its `mod tests`.
const LIMIT: usize = 500;

/// Prints each source file of the workspace that is too long; returns false if there is one.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut is_good = true;
    for path in files(root, "rs")? {
        let lines = fs::read_to_string(&path)?.lines().count();
        if let Some(complaint) = complaint(lines) {
            println!(
                "{}: {complaint}",
                path.strip_prefix(root).unwrap_or(&path).display()
            );
            is_good = false;
        }
    }
    Ok(is_good)
}

fn complaint(lines: usize) -> Option<String> {
    (lines > LIMIT).then(|| format!("{lines} lines, {LIMIT} at most: split it"))
}

/// Returns all files with an extension below a folder, in order, without output of Cargo and git.
pub(crate) fn files(folder: &Path, extension: &str) -> Result<Vec<PathBuf>> {
    let entries = fs::read_dir(folder)
        .and_then(Iterator::collect::<Result<Vec<_>, _>>)
        .with_context(|| format!("cannot list {}", folder.display()))?;
    let mut found = Vec::new();
    for entry in entries {
        let path = entry.path();
        let name = entry.file_name();
        if path.is_dir() {
            if name != "target" && !name.as_encoded_bytes().starts_with(b".") {
                found.extend(files(&path, extension)?);
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
    fn a_file_over_the_limit_is_refused() {
        assert_eq!(complaint(500), None);
        let complaint = complaint(501).expect("one too many");
        assert_eq!(complaint, "501 lines, 500 at most: split it");
    }

    #[test]
    fn the_sources_of_this_crate_are_found() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
        let found = files(&folder, "rs").expect("readable");

        assert!(found.iter().any(|path| path.ends_with("src/length.rs")));
        assert!(found.iter().any(|path| path.ends_with("src/setup/apt.rs")));
    }
}
