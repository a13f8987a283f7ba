//! Reads and parses the PEM files that hold CA certificates, a certificate and its private key.

use std::{
    fs::File,
    io::Read as _,
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::Path,
};

use rustls::pki_types::{
    CertificateDer, PrivateKeyDer,
    pem::{self, PemObject as _, SectionKind},
};

use super::{FileError, FileProblem, IdentityFiles, certificate::ParsedCertificate};

/// The maximum size of a PEM file, or of a deny list, in bytes.
pub(super) const MAX_SIZE: u64 = 1 << 20;

/// The mode bits that a key file should not have: any access for others, and write or execute access for the
/// group. Non-root pods need read access for the group (`fsGroup`).
const OPEN_BITS: u32 = 0o037;

/// The contents of the CA, certificate and key files.
#[derive(Clone, Eq, PartialEq)]
pub(super) struct FileContents {
    pub(super) ca: Vec<u8>,
    pub(super) cert: Vec<u8>,
    pub(super) key: Vec<u8>,
    /// The mode of the key file.
    pub(super) mode: u32,
}

impl FileContents {
    /// Reads the files one after another.
    pub(super) fn read(files: &IdentityFiles) -> Result<Self, FileError> {
        let (ca, _) = read(&files.ca)?;
        let (cert, _) = read(&files.cert)?;
        let (key, mode) = read(&files.key)?;
        Ok(Self {
            ca,
            cert,
            key,
            mode,
        })
    }

    /// Returns true if the key file contains a private key, and its mode has any of the bits in [`OPEN_BITS`].
    pub(super) fn is_key_open(&self) -> bool {
        self.mode & OPEN_BITS != 0 && contains(&self.key, b"PRIVATE KEY-----")
    }
}

/// Reads a file, and returns its contents and mode.
pub(super) fn read(path: &Path) -> Result<(Vec<u8>, u32), FileError> {
    let failed = |error| file_error(path, FileProblem::Unreadable(error));
    // Without `O_NONBLOCK`, opening a pipe would wait for a writer.
    let file = File::options()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(file_error(path, FileProblem::NotAFile));
    }
    let mut bytes = Vec::new();
    file.take(MAX_SIZE + 1)
        .read_to_end(&mut bytes)
        .map_err(failed)?;
    if bytes.len() as u64 > MAX_SIZE {
        return Err(file_error(path, FileProblem::TooLarge));
    }
    Ok((bytes, metadata.mode()))
}

/// Parses the certificates in a file. Fails if there are none.
pub(super) fn parse_certificates(
    path: &Path,
    bytes: &[u8],
) -> Result<Vec<(CertificateDer<'static>, ParsedCertificate)>, FileError> {
    let mut found = Vec::new();
    for (kind, der) in sections(bytes).map_err(|problem| file_error(path, problem))? {
        if kind == SectionKind::Certificate {
            let der = CertificateDer::from(der);
            let parsed = ParsedCertificate::read(&der)
                .map_err(|how| file_error(path, FileProblem::Damaged(how)))?;
            found.push((der, parsed));
        }
    }
    if found.is_empty() {
        return Err(file_error(path, FileProblem::NoCertificate));
    }
    Ok(found)
}

/// Parses the private key in a file, which must contain exactly one.
pub(super) fn parse_private_key(
    path: &Path,
    bytes: &[u8],
) -> Result<PrivateKeyDer<'static>, FileError> {
    let sections = sections(bytes).map_err(|problem| file_error(path, problem))?;
    let mut keys = sections
        .into_iter()
        .filter_map(|(kind, der)| PrivateKeyDer::from_pem(kind, der));
    match (keys.next(), keys.next()) {
        (Some(key), None) => Ok(key),
        (Some(_), Some(_)) => Err(file_error(path, FileProblem::MultipleKeys)),
        (None, _) if contains(bytes, b"ENCRYPTED PRIVATE KEY-----") => {
            Err(file_error(path, FileProblem::EncryptedKey))
        }
        (None, _) => Err(file_error(path, FileProblem::NoKey)),
    }
}

pub(super) fn file_error(path: &Path, problem: FileProblem) -> FileError {
    FileError {
        path: path.to_owned(),
        problem,
    }
}

/// Splits a PEM file into sections. Text is permitted before a section (RFC 7468 section 5.2), but not after
/// the last one, so that truncated and badly concatenated files are detected.
pub(super) fn sections(bytes: &[u8]) -> Result<Vec<(SectionKind, Vec<u8>)>, FileProblem> {
    const BEGIN: &[u8] = b"-----BEGIN ";
    const END: &[u8] = b"-----END ";
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return Err(FileProblem::Empty);
    }
    let damaged = |how: &str| Err(FileProblem::Damaged(how.to_owned()));
    let mut is_open = false;
    let mut is_after = false;
    for line in bytes.split(|byte| matches!(byte, b'\n' | b'\r')) {
        let is_complete = line.trim_ascii_end().ends_with(b"-----");
        let is_begin = is_complete && line.starts_with(BEGIN);
        let is_end = is_complete && line.starts_with(END);
        let marks = usize::from(is_begin || is_end);
        if count(line, BEGIN) + count(line, END) != marks {
            return damaged("a -----BEGIN or -----END marker is not a complete line of its own");
        }
        if marks == 1 {
            if is_begin == is_open {
                return damaged("a -----BEGIN line has no -----END line, or the reverse");
            }
            is_open = is_begin;
            is_after = is_end;
        } else if !is_open && !line.iter().all(u8::is_ascii_whitespace) {
            is_after = false;
        }
    }
    if is_open {
        return damaged("the last -----BEGIN line has no -----END line");
    }
    if !is_after && contains(bytes, END) {
        return damaged("there is text after the last -----END line");
    }
    <(SectionKind, Vec<u8>)>::pem_slice_iter(bytes)
        .map(|section| section.map_err(|error| FileProblem::Damaged(describe(&error))))
        .collect()
}

fn describe(error: &pem::Error) -> String {
    if matches!(error, pem::Error::MissingSectionEnd { .. }) {
        "a -----BEGIN line and its -----END line have different labels".to_owned()
    } else {
        error.to_string()
    }
}

fn contains(bytes: &[u8], part: &[u8]) -> bool {
    count(bytes, part) > 0
}

fn count(bytes: &[u8], part: &[u8]) -> usize {
    bytes
        .windows(part.len())
        .filter(|window| *window == part)
        .count()
}
