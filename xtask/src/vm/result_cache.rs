//! Caches the results of successful runs under a hash of all inputs, so that an identical run is not
//! repeated.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use super::{
    Machines, Options, debian_archive, download_cache, kernel_download::Kernel, native,
    test_plan::Plan,
};
use crate::{progress, workspace};

/// Inputs other than the virtual machines: the code that checks reports, and the expected results.
const CHECKS: [&str; 4] = [
    "tests/expected-skips.txt",
    "tests/verifier.json",
    "xtask/src/vm.rs",
    "xtask/src/vm",
];

/// The hash of a run's inputs, in hexadecimal.
#[derive(Debug)]
pub(super) struct Key(String);

impl Key {
    /// Hashes the inputs of a complete run: the virtual machines' files, the plans, the kernels, QEMU, and
    /// [`CHECKS`]. Returns `None` for a partial run or an update.
    pub(super) fn of(
        options: &Options,
        machines: &Machines,
        kernels: &[Kernel],
        plans: &[&Plan],
    ) -> Result<Option<Self>> {
        if !options.filter.is_empty() || !options.kernels.is_empty() || options.update {
            return Ok(None);
        }
        let mut inputs = format!("{}\n", debian_archive::sha256(&machines.overlay)?);
        for kernel in kernels {
            writeln!(inputs, "{} {}", kernel.describe(), kernel.base.display())?;
        }
        for plan in plans {
            writeln!(inputs, "{} {} {}", plan.name, plan.cpus, plan.json())?;
        }
        writeln!(inputs, "{} {:?}", machines.qemu.version(), machines.accel)?;
        if options.whole {
            writeln!(inputs, "native {}", native::release())?;
        }
        for path in CHECKS {
            add_files(&mut inputs, &workspace::root().join(path))?;
        }
        Ok(Some(Self::hash(&inputs)))
    }

    fn hash(inputs: &str) -> Self {
        let hash = Sha256::digest(inputs);
        Self(hash.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Returns the tables from an identical successful run, below a line with the time of that run.
    pub(super) fn read_tables(&self) -> Option<String> {
        fs::read_to_string(self.path()).ok()
    }

    /// Stores the tables from a successful run.
    pub(super) fn store_tables(&self, tables: &str) -> Result<()> {
        let text = format!("run on {}\n{tables}", time_and_commit()?);
        download_cache::write_file(&self.path(), |file| {
            Ok(std::io::Write::write_all(file, text.as_bytes())?)
        })
    }

    fn path(&self) -> PathBuf {
        download_cache::path("results").join(&self.0)
    }
}

/// Appends the path and the content of a file, or of all files in a directory, sorted by path.
fn add_files(inputs: &mut String, path: &Path) -> Result<()> {
    if path.is_dir() {
        let entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path()));
        let mut paths: Vec<PathBuf> = entries.collect::<Result<_>>()?;
        paths.sort();
        return paths.iter().try_for_each(|path| add_files(inputs, path));
    }
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    writeln!(inputs, "{} {text}", path.display())?;
    Ok(())
}

/// Returns the time, and also the checked-out commit if this is a Git checkout.
pub(super) fn time_and_commit() -> Result<String> {
    let output_of = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.current_dir(workspace::root()).args(arguments);
        progress::output(&mut command)
    };
    let time = output_of("date", &["--utc", "+%Y-%m-%d %H:%M UTC"])?;
    let describe = ["describe", "--always", "--exclude=*", "--dirty"];
    let Ok(commit) = output_of("git", &describe) else {
        return Ok(time.trim().to_owned());
    };
    let commit = commit.trim().replace("-dirty", " with changes");
    Ok(format!("{}, commit {commit}", time.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tables_are_cached_only_for_equal_inputs() {
        let key = Key::hash(&format!("a test's own, {}", std::process::id()));
        assert_eq!(key.read_tables(), None);

        key.store_tables("kernel passed\n").expect("written");

        let tables = key.read_tables().expect("stored");
        assert!(tables.starts_with("run on 2") && tables.ends_with("\nkernel passed\n"));
        assert_eq!(Key::hash("another").read_tables(), None);
        fs::remove_file(key.path()).expect("removed");
    }

    #[test]
    fn every_file_in_a_directory_is_an_input() {
        let directory = tempfile::tempdir().expect("a directory");
        let inputs = || {
            let mut inputs = String::new();
            add_files(&mut inputs, directory.path()).expect("read");
            inputs
        };
        fs::write(directory.path().join("b"), "1").expect("written");
        fs::create_dir(directory.path().join("a")).expect("created");
        let before = inputs();

        fs::write(directory.path().join("a/c"), "2").expect("written");

        assert!(before.ends_with("b 1\n"));
        assert_eq!(inputs().lines().count(), 2);
    }
}
