//! Creates and locks directories that hold private keys, and replaces files in them atomically.

use std::{
    ffi::OsString,
    fs::{self, DirBuilder, File},
    io::{self, Write as _},
    os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use nix::fcntl::{Flock, FlockArg};

use super::ca::CaError;

/// Creates a directory with mode 0700, unless it already exists.
pub(in crate::identity) fn create(path: &Path) -> Result<(), CaError> {
    let failed = |source| io_error("create", path, source);
    if let Some(parent) = path.parent() {
        fs::create_dir_all(parent).map_err(failed)?;
    }
    match DirBuilder::new().mode(0o700).create(path) {
        Err(_) if path.is_dir() => Ok(()),
        made => made.map_err(failed),
    }
}

/// Locks a directory against other `culvert ca` processes. Waits while another process holds the lock.
pub(in crate::identity) fn lock(path: &Path) -> Result<Flock<File>, CaError> {
    let failed = |source| io_error("lock", path, source);
    let opened = File::open(path).map_err(failed)?;
    Flock::lock(opened, FlockArg::LockExclusive).map_err(|(_, error)| failed(error.into()))
}

/// Replaces files, each given as its path, new contents and mode. First writes the contents to temporary
/// files in the same directories, then renames those in the given order.
pub(in crate::identity) fn replace_files(files: &[(PathBuf, Vec<u8>, u32)]) -> Result<(), CaError> {
    let temp_files = files
        .iter()
        .map(|(path, bytes, mode)| TempFile::write(path, bytes, *mode));
    let temp_files: Vec<_> = temp_files.collect::<Result<_, _>>()?;
    temp_files.into_iter().try_for_each(TempFile::rename)
}

/// A temporary file next to the file that it will replace. It is removed on drop unless it has been renamed.
pub(in crate::identity) struct TempFile {
    path: PathBuf,
    temp: PathBuf,
}

impl TempFile {
    pub(in crate::identity) fn write(
        path: &Path,
        bytes: &[u8],
        mode: u32,
    ) -> Result<Self, CaError> {
        let failed = |source| io_error("write", path, source);
        let mut name = OsString::from(".");
        name.push(path.file_name().unwrap_or_default());
        name.push(".new");
        let temp = path.with_file_name(name);
        // A process that was killed may have left the temporary file behind.
        match fs::remove_file(&temp) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(failed(error)),
            _ => {}
        }
        let mut file = File::options()
            .write(true)
            .create_new(true)
            .mode(mode)
            .open(&temp)
            .map_err(failed)?;
        let path = path.to_owned();
        let temp = Self { path, temp };
        file.write_all(bytes)
            .and_then(|()| file.sync_all())
            .map_err(failed)?;
        Ok(temp)
    }

    pub(in crate::identity) fn rename(self) -> Result<(), CaError> {
        let directory = self.path.parent().filter(|it| !it.as_os_str().is_empty());
        fs::rename(&self.temp, &self.path)
            .and_then(|()| File::open(directory.unwrap_or_else(|| Path::new("."))))
            .and_then(|directory| directory.sync_all())
            .map_err(|source| io_error("write", &self.path, source))
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        // This fails if the file has already been renamed, which is fine.
        drop(fs::remove_file(&self.temp));
    }
}

pub(in crate::identity) fn io_error(step: &'static str, path: &Path, source: io::Error) -> CaError {
    CaError::Io {
        step,
        path: path.to_owned(),
        source,
    }
}
