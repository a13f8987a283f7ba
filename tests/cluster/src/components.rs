//! The paths of a cluster's programs and images, which `cargo xtask e2e` prepares.

use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result, ensure};

/// The directories that hold programs in the tree of unpacked Debian packages.
const PROGRAM_DIRECTORIES: [&str; 4] = ["usr/sbin", "usr/bin", "sbin", "bin"];
/// The directories that hold libraries in the tree of unpacked Debian packages.
const LIBRARY_DIRECTORIES: [&str; 2] = ["usr/lib/x86_64-linux-gnu", "lib/x86_64-linux-gnu"];

/// The directory that contains Kubernetes' programs, a tree of unpacked Debian packages, and image archives.
#[derive(Clone, Debug)]
pub struct Components {
    directory: PathBuf,
    /// The value of `PATH` for the cluster's programs.
    search_path: String,
}

impl Components {
    /// Opens the directory, and checks that it has the expected subdirectories.
    pub fn open(directory: &Path) -> Result<Self> {
        let directory = directory
            .canonicalize()
            .with_context(|| format!("cannot open {}", directory.display()))?;
        for name in ["bin", "debian", "images"] {
            let path = directory.join(name);
            ensure!(
                path.is_dir(),
                "{} is missing; run `cargo xtask e2e`",
                path.display()
            );
        }
        let unpacked = PROGRAM_DIRECTORIES.map(|name| directory.join("debian").join(name));
        let installed = ["/usr/sbin", "/usr/bin", "/sbin", "/bin"].map(PathBuf::from);
        let search_path = std::env::join_paths(unpacked.into_iter().chain(installed))?;
        let search_path = search_path
            .into_string()
            .ok()
            .with_context(|| format!("the path {} is not UTF-8", directory.display()))?;
        Ok(Self {
            directory,
            search_path,
        })
    }

    /// Returns the path of a Kubernetes program.
    #[must_use]
    pub fn program(&self, name: &str) -> String {
        self.path("bin").join(name).display().to_string()
    }

    /// Returns the directory that contains the CNI plugins.
    #[must_use]
    pub fn network_plugins(&self) -> PathBuf {
        self.path("debian/usr/lib/cni")
    }

    /// Returns the paths of the image archives.
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

    /// Returns the directory for logs.
    #[must_use]
    pub fn logs(&self) -> PathBuf {
        self.path("logs")
    }

    /// Wraps a command so that it prefers programs and libraries from the unpacked Debian packages.
    #[must_use]
    pub fn command(&self, argv: &[&str]) -> Vec<String> {
        let debian = self.path("debian");
        let libraries = LIBRARY_DIRECTORIES.map(|name| debian.join(name).display().to_string());
        let [first, _] = &libraries;
        let mut command = vec![
            "env".to_owned(),
            format!("PATH={}", self.search_path),
            format!("XTABLES_LIBDIR={first}/xtables"),
            format!("LD_LIBRARY_PATH={}", libraries.join(":")),
        ];
        command.extend(argv.iter().map(|&argument| argument.to_owned()));
        command
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }
}
