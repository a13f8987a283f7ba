//! A lab's directory and cgroup, whose names contain the owner's process ID. After the owner has exited, a
//! sweeper process removes them. Each new lab also removes any that dead owners have left behind.

use std::{
    env, fs,
    io::{self, Read as _, Write as _},
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{self, ChildStdin, Command, Stdio},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use anyhow::{Context as _, Result};
use nix::{
    fcntl::{Flock, FlockArg},
    unistd::Pid,
};

use crate::{cgroup, environment, interrupt, log, wait};

const PREFIX: &str = "culvert-lab-";

/// The name of the file that lists the directories that a lab uses outside its own.
const EXTERNAL_DIRECTORIES: &str = "elsewhere";

/// The time limit for the owner to exit after its files have been closed.
const TIME_LIMIT: Duration = Duration::from_secs(10);

/// A directory for files and a cgroup for processes. Both are removed on drop.
#[derive(Debug)]
pub struct Lab {
    directory: PathBuf,
    cgroup: PathBuf,
}

impl Lab {
    /// Creates a lab, and removes those that dead processes have left behind.
    pub fn new() -> Result<Self> {
        static COUNT: AtomicU32 = AtomicU32::new(0);
        sweep()?;
        start_sweeper()?;
        let made = COUNT.fetch_add(1, Ordering::Relaxed);
        let name = format!("{PREFIX}{}-{made}", process::id());
        let cgroup = cgroup::mount_point()?.join(&name);
        cgroup::create(&cgroup)?;
        let lab = Self {
            directory: env::temp_dir().join(&name),
            cgroup,
        };
        fs::create_dir_all(&lab.directory)
            .with_context(|| format!("cannot make {}", lab.directory.display()))?;
        Ok(lab)
    }

    #[must_use]
    pub fn directory(&self) -> &Path {
        &self.directory
    }

    /// Creates a directory outside the lab's own, for use as a mount point, unless it already exists. It is
    /// removed with the last lab that uses it: removing it earlier would detach other labs' mounts.
    pub fn create_external_directory(&self, path: &Path) -> Result<()> {
        let others = external_directories_of_others(&self.directory);
        let ancestors: Vec<_> = path.ancestors().collect();
        let mut list = log::append(&self.directory.join(EXTERNAL_DIRECTORIES))?;
        for directory in ancestors.into_iter().rev() {
            let is_missing = !directory.exists();
            if is_missing || others.iter().any(|other| other == directory) {
                // List the directory before creating it, so that a sweeper finds it even if this process is
                // killed in between.
                writeln!(list, "{}", directory.display())?;
            }
            if is_missing {
                fs::create_dir_all(directory)
                    .with_context(|| format!("cannot make {}", directory.display()))?;
            }
        }
        Ok(())
    }

    /// Returns the lab's name, which is also the name of the lab's cgroup in each hierarchy.
    #[must_use]
    pub fn name(&self) -> &str {
        let name = self.directory.file_name().and_then(|name| name.to_str());
        name.unwrap_or(PREFIX)
    }

    /// Returns the cgroup whose descendants are the cgroups of the lab's sandboxes.
    #[must_use]
    pub fn cgroup(&self) -> &Path {
        &self.cgroup
    }
}

impl Drop for Lab {
    fn drop(&mut self) {
        interrupt::block_if_ending();
        // If removal fails, the next lab removes the rest.
        drop(remove(self));
    }
}

/// Removes the labs of processes that have exited.
pub fn sweep() -> Result<()> {
    remove_labs_of(|owner| !is_alive(owner))
}

/// Starts a sweeper process, unless this process has already started one. The sweeper removes labs once this
/// process has exited or has been killed.
fn start_sweeper() -> Result<()> {
    /// The write end of the sweeper's standard input. The kernel closes it when this process exits.
    static SWEEPER: Mutex<Option<ChildStdin>> = Mutex::new(None);
    let mut sweeper = SWEEPER.lock().unwrap_or_else(PoisonError::into_inner);
    if sweeper.is_none() {
        let program = environment::culvert_lab()?;
        // The sweeper gets its own process group, since an interrupt from the terminal must not end it.
        let mut process = Command::new(&program)
            .args(["sweep-after", &process::id().to_string()])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .process_group(0)
            .spawn()
            .with_context(|| format!("cannot start {}", program.display()))?;
        *sweeper = process.stdin.take();
    }
    Ok(())
}

/// Waits until the owner has closed its end of the standard input pipe and has exited, then sweeps.
pub fn sweep_after(owner: Pid) -> Result<()> {
    io::stdin()
        .read_to_end(&mut Vec::new())
        .context("cannot read standard input")?;
    wait::until(TIME_LIMIT, || !is_alive(owner))
        .with_context(|| format!("process {owner} closed its files, but doesn't end"))?;
    sweep()
}

/// Removes all of this process's labs. Called before a signal ends the process.
pub fn remove_own_labs() -> Result<()> {
    remove_labs_of(|owner| owner == Pid::this())
}

/// Returns true if the process exists and is not a zombie.
#[must_use]
pub fn is_alive(pid: Pid) -> bool {
    let Ok(stat) = fs::read_to_string(format!("/proc/{pid}/stat")) else {
        return false;
    };
    // The state follows the name, which is in parentheses but may itself contain spaces and parentheses.
    stat.rsplit_once(") ")
        .is_some_and(|(_, rest)| !rest.starts_with(['Z', 'X']))
}

fn remove_labs_of(is_removable: impl Fn(Pid) -> bool) -> Result<()> {
    let is_chosen = |name: &str| owner(name).is_some_and(&is_removable);
    // Take a lock, since concurrent removals of the same directories would interfere with each other.
    let directory = fs::File::open(env::temp_dir())?;
    let _lock = Flock::lock(directory, FlockArg::LockExclusive)
        .map_err(|(_, error)| error)
        .context("cannot lock the directory of laboratories")?;
    for hierarchy in hierarchies()? {
        for cgroup in cgroup::subdirectories(&hierarchy, is_chosen) {
            cgroup::remove(&cgroup)?;
        }
    }
    for directory in cgroup::subdirectories(&env::temp_dir(), is_chosen) {
        remove_directory(&directory)?;
    }
    Ok(())
}

/// Returns the mount points of all cgroup hierarchies, v2 first, since every process is in a v2 cgroup.
fn hierarchies() -> Result<Vec<PathBuf>> {
    let mut all = vec![cgroup::mount_point()?];
    all.extend(cgroup::v1_mount_points()?);
    Ok(all)
}

fn remove(lab: &Lab) -> Result<()> {
    for hierarchy in hierarchies()? {
        cgroup::remove(&hierarchy.join(lab.name()))?;
    }
    remove_directory(&lab.directory)
}

fn remove_directory(directory: &Path) -> Result<()> {
    let others = external_directories_of_others(directory);
    for path in external_directories(directory).iter().rev() {
        if !others.contains(path) {
            // This fails if the directory contains other files or has already been removed, both of which are
            // fine.
            drop(fs::remove_dir(path));
        }
    }
    fs::remove_dir_all(directory).with_context(|| format!("cannot remove {}", directory.display()))
}

/// Returns the external directories of the lab in `directory`: those that it uses and that it or another lab
/// has created.
fn external_directories(directory: &Path) -> Vec<PathBuf> {
    let list = fs::read_to_string(directory.join(EXTERNAL_DIRECTORIES)).unwrap_or_default();
    list.lines().map(PathBuf::from).collect()
}

/// Returns the external directories of all labs except the one in `directory`.
fn external_directories_of_others(directory: &Path) -> Vec<PathBuf> {
    let all = directory
        .parent()
        .map(|parent| cgroup::subdirectories(parent, |name| owner(name).is_some()));
    let others = all.into_iter().flatten().filter(|other| other != directory);
    others
        .flat_map(|other| external_directories(&other))
        .collect()
}

/// Parses the owner's process ID in a lab's name.
fn owner(name: &str) -> Option<Pid> {
    let (pid, _number) = name.strip_prefix(PREFIX)?.split_once('-')?;
    pid.parse().ok().filter(|pid| *pid > 0).map(Pid::from_raw)
}

#[cfg(test)]
mod tests {
    use std::{mem, time::Duration};

    use super::*;
    use crate::wait;

    #[test]
    fn a_zombie_is_not_alive() {
        let mut process = Command::new("true").spawn().unwrap();
        let pid = Pid::from_raw(i32::try_from(process.id()).unwrap());

        wait::until(Duration::from_secs(10), || !is_alive(pid)).unwrap();

        assert!(Path::new(&format!("/proc/{pid}")).exists());
        process.wait().unwrap();
        assert!(is_alive(Pid::this()));
    }

    #[test]
    fn external_directories_are_removed_with_their_last_user_unless_they_existed_before() {
        let scratch = tempfile::tempdir().unwrap();
        let lab = |name: &str| {
            let directory = scratch.path().join(name);
            fs::create_dir(&directory).unwrap();
            mem::ManuallyDrop::new(Lab {
                directory,
                cgroup: PathBuf::new(),
            })
        };
        let (one, other) = (lab("culvert-lab-1-0"), lab("culvert-lab-2-0"));
        let there = scratch.path().join("there");
        fs::create_dir(&there).unwrap();
        let made = there.join("a/b");

        one.create_external_directory(&there).unwrap();
        one.create_external_directory(&made).unwrap();
        other.create_external_directory(&made).unwrap();
        remove_directory(&one.directory).unwrap();
        assert!(made.is_dir());
        remove_directory(&other.directory).unwrap();

        assert!(there.is_dir());
        assert!(!there.join("a").exists());
    }

    #[test]
    fn only_names_with_a_process_id_are_ours() {
        assert_eq!(owner("culvert-lab-123-0"), Some(Pid::from_raw(123)));
        assert_eq!(owner("culvert-lab-0-0"), None);
        assert_eq!(owner("culvert-lab-x-0"), None);
        assert_eq!(owner("culvert-123-0"), None);
    }
}
