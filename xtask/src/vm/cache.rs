//! The parts of guests, cached in the folder `target/vm`.
//!
//! Files are written next to their path and renamed when complete, so that an existing path is always
//! usable.

use std::{
    ffi::OsString,
    fs::{self, File},
    io,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use crate::workspace;

/// Returns a path in the folder.
pub(crate) fn place(name: &str) -> PathBuf {
    workspace::root().join("target/vm").join(name)
}

/// An exclusive lock on a name, against other processes and threads, until it is dropped.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

/// Waits for the lock.
pub(crate) fn lock(name: &str) -> Result<Lock> {
    let path = place("locks").join(name);
    make_parent(&path)?;
    let lock = || {
        let file = File::create(&path)?;
        file.lock()?;
        io::Result::Ok(file)
    };
    let file = lock().with_context(|| format!("cannot lock {}", path.display()))?;
    Ok(Lock { _file: file })
}

/// Creates a folder atomically, once it is filled.
pub(crate) fn folder(path: &Path, fill: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let partial = beside(path);
    clear(&partial)?;
    fs::create_dir_all(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    fill(&partial)?;
    clear(path)?;
    rename(&partial, path)
}

/// Creates a file atomically, once it is written.
pub(crate) fn file(path: &Path, write: impl FnOnce(&mut File) -> Result<()>) -> Result<()> {
    make_parent(path)?;
    let partial = beside(path);
    let mut file =
        File::create(&partial).with_context(|| format!("cannot create {}", partial.display()))?;
    write(&mut file)?;
    rename(&partial, path)
}

/// Removes the old folder.
fn clear(path: &Path) -> Result<()> {
    match fs::remove_dir_all(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(error).with_context(|| format!("cannot remove {}", path.display()))
        }
        Ok(()) | Err(_) => Ok(()),
    }
}

fn rename(from: &Path, to: &Path) -> Result<()> {
    fs::rename(from, to).with_context(|| format!("cannot rename {}", from.display()))
}

fn make_parent(path: &Path) -> Result<()> {
    let parent = path.parent().unwrap_or(path);
    fs::create_dir_all(parent).with_context(|| format!("cannot create {}", parent.display()))
}

fn beside(path: &Path) -> PathBuf {
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
    fn a_folder_whose_filling_fails_is_not_there_and_the_next_try_starts_empty() {
        let scratch = tempfile::tempdir().expect("a folder");
        let path = scratch.path().join("kernel");

        let failed = folder(&path, |partial| {
            fs::write(partial.join("half"), "")?;
            bail!("interrupted")
        });
        assert!(failed.is_err());
        assert!(!path.exists());

        folder(&path, |partial| Ok(fs::write(partial.join("whole"), "")?)).expect("filled");
        assert!(path.join("whole").exists());
        assert!(!path.join("half").exists());
    }

    #[test]
    fn a_file_whose_writing_fails_leaves_the_old_one() {
        let scratch = tempfile::tempdir().expect("a folder");
        let path = scratch.path().join("base");
        file(&path, |out| Ok(out.write_all(b"old")?)).expect("written");

        let failed = file(&path, |out| {
            out.write_all(b"ne")?;
            bail!("interrupted")
        });

        assert!(failed.is_err());
        assert_eq!(fs::read(&path).expect("the file"), b"old");
    }
}
