//! The cache for files that are downloaded or built for virtual machines, in the directory `target/vm`.
//!
//! Files are written to a temporary path and renamed once complete, so that any path that exists is usable.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::workspace;

/// Returns a path in the cache directory.
pub(crate) fn path(name: &str) -> PathBuf {
    workspace::root().join("target/vm").join(name)
}

/// An exclusive lock on a name, held against other processes and threads until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Waits until the lock on a name is free, and takes it.
pub(crate) fn lock(name: &str) -> Result<Lock> {
    let path = path("locks").join(name);
    create_parent(&path)?;
    let lock = || {
        let file = File::create(&path)?;
        file.lock()?;
        io::Result::Ok(file)
    };
    let file = lock().with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(Lock { _file: file })
}

/// Fills a temporary directory, then replaces the directory at `path` with it.
pub(crate) fn create_directory(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let partial = partial_path(path);
    remove_directory(&partial)?;
    fs::create_dir_all(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    fill(&partial)?;
    remove_directory(path)?;
    rename(&partial, path)
}

/// Writes a temporary file, then replaces the file at `path` with it.
pub(crate) fn write_file(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    create_parent(path)?;
    let partial = partial_path(path);
    let mut file =
        File::create(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    write(&mut file)?;
    rename(&partial, path)
}

/// Removes a directory if it exists.
fn remove_directory(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to)
        .with_context(|| format!("cannot rename {} to {}", from.display(), to.display()))
}

fn create_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))
}

fn partial_path(path: &Path) -> PathBuf {
    let mut name: OsString = path.as_os_str().to_owned();
    name.push(".partial");
    name.into()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use anyhow::bail;

    use super::*;

    #[test]
    fn a_directory_appears_only_when_filled_and_the_next_try_starts_empty() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("kernel");

        let failed = create_directory(&path, |partial| {
            fs::write(partial.join("half"), "")?;
            bail!("interrupted")
        });
        assert!(failed.is_err());
        assert!(!path.exists());

        let fill = |partial: &Path| Ok(fs::write(partial.join("complete"), "")?);
        create_directory(&path, fill).expect("filled");
        assert!(path.join("complete").exists());
        assert!(!path.join("half").exists());
    }

    #[test]
    fn a_failed_write_leaves_the_old_file() {
        let scratch = tempfile::tempdir().expect("a directory");
        let path = scratch.path().join("base");
        write_file(&path, |out| Ok(out.write_all(b"old")?)).expect("written");

        let failed = write_file(&path, |out| {
            out.write_all(b"ne")?;
            bail!("interrupted")
        });

        assert!(failed.is_err());
        assert_eq!(fs::read(&path).expect("the file"), b"old");
    }
}
