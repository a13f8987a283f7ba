//! Writes the initramfs for virtual machines. It consists of several parts: a cached base with a kernel's
//! modules, and overlays with programs and files.

use std::{
    fs::{self, File},
    hash::{DefaultHasher, Hash as _, Hasher as _},
    io::{self, BufWriter},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

use super::{
    cpio::Cpio,
    download_cache,
    modules::{self, Modules},
};

/// Version of the base's format. It is increased when the format changes, so that bases cached in the old
/// format are not used.
const FORMAT: u32 = 1;

/// Path in the guest of the list of modules to load, with one path per line.
const MODULES: &str = "/etc/modules.list";

/// Directories that every guest has.
const DIRECTORIES: [&str; 9] = [
    "/proc",
    "/sys",
    "/dev",
    "/tmp",
    "/run",
    "/etc",
    "/root",
    "/lib/modules",
    "/var/lib",
];

/// Files to add to a guest's initramfs.
#[derive(Debug, Default)]
pub(crate) struct Overlay {
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    /// Path in the guest.
    guest: String,
    content: Content,
}

#[derive(Debug)]
enum Content {
    Host { path: PathBuf, mode: u32 },
    Bytes { bytes: Vec<u8>, mode: u32 },
    Link { target: String },
}

impl Overlay {
    /// Adds a file on this machine, which is read when the overlay is written.
    pub(crate) fn add_file(&mut self, host: &Path, guest: &str, mode: u32) {
        let path = host.to_owned();
        self.add(guest, Content::Host { path, mode });
    }

    pub(crate) fn add_bytes(&mut self, bytes: impl Into<Vec<u8>>, guest: &str, mode: u32) {
        let bytes = bytes.into();
        self.add(guest, Content::Bytes { bytes, mode });
    }

    pub(crate) fn add_symlink(&mut self, target: &str, guest: &str) {
        let target = target.to_owned();
        self.add(guest, Content::Link { target });
    }

    /// Writes the overlay as one part of an initramfs.
    pub(crate) fn write(&self, path: &Path) -> Result<()> {
        download_cache::write_file(path, |file| {
            let mut cpio = Cpio::new(BufWriter::new(file));
            for entry in &self.entries {
                entry
                    .write(&mut cpio)
                    .with_context(|| format!("cannot add {} to a guest", entry.guest))?;
            }
            cpio.finish()?;
            Ok(())
        })
    }

    fn add(&mut self, guest: &str, content: Content) {
        let guest = guest.to_owned();
        self.entries.push(Entry { guest, content });
    }
}

impl Entry {
    fn write(&self, cpio: &mut Cpio<impl io::Write>) -> Result<()> {
        match &self.content {
            Content::Host { path, mode } => {
                let data =
                    fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
                cpio.file(&self.guest, *mode, &data)?;
            }
            Content::Bytes { bytes, mode } => cpio.file(&self.guest, *mode, bytes)?,
            Content::Link { target } => cpio.link(&self.guest, target)?,
        }
        Ok(())
    }
}

/// Concatenates parts into an initramfs. A file in a later part replaces the same file in an earlier one.
pub(crate) fn concatenate(parts: &[&Path], path: &Path) -> Result<()> {
    download_cache::write_file(path, |file| {
        for part in parts {
            let mut copy = || io::copy(&mut File::open(part)?, file);
            copy().with_context(|| format!("cannot copy {}", part.display()))?;
        }
        Ok(())
    })
}

/// Returns the path of a kernel's base, which is cached, and the wanted modules that the kernel lacks.
pub(super) fn base(kernel: &str, modules: &Path) -> Result<(PathBuf, Vec<String>)> {
    // The kernel's name includes the version of its modules.
    let mut hasher = DefaultHasher::new();
    (FORMAT, DIRECTORIES, modules::WANTED).hash(&mut hasher);
    let path = download_cache::path("base").join(format!("{kernel}-{:016x}.cpio", hasher.finish()));
    let modules = Modules::read(modules)?;
    if !path.is_file() {
        download_cache::write_file(&path, |file| write_base(file, &modules))?;
    }
    Ok((path, modules.absent(modules::WANTED)))
}

fn write_base(file: &mut File, modules: &Modules) -> Result<()> {
    let mut cpio = Cpio::new(BufWriter::new(file));
    for directory in DIRECTORIES {
        cpio.directory(directory)?;
    }
    // The kernel opens this device for the first process, before anything is mounted.
    cpio.device("/dev/console", 0o600, (5, 1))?;
    let mut list = String::new();
    for module in modules.load_order(modules::WANTED)? {
        let path = format!("/lib/modules/{}.ko", module.name);
        cpio.file(&path, 0o644, &module.data)?;
        list.push_str(&path);
        list.push('\n');
    }
    cpio.file(MODULES, 0o644, list.as_bytes())?;
    cpio.finish()?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_initramfs_is_the_concatenation_of_complete_archives() {
        let scratch = tempfile::tempdir().expect("a directory");
        let [first, second, host, all] = ["new/first", "new/second", "new/host", "new/all"]
            .map(|name| scratch.path().join(name));
        let mut overlay = Overlay::default();
        overlay.add_bytes("plan", "/etc/plan", 0o644);
        overlay.add_symlink("/init", "/bin/sh");
        overlay.write(&first).expect("written");
        fs::write(&host, "program").expect("written");
        let mut overlay = Overlay::default();
        overlay.add_file(&host, "/init", 0o755);
        overlay.write(&second).expect("written");

        concatenate(&[&first, &second], &all).expect("written");

        let all = fs::read_to_string(all).expect("text");
        assert_eq!(all.matches("TRAILER!!!").count(), 2);
        assert_eq!(all.len() % 512, 0);
        let texts = "etc/plan\0 \0plan0707 bin/sh\0 \0/init\0 00000000init\0 000081ed program";
        for text in texts.split(' ') {
            assert!(all.contains(text), "{text}");
        }
    }

    #[test]
    fn a_file_that_cannot_be_read_is_named_and_no_overlay_is_written() {
        let path = std::env::temp_dir().join(format!("culvert-{}-none", std::process::id()));
        let mut overlay = Overlay::default();
        overlay.add_file(Path::new("/no/such/program"), "/init", 0o755);

        let error = overlay.write(&path).expect_err("no program");

        let text = format!("{error:#}");
        for name in ["/init", "/no/such/program"] {
            assert!(text.contains(name), "{text}");
        }
        assert!(!path.exists());
    }
}
