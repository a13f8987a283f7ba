//! Packs an image's layer: a reproducible, uncompressed tar archive of a root directory. It keeps modes and
//! symbolic links. Owners and times are set to 0, and a hard link becomes a regular file.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, Write},
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};
use sha2::{Digest as _, Sha256};
use tar::{Builder, EntryType, Header};

/// A writer that hashes and counts the bytes that it passes on.
#[derive(Debug)]
struct HashingWriter<W> {
    out: W,
    hash: Sha256,
    length: u64,
}

impl<W: Write> Write for HashingWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.out.write(bytes)?;
        self.hash.update(&bytes[..written]);
        self.length += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.out.flush()
    }
}

/// A packed layer in an unnamed temporary file.
#[derive(Debug)]
pub(super) struct Layer {
    pub(super) file: File,
    /// SHA-256, in hexadecimal.
    pub(super) digest: String,
    /// Length in bytes.
    pub(super) length: u64,
}

impl Layer {
    /// Packs everything in the directory `root`, sorted by name, into a temporary file in `scratch`.
    pub(super) fn pack(root: &Path, scratch: &Path) -> Result<Self> {
        let file = tempfile::tempfile_in(scratch)
            .with_context(|| format!("cannot create a file in {}", scratch.display()))?;
        let out = HashingWriter {
            out: io::BufWriter::new(file),
            hash: Sha256::new(),
            length: 0,
        };
        let mut tar = Builder::new(out);
        add_directory(&mut tar, root, Path::new(""))?;
        let out = tar.into_inner()?;
        let mut file = out.out.into_inner()?;
        file.rewind()?;
        Ok(Self {
            file,
            digest: hex(out.hash),
            length: out.length,
        })
    }
}

/// Returns the SHA-256 of the given bytes, in hexadecimal.
pub(super) fn digest(bytes: &[u8]) -> String {
    hex(Sha256::new_with_prefix(bytes))
}

fn hex(hash: Sha256) -> String {
    let bytes = hash.finalize();
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Returns the tar header for an entry, with owner and time set to 0.
pub(super) fn header(mode: u32, size: u64) -> Header {
    let mut header = Header::new_gnu();
    header.set_mode(mode);
    header.set_size(size);
    header.set_mtime(0);
    header.set_uid(0);
    header.set_gid(0);
    header
}

fn add_directory<W: Write>(tar: &mut Builder<W>, root: &Path, directory: &Path) -> Result<()> {
    let from = root.join(directory);
    let read = || format!("cannot read {}", from.display());
    let entries = fs::read_dir(&from).with_context(read)?;
    let mut names = entries
        .map(|entry| Ok(directory.join(entry?.file_name())))
        .collect::<io::Result<Vec<PathBuf>>>()
        .with_context(read)?;
    names.sort();
    for name in names {
        let from = root.join(&name);
        add(tar, root, &name).with_context(|| format!("cannot pack {}", from.display()))?;
    }
    Ok(())
}

fn add<W: Write>(tar: &mut Builder<W>, root: &Path, name: &Path) -> Result<()> {
    let from = root.join(name);
    let metadata = fs::symlink_metadata(&from)?;
    let kind = metadata.file_type();
    let mut header = header(metadata.mode() & 0o7777, 0);
    if kind.is_dir() {
        header.set_entry_type(EntryType::Directory);
        tar.append_data(&mut header, name, io::empty())?;
        add_directory(tar, root, name)
    } else if kind.is_symlink() {
        header.set_entry_type(EntryType::Symlink);
        Ok(tar.append_link(&mut header, name, fs::read_link(&from)?)?)
    } else if kind.is_file() {
        header.set_entry_type(EntryType::Regular);
        header.set_size(metadata.len());
        // If the file has grown, the entry must still have the length that is in the header.
        let content = File::open(&from)?.take(metadata.len());
        Ok(tar.append_data(&mut header, name, content)?)
    } else {
        bail!("it is not a file, directory or symbolic link")
    }
}
