//! The folder of manifests on disk: which files count, and reading them. Everything here blocks,
//! so it runs on tokio's blocking threads.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs::{self, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::parse::{self, Cache, Parsed};
use crate::{
    parallel,
    source::fingerprint::{Fingerprint, Place, fingerprint},
};

/// Where manifests are: a folder, or one file in it.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) folder: PathBuf,
    /// The file, if it is about one only.
    only: Option<OsString>,
    /// The size up to which a file is read.
    limit: u64,
}

/// The files of a folder that count, each with its fingerprint; without one where it can't be told.
pub(super) type Listing = BTreeMap<Arc<Path>, Option<Fingerprint>>;

/// How often a folder is listed anew that changes while it is listed.
const LISTINGS: u32 = 8;

/// Fewer files than these are read one after the other.
const FEW: usize = 2;

/// A file to read.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) path: Arc<Path>,
    /// The documents of its last version.
    pub(super) cache: Arc<Cache>,
    pub(super) noticed: Noticed,
}

/// What was noticed of a file.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Noticed {
    /// It is complete. If nothing has that name, this has yet to be noticed, and where it went.
    Complete,
    /// It came up or was touched just now, and its writer may not be done.
    Touched,
    /// Nothing had that name.
    Gone,
}

/// What came of reading a file.
#[derive(Debug)]
pub(super) enum Reading {
    /// It is known that there is no such file.
    Gone,
    /// It is being written: poll it.
    Unsettled,
    /// It is there, but can't be read; without a fingerprint it is worth another try.
    Unreadable {
        fingerprint: Option<Fingerprint>,
        reason: String,
    },
    /// What it says.
    Parsed {
        fingerprint: Fingerprint,
        /// It has another name, so a change of it may go unnoticed.
        is_link: bool,
        parsed: Vec<Parsed>,
        cache: Cache,
    },
}

impl Target {
    /// Takes a folder, or a file, that is there now.
    pub(super) fn new(path: &Path, limit: u64) -> io::Result<Self> {
        let is_folder = fs::metadata(path)?.is_dir();
        let only = path.file_name().filter(|_| !is_folder);
        let folder = path.parent().filter(|_| only.is_some()).unwrap_or(path);
        let folder = if folder.as_os_str().is_empty() {
            Path::new(".")
        } else {
            folder
        };
        Ok(Self {
            folder: folder.to_owned(),
            only: only.map(OsStr::to_owned),
            limit,
        })
    }

    /// Whether a file of that name counts.
    pub(super) fn counts(&self, name: &OsStr) -> bool {
        match &self.only {
            Some(only) => name == only,
            None => {
                let ending = Path::new(name).extension().and_then(OsStr::to_str);
                let is_hidden = name.as_encoded_bytes().starts_with(b".");
                matches!(ending, Some("yaml" | "yml" | "json")) && !is_hidden
            }
        }
    }

    /// The folder that has the path now.
    pub(super) fn place(&self) -> io::Result<Place> {
        fs::metadata(&self.folder).map(|metadata| Place::of(&metadata))
    }

    /// Lists the folder. A large one is listed piece by piece, and what is renamed meanwhile may be in
    /// none.
    pub(super) fn list(&self) -> io::Result<Listing> {
        let mut files = Listing::new();
        for _ in 0..LISTINGS {
            let before = fingerprint(&self.folder);
            files = self.list_once()?;
            if fingerprint(&self.folder) == before {
                break;
            }
        }
        Ok(files)
    }

    fn list_once(&self) -> io::Result<Listing> {
        let mut files = Listing::new();
        for entry in fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            if !self.counts(&name) {
                continue;
            }
            let path = self.folder.join(name);
            let fingerprint = fingerprint(&path);
            if fingerprint.is_some() || fs::symlink_metadata(&path).is_ok() {
                files.insert(Arc::from(path), fingerprint);
            }
        }
        Ok(files)
    }

    /// Reads files, if the folder is still the one it was.
    pub(super) fn read_all(
        &self,
        place: Place,
        jobs: Vec<Job>,
    ) -> Option<Vec<(Arc<Path>, Reading)>> {
        if self.place().ok() != Some(place) {
            return None;
        }
        let readings = parallel::each(&jobs, FEW, |_, job| self.read(job));
        let paths = jobs.into_iter().map(|job| job.path);
        Some(paths.zip(readings).collect())
    }

    fn read(&self, job: &Job) -> Reading {
        self.try_read(job).unwrap_or_else(|error| {
            // A link that leads nowhere is there.
            let is_there = fs::symlink_metadata(&job.path).is_ok();
            if is_there || error.kind() != io::ErrorKind::NotFound {
                return Reading::Unreadable {
                    fingerprint: None,
                    reason: format!("can't be read: {error}"),
                };
            }
            match job.noticed {
                Noticed::Gone => Reading::Gone,
                Noticed::Complete | Noticed::Touched => Reading::Unsettled,
            }
        })
    }

    fn try_read(&self, job: &Job) -> io::Result<Reading> {
        let link = fs::symlink_metadata(&job.path)?;
        let is_link = link.is_symlink() || link.nlink() > 1;
        // A name that is given to a file that exists already comes with all of its text; a file
        // that is made under its name is read when its writer closes it.
        if job.noticed == Noticed::Touched && link.is_file() && !is_link {
            return Ok(Reading::Unsettled);
        }
        // What is refused isn't opened.
        let found = fs::metadata(&job.path)?;
        if found.is_dir() {
            return Ok(Reading::Gone);
        }
        let refused = |metadata: &Metadata, reason| Reading::Unreadable {
            fingerprint: Some(Fingerprint::of(metadata)),
            reason: format!("can't be read: {reason}"),
        };
        if !found.is_file() {
            return Ok(refused(&found, "it is not a regular file".to_owned()));
        }
        if found.len() > self.limit {
            let reason = format!("it is larger than {} bytes", self.limit);
            return Ok(refused(&found, reason));
        }
        let file = OpenOptions::new()
            .read(true)
            // Not to hang on a pipe that took the file's place meanwhile.
            .custom_flags(libc::O_NONBLOCK)
            .open(&job.path)?;
        let opened = file.metadata()?;
        if !opened.is_file() || opened.len() > self.limit {
            // Another file took the name.
            return Ok(Reading::Unsettled);
        }
        let mut bytes = Vec::with_capacity(usize::try_from(opened.len()).unwrap_or_default());
        (&file).take(self.limit).read_to_end(&mut bytes)?;
        let fingerprint = Fingerprint::of(&opened);
        let now = Fingerprint::of(&file.metadata()?);
        if !now.is_same_text(&fingerprint) {
            return Ok(Reading::Unsettled);
        }
        let Ok(text) = std::str::from_utf8(&bytes) else {
            return Ok(refused(&opened, "it is not UTF-8 text".to_owned()));
        };
        let (parsed, cache) = if job.path.extension() == Some(OsStr::new("json")) {
            (parse::json(text), Cache::default())
        } else {
            parse::yaml(text, &job.cache)
        };
        Ok(Reading::Parsed {
            fingerprint,
            is_link,
            parsed,
            cache,
        })
    }
}
