//! Lists the manifest directory and reads the files in it. All functions block, so they must run on tokio's
//! blocking thread pool.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs::{self, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{
    FileSettings, documents,
    parse::{self, ParseCache, ParsedItem},
};
use crate::{
    parallel,
    source::fingerprint::{FileId, Fingerprint, fingerprint},
};

/// The path to the manifests: a directory, or a single file in a directory.
#[derive(Clone, Debug)]
pub(super) struct ManifestPath {
    pub(super) directory: PathBuf,
    /// The name of the file, if the source is a single file.
    file_name: Option<OsString>,
    /// The maximum size of a file, in bytes.
    max_file_bytes: u64,
    /// The maximum number of documents in a file.
    max_documents: usize,
}

/// The manifest files in a directory and their fingerprints; `None` for a file that can't be reached.
pub(super) type Listing = BTreeMap<Arc<Path>, Option<Fingerprint>>;

/// The maximum number of times to list a directory that keeps changing while it is being listed.
const MAX_LISTINGS: u32 = 8;

/// If there are at least this many files, they are read in parallel.
const MIN_PARALLEL: usize = 2;

/// A file that must be read.
#[derive(Debug)]
pub(super) struct ReadJob {
    pub(super) path: Arc<Path>,
    /// The parsed documents from the previous version of the file.
    pub(super) cache: Arc<ParseCache>,
    pub(super) cause: ReadCause,
}

/// The reason for reading a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum ReadCause {
    /// The file is complete. If it no longer exists, an event for its removal or rename will follow.
    Complete,
    /// The file was created or touched, and may not be complete yet.
    Touched,
    /// The file was missing or removed, or was polled until it stopped changing. If it does not exist, it
    /// counts as deleted.
    Removed,
}

/// The files to read at once: those that exceed a limit are not read.
#[derive(Clone, Copy, Debug)]
pub(super) struct ReadLimits {
    /// The maximum size of a file, in bytes.
    pub(super) file_bytes: u64,
    /// The maximum size of all files together, in bytes.
    pub(super) sum_bytes: u64,
}

impl ReadLimits {
    pub(super) const NONE: Self = Self {
        file_bytes: u64::MAX,
        sum_bytes: u64::MAX,
    };

    /// Returns the maximum size that each of the files may have, given their current sizes. The smallest files are read
    /// first, so that a flood of large ones doesn't delay them.
    fn of_files(self, sizes: &[u64]) -> Vec<u64> {
        let mut order: Vec<_> = sizes.iter().copied().enumerate().collect();
        order.sort_by_key(|(_, size)| *size);
        let mut limits = vec![0; sizes.len()];
        let mut left = self.sum_bytes;
        for (number, size) in order {
            let Some(rest) = left.checked_sub(size) else {
                break;
            };
            left = rest;
            if let Some(limit) = limits.get_mut(number) {
                *limit = self.file_bytes;
            }
        }
        limits
    }
}

/// The result of reading a file.
#[derive(Debug)]
pub(super) enum ReadResult {
    /// The file does not exist.
    Gone,
    /// The file exceeds the caller's limits, so it was not read.
    Large(ReadCause),
    /// The file may be incomplete because it is still being written, so it must be polled.
    Unsettled,
    /// The file exists but can't be read. If `fingerprint` is `None`, the read is retried.
    Unreadable {
        fingerprint: Option<Fingerprint>,
        reason: String,
    },
    /// The file was read and parsed.
    Parsed {
        fingerprint: Fingerprint,
        /// True if the file is a symbolic link or has several hard links, so that it may change without an
        /// event.
        is_link: bool,
        parsed: Vec<ParsedItem>,
        cache: ParseCache,
    },
}

impl ManifestPath {
    /// Creates a manifest path from the path to an existing directory or file.
    pub(super) fn new(path: &Path, settings: &FileSettings) -> io::Result<Self> {
        let is_directory = fs::metadata(path)?.is_dir();
        let only = path.file_name().filter(|_| !is_directory);
        let directory = path.parent().filter(|_| only.is_some()).unwrap_or(path);
        let directory = if directory.as_os_str().is_empty() {
            Path::new(".")
        } else {
            directory
        };
        Ok(Self {
            directory: directory.to_owned(),
            file_name: only.map(OsStr::to_owned),
            max_file_bytes: settings.max_file_bytes,
            max_documents: usize::try_from(settings.max_documents).unwrap_or(usize::MAX),
        })
    }

    /// Returns true if a file with this name is a manifest.
    pub(super) fn is_manifest(&self, name: &OsStr) -> bool {
        match &self.file_name {
            Some(only) => name == only,
            None => {
                let extension = Path::new(name).extension().and_then(OsStr::to_str);
                let is_hidden = name.as_encoded_bytes().starts_with(b".");
                matches!(extension, Some("yaml" | "yml" | "json")) && !is_hidden
            }
        }
    }

    /// Returns the identity of the directory that is now at the path.
    pub(super) fn directory_id(&self) -> io::Result<FileId> {
        fs::metadata(&self.directory).map(|metadata| FileId::of(&metadata))
    }

    /// Lists the manifests. Listing a large directory takes several system calls, and a file that is renamed
    /// between them may be missed, so the directory is listed again until it no longer changes during the
    /// listing.
    pub(super) fn list(&self) -> io::Result<Listing> {
        let mut files = Listing::new();
        for _ in 0..MAX_LISTINGS {
            let before = fingerprint(&self.directory);
            files = self.list_once()?;
            if fingerprint(&self.directory) == before {
                break;
            }
        }
        Ok(files)
    }

    fn list_once(&self) -> io::Result<Listing> {
        let mut files = Listing::new();
        for entry in fs::read_dir(&self.directory)? {
            let name = entry?.file_name();
            if !self.is_manifest(&name) {
                continue;
            }
            let path = self.directory.join(name);
            let fingerprint = fingerprint(&path);
            if fingerprint.is_some() || fs::symlink_metadata(&path).is_ok() {
                files.insert(Arc::from(path), fingerprint);
            }
        }
        Ok(files)
    }

    /// Reads the files, except those that exceed the limits. Returns `None` if a different directory is now at the
    /// path.
    pub(super) fn read_all(
        &self,
        directory_id: FileId,
        jobs: Vec<ReadJob>,
        limits: ReadLimits,
    ) -> Option<Vec<(Arc<Path>, ReadResult)>> {
        if self.directory_id().ok() != Some(directory_id) {
            return None;
        }
        let size = |job: &ReadJob| fs::metadata(&job.path).map_or(0, |found| found.len());
        let sizes: Vec<_> = jobs.iter().map(size).collect();
        let limits = limits.of_files(&sizes);
        let results = parallel::map(&jobs, MIN_PARALLEL, |number, job| {
            self.read(job, limits.get(number).copied().unwrap_or_default())
        });
        let paths = jobs.into_iter().map(|job| job.path);
        Some(paths.zip(results).collect())
    }

    fn read(&self, job: &ReadJob, most: u64) -> ReadResult {
        self.try_read(job, most).unwrap_or_else(|error| {
            // A dangling symbolic link counts as an existing file.
            let exists = fs::symlink_metadata(&job.path).is_ok();
            if exists || error.kind() != io::ErrorKind::NotFound {
                return ReadResult::Unreadable {
                    fingerprint: None,
                    reason: format!("can't be read: {error}"),
                };
            }
            match job.cause {
                ReadCause::Removed => ReadResult::Gone,
                ReadCause::Complete | ReadCause::Touched => ReadResult::Unsettled,
            }
        })
    }

    fn try_read(&self, job: &ReadJob, most: u64) -> io::Result<ReadResult> {
        let link = fs::symlink_metadata(&job.path)?;
        let is_link = link.is_symlink() || link.nlink() > 1;
        // A new file is not read until its writer closes it, but a new hard link to an existing file is
        // complete.
        if job.cause == ReadCause::Touched && link.is_file() && !is_link {
            return Ok(ReadResult::Unsettled);
        }
        // Unsuitable files, such as pipes, must be detected before they are opened.
        let found = fs::metadata(&job.path)?;
        if found.is_dir() {
            return Ok(ReadResult::Gone);
        }
        let unreadable = |metadata: &Metadata, reason| ReadResult::Unreadable {
            fingerprint: Some(Fingerprint::of(metadata)),
            reason: format!("can't be read: {reason}"),
        };
        if !found.is_file() {
            return Ok(unreadable(&found, "it is not a regular file".to_owned()));
        }
        if found.len() > self.max_file_bytes {
            let limit = self.max_file_bytes;
            let reason = format!("it is larger than {limit} bytes (source.file.maxFileBytes)");
            return Ok(unreadable(&found, reason));
        }
        if found.len() > most {
            return Ok(ReadResult::Large(job.cause));
        }
        let file = OpenOptions::new()
            .read(true)
            // Keeps open() from blocking if a pipe has replaced the file since the check.
            .custom_flags(libc::O_NONBLOCK)
            .open(&job.path)?;
        let opened = file.metadata()?;
        if !opened.is_file() || opened.len() > self.max_file_bytes {
            // The file has been replaced by another one since the check.
            return Ok(ReadResult::Unsettled);
        }
        let mut bytes = Vec::with_capacity(usize::try_from(opened.len()).unwrap_or_default());
        (&file).take(self.max_file_bytes).read_to_end(&mut bytes)?;
        let fingerprint = Fingerprint::of(&opened);
        let now = Fingerprint::of(&file.metadata()?);
        if !now.has_same_content(&fingerprint) {
            return Ok(ReadResult::Unsettled);
        }
        let Ok(text) = std::str::from_utf8(&bytes) else {
            return Ok(unreadable(&opened, "it is not UTF-8 text".to_owned()));
        };
        let is_json = job.path.extension() == Some(OsStr::new("json"));
        let has_too_many = |count: usize| {
            let limit = self.max_documents;
            (count > limit).then(|| {
                let reason =
                    format!("it has more than {limit} documents (source.file.maxDocuments)");
                unreadable(&opened, reason)
            })
        };
        if !is_json && let Some(refused) = has_too_many(documents::split(text).len()) {
            return Ok(refused);
        }
        let (parsed, cache) = if is_json {
            let parsed = parse::parse_json(text);
            let last = parsed.last().map_or(0, |item| item.document);
            if let Some(refused) = has_too_many(last) {
                return Ok(refused);
            }
            (parsed, ParseCache::default())
        } else {
            parse::parse_yaml(text, &job.cache)
        };
        Ok(ReadResult::Parsed {
            fingerprint,
            is_link,
            parsed,
            cache,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_smallest_files_are_read_until_their_sum_exceeds_the_limit() {
        let limits = ReadLimits {
            file_bytes: 10,
            sum_bytes: 25,
        };
        assert_eq!(limits.of_files(&[9, 8, 1, 7, 30]), [10, 10, 10, 10, 0]);
        assert_eq!(limits.of_files(&[9, 9, 8, 1]), [10, 0, 10, 10]);
        assert_eq!(ReadLimits::NONE.of_files(&[1 << 40; 2]), [u64::MAX; 2]);
    }

    #[test]
    fn files_beyond_the_sum_are_not_read() {
        let directory = tempfile::tempdir().expect("a directory");
        let target =
            ManifestPath::new(directory.path(), &FileSettings::default()).expect("a directory");
        let jobs = |target: &ManifestPath| -> Vec<_> {
            let job = |path: Arc<Path>| ReadJob {
                path,
                cache: Arc::default(),
                cause: ReadCause::Complete,
            };
            let files = target.list().expect("listed");
            files.into_keys().map(job).collect()
        };
        for (name, size) in [("a", 60), ("b", 70), ("c", 50), ("d", 130), ("e", 0)] {
            let path = directory.path().join(format!("{name}.yaml"));
            fs::write(path, "#".repeat(size)).expect("written");
        }
        let limits = ReadLimits {
            file_bytes: 100,
            sum_bytes: 150,
        };
        let directory_id = target.directory_id().expect("a directory");

        let results = target.read_all(directory_id, jobs(&target), limits);

        let results = results.expect("read");
        let is_large = |(_, result): &(_, ReadResult)| matches!(result, ReadResult::Large(_));
        let large: Vec<_> = results.iter().map(is_large).collect();
        assert_eq!(large, [false, true, false, true, false]);
        assert!(
            results
                .iter()
                .all(|it| is_large(it) || matches!(it.1, ReadResult::Parsed { .. }))
        );
    }
}
