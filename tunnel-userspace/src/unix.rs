//! Unix sockets that the daemon listens on.

use std::{fs, io, os::unix::fs::PermissionsExt as _, path::Path};

use tokio::net::UnixListener;

/// Binds a socket that only its owner may use, in the place of one that an earlier process left.
///
/// # Errors
///
/// The folder is not there, or the socket can't be made.
pub(crate) fn listen(path: &Path) -> io::Result<UnixListener> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
        Ok(()) | Err(_) => {}
    }
    let listener = UnixListener::bind(path)?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    Ok(listener)
}
