//! Appends to log files and reads them.

use std::{fs::File, path::Path};

use anyhow::{Context as _, Result};

/// Opens a file for appending, and creates it if it doesn't exist.
pub fn append(path: &Path) -> Result<File> {
    let mut options = File::options();
    let opened = options.create(true).append(true).open(path);
    opened.with_context(|| format!("cannot open {}", path.display()))
}

/// Reads a file, or returns an empty string if the file can't be read.
pub(crate) fn read(path: &Path) -> String {
    let bytes = std::fs::read(path).unwrap_or_default();
    String::from_utf8_lossy(&bytes).into_owned()
}
