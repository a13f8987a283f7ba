//! The parts of a cluster, as prepared by `cargo xtask e2e`.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

/// The folders of programs in an unpacked tree of Debian packages.
const PROGRAMS: [&str; 4] = ["usr/sbin", "usr/bin", "sbin", "bin"];
/// The folders of libraries.
const LIBRARIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// A folder with programs, a tree of Debian packages, and archives of images.
#[derive(Clone, Debug)]
pub struct Kit {
    folder: PathBuf,
    search: String,
}

impl Kit {
    /// Opens the kit in a folder.
    pub fn open(folder: &Path) -> Result<Self> {
        let folder = folder
            .canonicalize()
            .with_context(|| format!("there is no folder {}", folder.display()))?;
        for part in ["bin", "debian", "images"] {
            let part = folder.join(part);
            ensure!(part.is_dir(), "there is no {}", part.display());
        }
        let own = PROGRAMS.map(|part| folder.join("debian").join(part));
        let usual = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
        let search = std::env::join_paths(own.into_iter().chain(usual))?;
        let search = search.into_string().ok().context("a path is no UTF-8")?;
        Ok(Self { folder, search })
    }

    /// Returns the path of a Kubernetes program.
    #[must_use]
    pub fn program(&self, name: &str) -> String {
        self.path("bin").join(name).display().to_string()
    }

    /// Returns the folder of network plugins.
    #[must_use]
    pub fn network_plugins(&self) -> PathBuf {
        self.path("debian/usr/lib/cni")
    }

    /// Returns the archives of images.
    pub fn images(&self) -> Result<Vec<PathBuf>> {
        let mut images = Vec::new();
        for entry in std::fs::read_dir(self.path("images"))? {
            let path = entry?.path();
            if path.extension().is_some_and(|kind| kind == "tar") {
                images.push(path);
            }
        }
        images.sort();
        Ok(images)
    }

    /// Returns the folder of logs.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.path("logs")
    }

    /// Builds a command that searches Debian's programs and libraries first.
    #[must_use]
    pub fn command(&self, words: &[&str]) -> Vec<String> {
        let libraries = LIBRARIES.map(|part| self.path("debian").join(part).display().to_string());
        let [first, _] = &libraries;
        let mut command = vec![
            "env".to_owned(),
            format!("PATH={}", self.search),
            format!("XTABLES_LIBDIR={first}/xtables"),
            format!("LD_LIBRARY_PATH={}", libraries.join(":")),
        ];
        command.extend(words.iter().map(|&word| word.to_owned()));
        command
    }

    fn path(&self, part: &str) -> PathBuf {
        self.folder.join(part)
    }
}
