//! Folders of keys, and files in them that are there whole or not at all.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};

use super::CaError;

/// A folder of keys.
pub(super) struct Folder<'a> {
    path: &'a Path,
}

impl<'a> Folder<'a> {
    pub(super) const fn at(path: &'a Path) -> Self {
        Self { path }
    }

    /// Makes the folder, for its owner alone, if it is not there.
    pub(super) fn make(path: &'a Path) -> Result<Self, CaError> {
        let failed = |source| io_error("make", path, source);
        if !path.is_dir() {
            if let Some(parent) = path.parent().filter(|it| !it.as_os_str().is_empty()) {
                fs::create_dir_all(parent).map_err(failed)?;
            }
            match DirBuilder::new().mode(0o700).create(path) {
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists && path.is_dir() => {}
                made => made.map_err(failed)?,
            }
        }
        Ok(Self { path })
    }

    /// Holds the folder against another `culvert ca`, and waits for one that does.
    pub(super) fn hold(&self) -> Result<Flock<File>, CaError> {
        let failed = |source| io_error("use", self.path, source);
        let opened = File::open(self.path).map_err(failed)?;
        Flock::lock(opened, FlockArg::LockExclusive).map_err(|(_, error)| failed(error.into()))
    }
}

/// Writes files, each with its mode from the moment it exists: all beside their places first, then
/// one after the other into them, in this order.
pub(super) fn replace(files: &[(PathBuf, Vec<u8>, u32)]) -> Result<(), CaError> {
    let mut drafts = Vec::new();
    for (path, bytes, mode) in files {
        drafts.push(Draft::write(path, bytes, *mode)?);
    }
    for draft in drafts {
        draft.put()?;
    }
    Ok(())
}

/// A file beside its place; removed if it does not come there.
pub(super) struct Draft {
    place: PathBuf,
    path: PathBuf,
    is_put: bool,
}

impl Draft {
    pub(super) fn write(place: &Path, bytes: &[u8], mode: u32) -> Result<Self, CaError> {
        let failed = |source| io_error("write", place, source);
        let mut name = OsString::from(".");
        name.push(place.file_name().unwrap_or_default());
        name.push(".new");
        let path = place.with_file_name(name);
        // One that a run left behind which was killed.
        match fs::remove_file(&path) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&path)
            .map_err(failed)?;
        let draft = Self {
            place: place.to_owned(),
            path,
            is_put: false,
        };
        file.write_all(bytes).map_err(failed)?;
        file.sync_all().map_err(failed)?;
        Ok(draft)
    }

    pub(super) fn put(mut self) -> Result<(), CaError> {
        let failed = |source| io_error("write", &self.place, source);
        fs::rename(&self.path, &self.place).map_err(failed)?;
        let folder = self.place.parent().filter(|it| !it.as_os_str().is_empty());
        File::open(folder.unwrap_or_else(|| Path::new(".")))
            .and_then(|folder| folder.sync_all())
            .map_err(failed)?;
        self.is_put = true;
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if !self.is_put {
            drop(fs::remove_file(&self.path));
        }
    }
}

pub(super) fn io_error(step: &'static str, path: &Path, source: io::Error) -> CaError {
    CaError::Io {
        step,
        path: path.to_owned(),
        source,
    }
}
