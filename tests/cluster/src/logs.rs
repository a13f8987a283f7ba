//! A cluster's logs, in a directory that is kept after the cluster is removed.

use std::{
    fs::{self, File},
    io::{self, Read as _, Seek as _, SeekFrom},
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};

/// The number of bytes to read from the end of a log.
const TAIL_BYTES: u64 = 16 << 10;

/// The directory that contains a cluster's logs.
#[derive(Clone, Debug)]
pub struct Logs {
    directory: PathBuf,
}

impl Logs {
    /// Creates the directory, and removes the logs of any earlier cluster.
    pub fn new(directory: PathBuf) -> Result<Self> {
        match fs::remove_dir_all(&directory) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => {
                return Err(error)
                    .with_context(|| format!("cannot remove {}", directory.display()));
            }
            Ok(()) | Err(_) => {}
        }
        fs::create_dir_all(&directory)
            .with_context(|| format!("cannot create {}", directory.display()))?;
        Ok(Self { directory })
    }

    /// Returns the path of the directory.
    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Returns the path of a file in the directory.
    #[must_use]
    pub fn path(&self, name: &str) -> PathBuf {
        self.directory.join(name)
    }

    /// Creates a program's log file.
    pub fn create(&self, name: &str) -> Result<File> {
        let path = self.path(&format!("{name}.log"));
        File::create(&path).with_context(|| format!("cannot create {}", path.display()))
    }

    /// Returns the last lines of each log, each preceded by the log's path.
    pub fn tails(&self, lines: usize) -> Result<String> {
        let mut paths = Vec::new();
        find_logs(&self.directory, &mut paths)?;
        paths.sort();
        let mut text = String::new();
        for path in paths {
            text.push_str(&format!("── {}\n", path.display()));
            for line in last_lines(&read_tail(&path)?, lines) {
                text.push_str(&format!("  {line}\n"));
            }
        }
        Ok(text)
    }
}

/// Returns true if a log is printed after a failure. Only the logs of programs and of Culvert's pods are;
/// those of other pods are too many.
fn is_printed(path: &Path) -> bool {
    let text = path.to_string_lossy();
    text.ends_with(".log") && (!text.contains("/pods-") || text.contains("/kube-system_culvert"))
}

/// Finds the logs in and below a directory that are printed after a failure.
fn find_logs(directory: &Path, found: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(directory)? {
        let path = entry?.path();
        if path.is_dir() {
            find_logs(&path, found)?;
        } else if is_printed(&path) {
            found.push(path);
        }
    }
    Ok(())
}

fn read_tail(path: &Path) -> Result<String> {
    let mut file = File::open(path)?;
    let length = file.metadata()?.len();
    file.seek(SeekFrom::Start(length.saturating_sub(TAIL_BYTES)))?;
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes)?;
    // A log with several writers may have holes, which are read as zeros.
    bytes.retain(|byte| *byte != 0);
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}

fn last_lines(text: &str, count: usize) -> Vec<&str> {
    let lines: Vec<&str> = text.lines().collect();
    lines[lines.len().saturating_sub(count)..].to_vec()
}

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use super::*;

    #[test]
    fn the_last_lines_of_each_log_are_below_its_path() {
        let scratch = tempfile::tempdir().unwrap();
        let logs = Logs::new(scratch.path().join("logs")).unwrap();
        let mut file = logs.create("etcd").unwrap();
        file.write_all(b"one\ntwo\n\0three\n").unwrap();
        for pod in ["kube-system_culvert-node-x", "default_web"] {
            let directory = logs.path("pods-a").join(pod);
            fs::create_dir_all(&directory).unwrap();
            fs::write(directory.join("0.log"), pod).unwrap();
        }

        let text = logs.tails(2).unwrap();

        assert!(text.contains("etcd.log\n  two\n  three\n"), "{text}");
        assert!(
            text.contains("0.log\n  kube-system_culvert-node-x\n"),
            "{text}"
        );
        assert!(!text.contains("default_web"), "{text}");
    }
}
