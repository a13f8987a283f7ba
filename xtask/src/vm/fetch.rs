//! Kernels from Debian's archive, unpacked in the cache and prepared for guests.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, bail};

use super::{
    archive::{self, Archive},
    cache, initramfs,
    kernels::{Choice, Line},
};

/// The time that the newest kernel of an unpinned line is cached.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A kernel that guests can run.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// The name of its line.
    pub(crate) line: &'static str,
    /// The release, as `uname -r` prints it.
    pub(crate) release: String,
    /// The version of its Debian packages.
    pub(crate) version: String,
    /// True if it is the pinned kernel of its line.
    pub(crate) pinned: bool,
    /// The boot image.
    pub(crate) image: PathBuf,
    /// The part of the initramfs with its modules.
    pub(crate) base: PathBuf,
    /// The modules that guests would load and that this kernel lacks.
    pub(crate) absent: Vec<String>,
}

impl Kernel {
    /// Describes the kernel in one line.
    pub(crate) fn describe(&self) -> String {
        let mut text = format!("{}: Linux {} ({})", self.line, self.release, self.version);
        if self.pinned {
            text.push_str(", pinned");
        }
        if !self.absent.is_empty() {
            text.push_str(&format!(", without {}", self.absent.join(" ")));
        }
        text
    }
}

/// Finds the kernel of a line in the cache or fetches it.
pub(crate) fn ready(line: &'static Line, offline: bool) -> Result<Kernel> {
    // Two lines of one suite share its lists.
    let _lock = cache::lock(line.suite)?;
    let (choice, pinned) = choose(line, offline)?;
    if !pinned {
        println!("kernel {}: {}", line.name, line.folder(&choice));
    }
    prepare(line, choice, pinned).with_context(|| format!("kernel {}", line.name))
}

/// Selects the kernel of the line, and fetches it into the cache.
fn choose(line: &Line, offline: bool) -> Result<(Choice, bool)> {
    let Some(pinned) = &line.pinned else {
        return Ok((newest(line, offline)?, false));
    };
    let choice = pinned.choice();
    if folder(line, &choice).is_dir() {
        return Ok((choice, true));
    }
    let reason = if offline {
        "it isn't in the cache"
    } else if recorded(line).is_some_and(|found| is_fresh(found.age)) {
        "it couldn't be had less than a day ago"
    } else {
        let archive = Archive::of_suite(line.suite)?;
        archive.update().with_context(|| failure(line, &choice))?;
        if archive.offers(&line.packages(&choice)) {
            fetch(line, &archive, &choice, Some(pinned.sha256))?;
            return Ok((choice, true));
        }
        "its suite has it no more"
    };
    let fallback = newest(line, offline).with_context(|| failure(line, &choice))?;
    println!(
        "kernel {}: {} {} is pinned, but {reason}; {} takes its place",
        line.name, choice.release, choice.version, fallback.version
    );
    Ok((fallback, false))
}

/// Returns the newest kernel of the line; the archive is checked once a day.
fn newest(line: &Line, offline: bool) -> Result<Choice> {
    let known = recorded(line).filter(|found| folder(line, &found.choice).is_dir());
    match known {
        Some(found) if offline || is_fresh(found.age) => return Ok(found.choice),
        None if offline => bail!(
            "no kernel of the line {} is in the cache ({} of {}); fetch it once without --offline",
            line.name,
            line.metapackage,
            line.suite
        ),
        Some(_) | None => {}
    }
    let failure = || {
        format!(
            "cannot find the newest kernel of the line {} ({} of {}; --offline takes what is there)",
            line.name, line.metapackage, line.suite
        )
    };
    let archive = Archive::of_suite(line.suite)?;
    archive.update().with_context(failure)?;
    let shown = archive.show(&[line.metapackage.to_owned()]);
    let choice = line.newest(&shown.with_context(failure)?)?;
    if !folder(line, &choice).is_dir() {
        fetch(line, &archive, &choice, None)?;
    }
    record(line, &choice)?;
    Ok(choice)
}

fn fetch(line: &Line, archive: &Archive, choice: &Choice, sha256: Option<&str>) -> Result<()> {
    let fill = |partial: &Path| {
        archive.download(&line.packages(choice), partial)?;
        let debs = archive::packages_in(partial)?;
        for deb in &debs {
            if let Some(sha256) = sha256 {
                archive::check_hash(deb, sha256)?;
            }
        }
        archive::unpack(&debs, partial)?;
        for deb in &debs {
            fs::remove_file(deb)?;
        }
        Ok(())
    };
    cache::folder(&folder(line, choice), fill).with_context(|| failure(line, choice))
}

fn failure(line: &Line, choice: &Choice) -> String {
    let packages = line.packages(choice).join(" ");
    format!("cannot fetch {packages} of {}", line.suite)
}

fn prepare(line: &'static Line, choice: Choice, pinned: bool) -> Result<Kernel> {
    let folder = folder(line, &choice);
    let release = &choice.release;
    let modules = find(&folder, &["lib/modules", "usr/lib/modules"], release)
        .with_context(|| format!("{} has no modules of {release}", folder.display()))?;
    let boot = |name: &str| {
        let old = folder.join(format!("boot/{name}-{release}"));
        [old, modules.join(name)]
            .into_iter()
            .find(|path| path.is_file())
    };
    let image = boot("vmlinuz").with_context(|| format!("{} has no image", folder.display()))?;
    let (base, absent) = initramfs::base(&line.folder(&choice), &modules)?;
    Ok(Kernel {
        line: line.name,
        release: choice.release,
        version: choice.version,
        pinned,
        image,
        base,
        absent,
    })
}

/// Returns the first of the parents' folders with this name.
fn find(folder: &Path, parents: &[&str], name: &str) -> Option<PathBuf> {
    let mut places = parents.iter().map(|parent| folder.join(parent).join(name));
    places.find(|path| path.is_dir())
}

fn folder(line: &Line, choice: &Choice) -> PathBuf {
    cache::place("kernels").join(line.folder(choice))
}

/// The newest kernel of a line, and the age of this record.
#[derive(Debug)]
struct Found {
    choice: Choice,
    age: Option<Duration>,
}

fn recorded(line: &Line) -> Option<Found> {
    let path = record_path(line);
    let written = fs::metadata(&path).and_then(|data| data.modified()).ok()?;
    Some(Found {
        choice: read_record(&fs::read_to_string(&path).ok()?)?,
        age: SystemTime::now().duration_since(written).ok(),
    })
}

fn record(line: &Line, choice: &Choice) -> Result<()> {
    let text = format!("{} {}\n", choice.release, choice.version);
    cache::file(&record_path(line), |file| {
        Ok(std::io::Write::write_all(file, text.as_bytes())?)
    })
}

/// Returns the path of a record. The kernel that replaces a missing pinned one has its own record, which
/// does not apply to the next pinned one.
fn record_path(line: &Line) -> PathBuf {
    let pinned = line.pinned.as_ref();
    let name = pinned.map_or_else(
        || line.name.to_owned(),
        |pinned| format!("{}-for-{}", line.name, pinned.version),
    );
    cache::place("newest").join(name)
}

fn read_record(text: &str) -> Option<Choice> {
    let (release, version) = text.trim().split_once(' ')?;
    Some(Choice {
        release: release.to_owned(),
        version: version.to_owned(),
    })
}

/// Returns true for a recent record; one from the future is invalid, since the clock was changed.
fn is_fresh(age: Option<Duration>) -> bool {
    age.is_some_and(|age| age < DAY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_fresh_for_a_day_and_never_from_the_future() {
        assert!(is_fresh(Some(Duration::from_secs(86_399))));
        assert!(!is_fresh(Some(DAY)));
        assert!(!is_fresh(None));
    }

    #[test]
    fn a_record_that_was_cut_off_is_none() {
        let choice = read_record("7.3.4+deb13-cloud-amd64 7.3.4-1~bpo13+1\n").expect("a record");
        assert_eq!(choice.release, "7.3.4+deb13-cloud-amd64");
        assert_eq!(choice.version, "7.3.4-1~bpo13+1");

        assert_eq!(read_record("7.3.4+deb13-cloud-amd64"), None);
        assert_eq!(read_record(""), None);
    }
}
