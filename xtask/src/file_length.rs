//! Checks the length of source files.

use std::{fs, path::Path};

use anyhow::Result;

use crate::workspace;

/// Maximum number of lines in a file, including its `mod tests`.
const LIMIT: usize = 500;

/// Prints each source file that is too long; returns false if there are any.
pub(crate) fn check(root: &Path) -> Result<bool> {
    let mut is_good = true;
    for path in workspace::list_files(root, "rs")? {
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
    (lines > LIMIT)
        .then(|| format!("the file has {lines} lines, more than the limit of {LIMIT}: split it"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_over_the_limit_is_refused() {
        assert_eq!(complaint(500), None);
        assert_eq!(
            complaint(501).as_deref(),
            Some("the file has 501 lines, more than the limit of 500: split it")
        );
    }
}
