//! The folder of manifests on disk: which files count, and reading them. Everything here blocks,
//! so it runs on tokio's blocking threads.

use std::{
    collections::BTreeMap,
    ffi::{OsStr, OsString},
    fs::{self, File, Metadata, OpenOptions},
    io::{self, Read as _},
    os::unix::fs::{MetadataExt as _, OpenOptionsExt as _},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::statement::{self, Memory, Statement};
use crate::parallel;

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

    /// Whether this is one file that wasn't written between, whatever its name was. The time of
    /// change is left out: it moves when a file gets another name.
    fn is_same_text(&self, other: &Self) -> bool {
        (self.place, self.size, self.modified) == (other.place, other.size, other.modified)
    }
}

/// How often files are looked for that change their names all the time.
const CHASES: u32 = 16;
/// How often a folder is listed anew that changes while it is listed.
const LISTINGS: u32 = 8;

/// Fewer files than these are read one after the other.
const FEW: usize = 2;

/// A file to read.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) path: Arc<Path>,
    /// What is remembered of its last version.
    pub(super) memory: Option<Arc<Memory>>,
    /// What it looked like when it was read last.
    pub(super) seen: Option<Fingerprint>,
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

/// What came of reading some files.
#[derive(Debug, Default)]
pub(super) struct Batch {
    pub(super) readings: BTreeMap<Arc<Path>, Reading>,
    /// The files that have another name now.
    pub(super) moved: BTreeMap<Arc<Path>, Arc<Path>>,
}

impl Batch {
    /// Whether a file was there when the folder was listed, or before, and wasn't when it was read.
    pub(super) fn is_torn(&self) -> bool {
        self.readings
            .values()
            .any(|reading| matches!(reading, Reading::Gone))
    }

    fn is_gone(&self, path: &Path) -> bool {
        matches!(self.readings.get(path), Some(Reading::Gone))
    }

    /// Whether that name was read while it had that text.
    fn has(&self, path: &Path, text: &Fingerprint) -> bool {
        match self.readings.get(path) {
            Some(
                Reading::Said { fingerprint, .. }
                | Reading::Unreadable {
                    fingerprint: Some(fingerprint),
                    ..
                },
            ) => fingerprint.is_same_text(text),
            _ => false,
        }
    }
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
    /// A large folder is listed piece by piece, and what is renamed meanwhile may be in none.
    pub(super) fn list(&self) -> io::Result<Vec<(Arc<Path>, Option<Fingerprint>)>> {
        let mut before = fingerprint(&self.folder);
        let mut files = self.list_once()?;
        for _ in 1..LISTINGS {
            let after = fingerprint(&self.folder);
            if before == after {
                break;
            }
            before = after;
            files = self.list_once()?;
        }
        Ok(files)
    }

    fn list_once(&self) -> io::Result<Vec<(Arc<Path>, Option<Fingerprint>)>> {
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

    /// Reads files, if the folder is still the one it was. Those that were renamed are read under
    /// their new names.
    pub(super) fn read_all(&self, place: Place, jobs: &[Job]) -> Option<Batch> {
        if self.place().ok() != Some(place) {
            return None;
        }
        let mut batch = Batch::default();
        let readings = parallel::each(jobs, FEW, |_, job| self.read(job));
        let paths = jobs.iter().map(|job| Arc::clone(&job.path));
        batch.readings.extend(paths.zip(readings));
        for _ in 0..CHASES {
            if self.chase(jobs, &mut batch)? {
                return Some(batch);
            }
        }
        // They are left as they were until they keep still.
        for job in jobs.iter().filter(|job| job.seen.is_some()) {
            if let Some(reading @ Reading::Gone) = batch.readings.get_mut(&job.path) {
                *reading = Reading::Unsettled;
            }
        }
        Some(batch)
    }

    /// Looks for the files that are gone from their names, and reads them where they are; says
    /// whether each was found or is nowhere. Nothing if the folder can't be listed.
    fn chase(&self, jobs: &[Job], batch: &mut Batch) -> Option<bool> {
        batch.moved.clear();
        let gone: Vec<(&Job, Fingerprint)> = jobs
            .iter()
            .filter(|job| batch.is_gone(&job.path))
            .filter_map(|job| Some((job, job.seen?)))
            .collect();
        if gone.is_empty() {
            return Some(true);
        }
        let listing: BTreeMap<Arc<Path>, Option<Fingerprint>> =
            self.list().ok()?.into_iter().collect();
        let mut is_settled = true;
        for (job, seen) in gone {
            if listing.contains_key(&job.path) {
                // It is back, or another took its name.
                let reading = self.read(job);
                // A folder of that name is listed too, and isn't a file.
                is_settled &= job.path.is_dir();
                batch.readings.insert(Arc::clone(&job.path), reading);
                continue;
            }
            let is_it = |found: &Option<Fingerprint>| found.is_some_and(|f| f.is_same_text(&seen));
            let Some((to, _)) = listing.iter().find(|(_, found)| is_it(found)) else {
                continue;
            };
            batch.moved.insert(Arc::clone(&job.path), Arc::clone(to));
            if batch.has(to, &seen) {
                continue;
            }
            let reading = self.read(&Job {
                path: Arc::clone(to),
                memory: job.memory.as_ref().map(Arc::clone),
                seen: None,
                is_unsure: false,
            });
            if matches!(reading, Reading::Gone) {
                is_settled = false;
            } else {
                batch.readings.insert(Arc::clone(to), reading);
            }
        }
        Some(is_settled)
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
