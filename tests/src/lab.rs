//! A laboratory's folder and cgroup. Their names hold the process that made them, so that the next
//! start can sweep what a killed one left behind.

use std::{
    env, fs,
    path::{Path, PathBuf},
    process,
    sync::atomic::{AtomicU32, Ordering},
};

use anyhow::{Context as _, Result};
use nix::{errno::Errno, sys::signal::kill, unistd::Pid};

use crate::cgroup;

const PREFIX: &str = "culvert-lab-";

/// A folder for files and a cgroup for processes; both go when it is dropped.
#[derive(Debug)]
pub struct Lab {
    folder: PathBuf,
    cgroup: PathBuf,
}

impl Lab {
    /// A new one, after sweeping what dead processes left.
    ///
    /// # Errors
    ///
    /// Without the rights of root, or without a cgroup v2 hierarchy.
    pub fn new() -> Result<Self> {
        static MADE: AtomicU32 = AtomicU32::new(0);
        sweep()?;
        let made = MADE.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{made}", process::id());
        let cgroup = cgroup::mount_point()?.join(&name);
        cgroup::create(&cgroup)?;
        let lab = Self {
            folder: env::temp_dir().join(&name),
            cgroup,
        };
        fs::create_dir_all(&lab.folder)
            .with_context(|| format!("cannot make {}", lab.folder.display()))?;
        Ok(lab)
    }

    /// The folder for files.
    #[must_use]
    pub fn folder(&self) -> &Path {
        &self.folder
    }

    /// The cgroup that all of the laboratory's places are under.
    #[must_use]
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        // What is left is swept at the next start.
        drop(remove(&self.folder, &self.cgroup));
    }
}

/// Removes what laboratories of processes that are gone left behind.
///
/// # Errors
///
/// When something of theirs can't be removed.
pub fn sweep() -> Result<()> {
    remove_those_of(|owner| matches!(kill(owner, None), Err(Errno::ESRCH)))
}

/// Ends and removes all laboratories of this process: for the way out after a signal.
///
/// # Errors
///
/// When something of theirs can't be removed.
pub fn remove_own() -> Result<()> {
    remove_those_of(|owner| owner == Pid::this())
}

fn remove_those_of(condemned: impl Fn(Pid) -> bool) -> Result<()> {
    let chosen = |name: &str| owner(name).is_some_and(&condemned);
    for cgroup in cgroup::named(&cgroup::mount_point()?, chosen) {
        cgroup::remove(&cgroup)?;
    }
    for folder in cgroup::named(&env::temp_dir(), chosen) {
        fs::remove_dir_all(&folder)
            .with_context(|| format!("cannot remove {}", folder.display()))?;
    }
    Ok(())
}

fn remove(folder: &Path, cgroup: &Path) -> Result<()> {
    cgroup::remove(cgroup)?;
    fs::remove_dir_all(folder)?;
    Ok(())
}

/// The process that a name belongs to.
fn owner(name: &str) -> Option<Pid> {
    let (pid, _number) = name.strip_prefix(PREFIX)?.split_once('-')?;
    pid.parse().ok().filter(|pid| *pid > 0).map(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_that_hold_a_process_are_ours() {
        assert_eq!(owner("culvert-lab-123-0"), Some(Pid::from_raw(123)));
        assert_eq!(owner("culvert-lab-0-0"), None);
        assert_eq!(owner("culvert-lab-x-0"), None);
        assert_eq!(owner("culvert-123-0"), None);
    }
}
