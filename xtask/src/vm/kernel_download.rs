//! Downloads kernels from Debian's archive into the cache, and prepares them for use in virtual machines.

use std::{
    fs,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use anyhow::{Context as _, Result, bail};

use super::{
    debian_archive::{self, DebianArchive},
    download_cache, initramfs,
    kernels::{KernelVersion, Series},
};

/// Time after which the archive is searched again for a series' newest kernel.
const DAY: Duration = Duration::from_secs(24 * 60 * 60);

/// A kernel that virtual machines can boot.
#[derive(Debug)]
pub(crate) struct Kernel {
    /// Name of the kernel's series.
    pub(crate) series: &'static str,
    /// Release, as `uname -r` prints it.
    pub(crate) release: String,
    /// Version of the kernel's Debian packages.
    pub(crate) version: String,
    /// True if this is the kernel that is pinned for its series.
    pub(crate) is_pinned: bool,
    /// Path of the boot image.
    pub(crate) image: PathBuf,
    /// Path of the initramfs part that contains the kernel's modules.
    pub(crate) base: PathBuf,
    /// Wanted modules that this kernel lacks.
    pub(crate) absent_modules: Vec<String>,
}

impl Kernel {
    /// Describes the kernel in one line.
    pub(crate) fn describe(&self) -> String {
        let mut text = format!("{}: Linux {} ({})", self.series, self.release, self.version);
        if self.is_pinned {
            text.push_str(", pinned");
        }
        if !self.absent_modules.is_empty() {
            text.push_str(&format!(", without {}", self.absent_modules.join(" ")));
        }
        text
    }
}

/// Returns a series' kernel, downloading it if it is not in the cache.
pub(crate) fn find_or_download(series: &'static Series, offline: bool) -> Result<Kernel> {
    // Several series in one suite share its package lists.
    let _lock = download_cache::lock(series.suite)?;
    let (version, is_pinned) = choose(series, offline)?;
    if !is_pinned {
        println!("kernel {}: {}", series.name, series.directory(&version));
    }
    prepare(series, version, is_pinned).with_context(|| format!("kernel {}", series.name))
}

/// Chooses a series' kernel, and downloads it into the cache. Returns its version, and true if it is the
/// pinned one.
fn choose(series: &Series, offline: bool) -> Result<(KernelVersion, bool)> {
    let Some(pinned) = &series.pinned else {
        return Ok((newest(series, offline)?, false));
    };
    let version = pinned.version();
    if directory(series, &version).is_dir() {
        return Ok((version, true));
    }
    let reason = if offline {
        "is not in the cache"
    } else if read_newest(series).is_some_and(|newest| is_fresh(newest.age)) {
        "could not be downloaded less than a day ago"
    } else {
        let archive = DebianArchive::of_suite(series.suite)?;
        let failure = || download_failure(series, &version);
        archive.update().with_context(failure)?;
        if archive.offers(&series.packages(&version)) {
            download(series, &archive, &version, Some(pinned.sha256))?;
            return Ok((version, true));
        }
        "is no longer in its suite"
    };
    let fallback = newest(series, offline).with_context(|| download_failure(series, &version))?;
    println!(
        "kernel {}: the pinned {} {} {reason}; using {} instead",
        series.name, version.release, version.package, fallback.package
    );
    Ok((fallback, false))
}

/// Downloads a series' newest kernel unless it is cached, and returns its version. The archive is searched
/// once a day.
fn newest(series: &Series, offline: bool) -> Result<KernelVersion> {
    let recorded = read_newest(series);
    match recorded.filter(|newest| directory(series, &newest.version).is_dir()) {
        Some(newest) if offline || is_fresh(newest.age) => return Ok(newest.version),
        None if offline => bail!(
            "no kernel of the series {} is in the cache ({} of {}); download it once without \
             --offline",
            series.name,
            series.metapackage,
            series.suite
        ),
        Some(_) | None => {}
    }
    let failure = || {
        format!(
            "cannot find the newest kernel of the series {} ({} of {}); --offline uses the cached \
             one",
            series.name, series.metapackage, series.suite
        )
    };
    let archive = DebianArchive::of_suite(series.suite)?;
    archive.update().with_context(failure)?;
    let shown = archive.show(&[series.metapackage.to_owned()]);
    let version = series.newest(&shown.with_context(failure)?)?;
    if !directory(series, &version).is_dir() {
        download(series, &archive, &version, None)?;
    }
    record_newest(series, &version)?;
    Ok(version)
}

/// Downloads and unpacks a kernel's packages, and checks their hash if the kernel is pinned.
fn download(
    series: &Series,
    archive: &DebianArchive,
    version: &KernelVersion,
    sha256: Option<&str>,
) -> Result<()> {
    let fill = |partial: &Path| {
        archive.download(&series.packages(version), partial)?;
        let debs = debian_archive::list_debs(partial)?;
        for deb in &debs {
            if let Some(sha256) = sha256 {
                debian_archive::check_hash(deb, sha256)?;
            }
        }
        debian_archive::unpack(&debs, partial)?;
        for deb in &debs {
            fs::remove_file(deb)?;
        }
        Ok(())
    };
    download_cache::create_directory(&directory(series, version), fill)
        .with_context(|| download_failure(series, version))
}

fn download_failure(series: &Series, version: &KernelVersion) -> String {
    let packages = series.packages(version).join(" ");
    format!("cannot download {packages} from {}", series.suite)
}

/// Finds the boot image in an unpacked kernel, and writes the base of its initramfs.
fn prepare(series: &'static Series, version: KernelVersion, is_pinned: bool) -> Result<Kernel> {
    let directory = directory(series, &version);
    let release = &version.release;
    let modules = find_directory(&directory, &["lib/modules", "usr/lib/modules"], release)
        .with_context(|| format!("{} has no modules of {release}", directory.display()))?;
    let boot = |name: &str| {
        let old = directory.join(format!("boot/{name}-{release}"));
        [old, modules.join(name)]
            .into_iter()
            .find(|path| path.is_file())
    };
    let image =
        boot("vmlinuz").with_context(|| format!("{} has no boot image", directory.display()))?;
    let (base, absent_modules) = initramfs::base(&series.directory(&version), &modules)?;
    Ok(Kernel {
        series: series.name,
        release: version.release,
        version: version.package,
        is_pinned,
        image,
        base,
        absent_modules,
    })
}

/// Returns the first directory `parent/name` that exists.
fn find_directory(directory: &Path, parents: &[&str], name: &str) -> Option<PathBuf> {
    let mut paths = parents
        .iter()
        .map(|parent| directory.join(parent).join(name));
    paths.find(|path| path.is_dir())
}

/// Returns the directory into which a kernel is unpacked.
fn directory(series: &Series, version: &KernelVersion) -> PathBuf {
    download_cache::path("kernels").join(series.directory(version))
}

/// The kernel that is recorded as the newest one in its series.
#[derive(Debug)]
struct Newest {
    version: KernelVersion,
    /// Time since it was recorded; `None` if the clock has been set back.
    age: Option<Duration>,
}

fn read_newest(series: &Series) -> Option<Newest> {
    let path = record_path(series);
    let written = fs::metadata(&path).and_then(|data| data.modified()).ok()?;
    Some(Newest {
        version: parse_record(&fs::read_to_string(&path).ok()?)?,
        age: SystemTime::now().duration_since(written).ok(),
    })
}

fn record_newest(series: &Series, version: &KernelVersion) -> Result<()> {
    let text = format!("{} {}\n", version.release, version.package);
    download_cache::write_file(&record_path(series), |file| {
        Ok(std::io::Write::write_all(file, text.as_bytes())?)
    })
}

/// Returns the path of a series' record. A kernel that replaces a pinned one is recorded for that pinned
/// version, so that the record no longer applies once another version is pinned.
fn record_path(series: &Series) -> PathBuf {
    let pinned = series.pinned.as_ref();
    let name = pinned.map_or_else(
        || series.name.to_owned(),
        |pinned| format!("{}-for-{}", series.name, pinned.package),
    );
    download_cache::path("newest").join(name)
}

fn parse_record(text: &str) -> Option<KernelVersion> {
    let (release, package) = text.trim().split_once(' ')?;
    Some(KernelVersion {
        release: release.to_owned(),
        package: package.to_owned(),
    })
}

/// Returns true if a record is less than a day old.
fn is_fresh(age: Option<Duration>) -> bool {
    age.is_some_and(|age| age < DAY)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_record_is_fresh_for_a_day_unless_it_is_from_the_future() {
        assert!(is_fresh(Some(Duration::from_secs(86_399))));
        assert!(!is_fresh(Some(DAY)));
        assert!(!is_fresh(None));
    }

    #[test]
    fn an_incomplete_record_is_ignored() {
        let version = parse_record("7.3.4+deb13-cloud-amd64 7.3.4-1~bpo13+1\n").expect("a record");
        assert_eq!(version.release, "7.3.4+deb13-cloud-amd64");
        assert_eq!(version.package, "7.3.4-1~bpo13+1");

        assert_eq!(parse_record("7.3.4+deb13-cloud-amd64"), None);
        assert_eq!(parse_record(""), None);
    }
}
