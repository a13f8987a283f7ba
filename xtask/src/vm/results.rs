//! Results of successful runs, each under a hash of all its inputs: a run with the same inputs is not
//! repeated.

use std::{
    fmt::Write as _,
    fs,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result};
use sha2::{Digest as _, Sha256};

use super::{Machines, Options, archive, cache, fetch::Kernel, native, suite::Plan};
use crate::workspace;

/// The inputs besides the machines: the code that judges reports, and the expected results.
const JUDGES: [&str; 4] = [
    "tests/expected-skips.txt",
    "tests/verifier.json",
    "xtask/src/vm.rs",
    "xtask/src/vm",
];

/// The hash of a run's inputs.
#[derive(Debug)]
pub(super) struct Key(String);

impl Key {
    /// Hashes the inputs of a complete run: its programs and the overlay of its machines, its plans,
    /// kernels, emulator and judges. Returns `None` for a partial run or an update.
    pub(super) fn of(
        options: &Options,
        machines: &Machines,
        kernels: &[Kernel],
        plans: &[&Plan],
    ) -> Result<Option<Self>> {
        if !options.filter.is_empty() || !options.kernels.is_empty() || options.update {
            return Ok(None);
        }
        let mut parts = format!("{}\n", archive::sha256(&machines.overlay)?);
        for kernel in kernels {
            writeln!(parts, "{} {}", kernel.describe(), kernel.base.display())?;
        }
        for plan in plans {
            writeln!(parts, "{} {} {}", plan.name, plan.cpus, plan.json())?;
        }
        writeln!(parts, "{} {:?}", machines.qemu.version(), machines.accel)?;
        if options.whole {
            writeln!(parts, "native {}", native::release())?;
        }
        for judge in JUDGES {
            add(&mut parts, &workspace::root().join(judge))?;
        }
        Ok(Some(Self::hashed(&parts)))
    }

    fn hashed(parts: &str) -> Self {
        let hash = Sha256::digest(parts);
        Self(hash.iter().map(|byte| format!("{byte:02x}")).collect())
    }

    /// Returns the tables of an identical successful run, with its time.
    pub(super) fn known(&self) -> Option<String> {
        fs::read_to_string(self.place()).ok()
    }

    /// Stores the tables of a successful run.
    pub(super) fn keep(&self, tables: &str) -> Result<()> {
        let text = format!("run on {}\n{tables}", moment()?);
        cache::file(&self.place(), |file| {
            Ok(std::io::Write::write_all(file, text.as_bytes())?)
        })
    }

    fn place(&self) -> PathBuf {
        cache::place("results").join(&self.0)
    }
}

/// Adds a file, or the files of a folder in the order of their names.
fn add(parts: &mut String, path: &Path) -> Result<()> {
    if path.is_dir() {
        let entries = fs::read_dir(path)?.map(|entry| Ok(entry?.path()));
        let mut paths: Vec<PathBuf> = entries.collect::<Result<_>>()?;
        paths.sort();
        return paths.iter().try_for_each(|path| add(parts, path));
    }
    let text =
        fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    writeln!(parts, "{} {text}", path.display())?;
    Ok(())
}

/// Returns the time, and the checked-out commit if Git knows one.
pub(super) fn moment() -> Result<String> {
    let said = |program: &str, arguments: &[&str]| {
        let mut command = Command::new(program);
        command.current_dir(workspace::root()).args(arguments);
        archive::output(&mut command)
    };
    let time = said("date", &["--utc", "+%Y-%m-%d %H:%M UTC"])?;
    let Ok(commit) = said("git", &["describe", "--always", "--exclude=*", "--dirty"]) else {
        return Ok(time.trim().to_owned());
    };
    let commit = commit.trim().replace("-dirty", " with changes");
    Ok(format!("{}, commit {commit}", time.trim()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_is_known_for_what_it_was_of_and_nothing_else() {
        let key = Key::hashed(&format!("a test's own, {}", std::process::id()));
        assert_eq!(key.known(), None);

        key.keep("kernel passed\n").expect("written");

        let known = key.known().expect("kept");
        assert!(known.starts_with("run on 2") && known.ends_with("\nkernel passed\n"));
        assert_eq!(Key::hashed("another").known(), None);
        fs::remove_file(key.place()).expect("removed");
    }

    #[test]
    fn every_file_of_a_folder_counts() {
        let folder = tempfile::tempdir().expect("a folder");
        let parts = || {
            let mut parts = String::new();
            add(&mut parts, folder.path()).expect("read");
            parts
        };
        fs::write(folder.path().join("b"), "1").expect("written");
        fs::create_dir(folder.path().join("a")).expect("made");
        let before = parts();

        fs::write(folder.path().join("a/c"), "2").expect("written");

        assert!(before.ends_with("b 1\n"));
        assert_eq!(parts().lines().count(), 2);
    }
}
