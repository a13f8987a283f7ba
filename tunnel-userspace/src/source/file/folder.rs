//! The folder of manifests on disk: which files count, and reading them. Everything here blocks,
//! so it runs on tokio's blocking threads.

use std::{
    ffi::{OsStr, OsString},
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::statement::{self, Memory, Statement};

/// Where manifests are: a folder, or one file in it.
#[derive(Clone, Debug)]
pub(super) struct Target {
    pub(super) folder: PathBuf,
    /// The file, if it is about one only.
    only: Option<OsString>,
    /// The size up to which a file is read.
    limit: u64,
}

/// What tells whether a file is still the one that was read.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Fingerprint {
    pub(super) place: Place,
    size: u64,
    modified: (i64, i64),
    changed: (i64, i64),
}

/// What tells a folder from another one that took its path.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) struct Place {
    device: u64,
    inode: u64,
}

impl Place {
    fn of(metadata: &Metadata) -> Self {
        Self {
            device: metadata.dev(),
            inode: metadata.ino(),
        }
    }
}

impl Fingerprint {
    fn of(metadata: &Metadata) -> Self {
        Self {
            place: Place::of(metadata),
            size: metadata.size(),
            modified: (metadata.mtime(), metadata.mtime_nsec()),
            changed: (metadata.ctime(), metadata.ctime_nsec()),
        }
    }
}

/// A file to read.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) path: Arc<Path>,
    /// What is remembered of its last version.
    pub(super) memory: Option<Arc<Memory>>,
    /// It came up or was touched just now, and its writer may not be done.
    pub(super) is_unsure: bool,
}

/// What came of reading a file.
#[derive(Debug)]
pub(super) enum Reading {
    /// There is no such file.
    Gone,
    /// It is being written: look again later.
    Unsettled,
    /// It is there, but can't be read; without a fingerprint it is worth another try.
    Unreadable {
        fingerprint: Option<Fingerprint>,
        reason: String,
    },
    /// What it says.
    Said {
        fingerprint: Fingerprint,
        /// It has another name, so a change of it may go unnoticed.
        is_link: bool,
        statements: Vec<Statement>,
        memory: Memory,
    },
}

impl Target {
    /// Takes a folder, or a file, that is there now.
    pub(super) fn new(path: &Path, limit: u64) -> io::Result<Self> {
        let is_folder = fs::metadata(path)?.is_dir();
        let only = path.file_name().filter(|_| !is_folder);
        let folder = if only.is_some() {
            path.parent().unwrap_or(path)
        } else {
            path
        };
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
                let bytes = name.as_encoded_bytes();
                let has_ending = ["yaml", "yml", "json"]
                    .iter()
                    .any(|ending| Path::new(name).extension() == Some(OsStr::new(ending)));
                has_ending && !bytes.starts_with(b".")
            }
        }
    }

    /// The folder that has the path now.
    pub(super) fn place(&self) -> io::Result<Place> {
        fs::metadata(&self.folder).map(|metadata| Place::of(&metadata))
    }

    /// The files that count, each with its fingerprint; without one where it can't be told.
    pub(super) fn list(&self) -> io::Result<Vec<(Arc<Path>, Option<Fingerprint>)>> {
        let mut files = Vec::new();
        for entry in fs::read_dir(&self.folder)? {
            let name = entry?.file_name();
            if !self.counts(&name) {
                continue;
            }
            let path = self.folder.join(name);
            let fingerprint = fingerprint(&path);
            if fingerprint.is_some() || fs::symlink_metadata(&path).is_ok() {
                files.push((Arc::<Path>::from(path), fingerprint));
            }
        }
        files.sort_by(|(a, _), (b, _)| a.cmp(b));
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
        Some(
            jobs.into_iter()
                .map(|job| (Arc::clone(&job.path), self.read(&job)))
                .collect(),
        )
    }

    fn read(&self, job: &Job) -> Reading {
        let link = match fs::symlink_metadata(&job.path) {
            Ok(metadata) => metadata,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Reading::Gone,
            Err(error) => return unreadable(&error),
        };
        let is_link = link.is_symlink() || link.nlink() > 1;
        // A name that is given to a file that exists already comes with all of its text; a file
        // that is made under its name is read when its writer closes it.
        if job.is_unsure && link.is_file() && link.nlink() == 1 {
            return Reading::Unsettled;
        }
        let (metadata, file) = match open(&job.path) {
            Ok(opened) => opened,
            Err(error) => return unreadable(&error),
        };
        if metadata.is_dir() {
            return Reading::Gone;
        }
        let fingerprint = Fingerprint::of(&metadata);
        if let Some(reason) = self.refusal(&metadata) {
            return Reading::Unreadable {
                fingerprint: Some(fingerprint),
                reason,
            };
        }
        let bytes = match self.bytes(&file, fingerprint) {
            Ok(Some(bytes)) => bytes,
            Ok(None) => return Reading::Unsettled,
            Err(error) => return unreadable(&error),
        };
        let Ok(text) = std::str::from_utf8(&bytes) else {
            let reason = "can't be read: it is not UTF-8 text".to_owned();
            return Reading::Unreadable {
                fingerprint: Some(fingerprint),
                reason,
            };
        };
        let (statements, memory) = if job.path.extension() == Some(OsStr::new("json")) {
            (statement::of_json(text), Memory::default())
        } else {
            statement::of_yaml(text, job.memory.as_deref())
        };
        Reading::Said {
            fingerprint,
            is_link,
            statements,
            memory,
        }
    }

    /// Why a file isn't worth opening.
    fn refusal(&self, metadata: &Metadata) -> Option<String> {
        if !metadata.is_file() {
            return Some("can't be read: it is not a regular file".to_owned());
        }
        let limit = self.limit;
        (metadata.len() > limit).then(|| format!("can't be read: it is larger than {limit} bytes"))
    }

    /// The bytes of a file, or nothing if they changed while they were read.
    fn bytes(&self, file: &File, fingerprint: Fingerprint) -> io::Result<Option<Vec<u8>>> {
        let mut bytes = Vec::with_capacity(usize::try_from(fingerprint.size).unwrap_or_default());
        file.take(self.limit).read_to_end(&mut bytes)?;
        let now = Fingerprint::of(&file.metadata()?);
        // The time of change is left out: it moves when another file takes the name, too.
        let is_still = now.size == fingerprint.size && now.modified == fingerprint.modified;
        Ok(is_still.then_some(bytes))
    }
}

/// Opens a file, and tells what was opened: another file may take its name at any moment.
fn open(path: &Path) -> io::Result<(Metadata, File)> {
    let found = fs::metadata(path)?;
    if found.is_file() {
        // Not to hang on a pipe that took the file's place meanwhile.
        let file = OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK)
            .open(path)?;
        return Ok((file.metadata()?, file));
    }
    // What is refused anyway isn't opened.
    Ok((found, File::open("/dev/null")?))
}

/// The fingerprint of a file, through symbolic links.
pub(super) fn fingerprint(path: &Path) -> Option<Fingerprint> {
    fs::metadata(path)
        .ok()
        .map(|metadata| Fingerprint::of(&metadata))
}

/// A file that couldn't be reached this time.
fn unreadable(error: &io::Error) -> Reading {
    Reading::Unreadable {
        fingerprint: None,
        reason: format!("can't be read: {error}"),
    }
}
