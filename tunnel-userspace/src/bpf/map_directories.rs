//! The names of the map directories, and the steps that replace one set of maps with another. Pure.
//!
//! The maps in `v<layout>` are in use, or will be once the programs are attached. Those in `v<layout>-next`
//! are being filled. Those in `v<layout>-old` have been replaced, but are still read until every program has
//! been replaced. If the process is killed after any of these steps, the next process finds a complete set of
//! maps:
//!
//! 1. `v1-next` is created next to `v1` or `v0`, and filled
//! 2. `v1` becomes `v1-old`
//! 3. `v1-next` becomes `v1`
//! 4. the programs at sockets are replaced
//! 5. the flows of packets are moved, if their map is replaced
//! 6. `v1-old`, or `v0`, loses all maps but that of flows, if that is replaced
//! 7. the programs for packets are replaced
//! 8. `v1-old`, or `v0`, is removed
//!
//! The daemon doesn't write to the old maps after the first step, so both sets keep the same contents.

use std::{collections::BTreeSet, fmt};

/// The role of a map directory.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum DirectoryRole {
    /// The maps are in use.
    Current,
    /// The maps are being filled.
    Next,
    /// The maps have been replaced.
    Old,
}

/// A directory that contains a set of maps.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Directory {
    pub(super) layout: u32,
    pub(super) role: DirectoryRole,
}

impl Directory {
    pub(super) const fn new(layout: u32, role: DirectoryRole) -> Self {
        Self { layout, role }
    }

    /// Parses the name of a map directory; returns `None` for any other name.
    pub(super) fn parse_name(name: &str) -> Option<Self> {
        let rest = name.strip_prefix('v')?;
        let (layout, role) = match rest.split_once('-') {
            None => (rest, DirectoryRole::Current),
            Some((layout, "next")) => (layout, DirectoryRole::Next),
            Some((layout, "old")) => (layout, DirectoryRole::Old),
            Some(_) => return None,
        };
        let directory = Self::new(layout.parse().ok()?, role);
        // Rejects names that parse but are spelt differently, such as those with a leading zero.
        (directory.to_string() == name).then_some(directory)
    }
}

// The BPF file system doesn't allow dots in names, hence the dash.
impl fmt::Display for Directory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.role {
            DirectoryRole::Current => "",
            DirectoryRole::Next => "-next",
            DirectoryRole::Old => "-old",
        };
        write!(f, "v{}{suffix}", self.layout)
    }
}

/// One change to the map directories.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum DirectoryChange {
    /// Remove all files in a directory, then the directory itself.
    Remove(Directory),
    /// Rename the first directory to the second.
    Rename(Directory, Directory),
}

type Directories = BTreeSet<Directory>;

/// Returns the directory that contains the complete set of maps for a layout, if there is one.
pub(super) fn complete_set(found: &Directories, layout: u32) -> Option<Directory> {
    let exists = |role| found.contains(&Directory::new(layout, role));
    let role = if exists(DirectoryRole::Current) {
        DirectoryRole::Current
    } else if !exists(DirectoryRole::Old) {
        // The maps in the `-next` directory may be incomplete.
        return None;
    } else if exists(DirectoryRole::Next) {
        // The old maps are renamed only after the new ones have been filled.
        DirectoryRole::Next
    } else {
        DirectoryRole::Old
    };
    Some(Directory::new(layout, role))
}

/// Returns the steps that complete or undo a change that an earlier process left unfinished.
pub(super) fn plan_recovery(found: &Directories, layout: u32) -> Vec<DirectoryChange> {
    let [current, next] =
        [DirectoryRole::Current, DirectoryRole::Next].map(|role| Directory::new(layout, role));
    let complete = complete_set(found, layout);
    let is_unfinished = complete != Some(next) && found.contains(&next);
    let discarded = is_unfinished.then_some(DirectoryChange::Remove(next));
    let restored = complete.filter(|directory| *directory != current);
    let restored = restored.map(|directory| DirectoryChange::Rename(directory, current));
    discarded.into_iter().chain(restored).collect()
}

/// Returns the steps that replace the current maps with the newly filled ones.
pub(super) fn plan_promotion(found: &Directories, layout: u32) -> Vec<DirectoryChange> {
    let [current, next, old] = [
        DirectoryRole::Current,
        DirectoryRole::Next,
        DirectoryRole::Old,
    ]
    .map(|role| Directory::new(layout, role));
    let mut steps = Vec::new();
    if found.contains(&current) {
        if found.contains(&old) {
            steps.push(DirectoryChange::Remove(old));
        }
        steps.push(DirectoryChange::Rename(current, old));
    }
    steps.push(DirectoryChange::Rename(next, current));
    steps
}

/// Returns the directories of all maps except this layout's current ones, which the programs use.
pub(super) fn replaced(found: &Directories, layout: u32) -> impl Iterator<Item = Directory> {
    let current = Directory::new(layout, DirectoryRole::Current);
    found
        .iter()
        .copied()
        .filter(move |directory| *directory != current)
}

/// Returns the steps that remove all maps except this layout's current ones.
pub(super) fn plan_cleanup(found: &Directories, layout: u32) -> Vec<DirectoryChange> {
    let replaced = replaced(found, layout);
    replaced.map(DirectoryChange::Remove).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const LAYOUT: u32 = 1;
    const CURRENT: Directory = Directory::new(LAYOUT, DirectoryRole::Current);
    const NEXT: Directory = Directory::new(LAYOUT, DirectoryRole::Next);
    const OLD: Directory = Directory::new(LAYOUT, DirectoryRole::Old);
    const OLDER: Directory = Directory::new(0, DirectoryRole::Current);

    /// A set of maps. Sets are numbered in order of creation.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    struct Maps {
        number: u32,
        is_complete: bool,
    }

    const fn complete_maps(number: u32) -> Maps {
        Maps {
            number,
            is_complete: true,
        }
    }

    /// The map directories as left by a process that is killed before one of its steps.
    #[derive(Clone, Debug, Default)]
    struct Simulation {
        directories: BTreeMap<Directory, Maps>,
        /// The maps that the programs use.
        used: Option<Maps>,
        steps_done: usize,
        kill_at: usize,
    }

    #[derive(Debug)]
    struct Killed;

    impl Simulation {
        fn found(&self) -> Directories {
            self.directories.keys().copied().collect()
        }

        fn step(&mut self) -> Result<(), Killed> {
            if self.steps_done == self.kill_at {
                return Err(Killed);
            }
            self.steps_done += 1;
            Ok(())
        }

        fn run(&mut self, steps: Vec<DirectoryChange>) -> Result<(), Killed> {
            for step in steps {
                self.step()?;
                match step {
                    DirectoryChange::Remove(directory) => {
                        self.directories
                            .get_mut(&directory)
                            .expect("the directory exists")
                            .is_complete = false;
                        self.step()?;
                        self.directories.remove(&directory);
                    }
                    DirectoryChange::Rename(from, to) => {
                        let maps = self
                            .directories
                            .remove(&from)
                            .expect("the directory exists");
                        assert_eq!(
                            self.directories.insert(to, maps),
                            None,
                            "{to} exists already"
                        );
                    }
                }
            }
            Ok(())
        }

        /// Simulates the daemon starting and replacing the maps. It may be killed before any step.
        fn start(&mut self, number: u32) -> Result<(), Killed> {
            for layout in [0, LAYOUT] {
                self.run(plan_recovery(&self.found(), layout))?;
            }
            let found = self.found();
            assert!(
                found.contains(&CURRENT) || found.contains(&OLDER),
                "{self:?}"
            );
            let mut maps = Maps {
                number,
                is_complete: false,
            };
            self.step()?;
            assert_eq!(self.directories.insert(NEXT, maps), None);
            self.step()?;
            maps.is_complete = true;
            self.directories.insert(NEXT, maps);
            self.run(plan_promotion(&self.found(), LAYOUT))?;
            self.step()?;
            self.used = Some(maps);
            self.run(plan_cleanup(&self.found(), LAYOUT))
        }

        /// Checks that the next start finds a complete set of maps that is at least as new as the one the
        /// programs use.
        fn expect_consistent(&self) {
            let found =
                complete_set(&self.found(), LAYOUT).or_else(|| complete_set(&self.found(), 0));
            let maps = found.and_then(|directory| self.directories.get(&directory));
            let maps = maps.unwrap_or_else(|| panic!("no complete set of maps: {self:?}"));
            assert!(maps.is_complete, "{self:?}");
            let is_new = self.used.is_none_or(|used| used.number <= maps.number);
            assert!(is_new, "{self:?}");
        }
    }

    fn simulations() -> [Simulation; 2] {
        [CURRENT, OLDER].map(|directory| Simulation {
            directories: BTreeMap::from([(directory, complete_maps(0))]),
            used: Some(complete_maps(0)),
            steps_done: 0,
            kill_at: usize::MAX,
        })
    }

    #[test]
    fn kills_at_any_two_steps_leave_complete_maps_and_the_next_start_completes_the_change() {
        for simulation in simulations() {
            for (first, second) in (0..16).flat_map(|one| (0..16).map(move |two| (one, two))) {
                let mut simulation = simulation.clone();
                for (number, kill_at) in [(1, first), (2, second)] {
                    (simulation.steps_done, simulation.kill_at) = (0, kill_at);
                    let _killed = simulation.start(number);
                    simulation.expect_consistent();
                }
                (simulation.steps_done, simulation.kill_at) = (0, usize::MAX);
                simulation.start(3).expect("this start is not killed");

                let maps = complete_maps(3);
                assert_eq!(simulation.directories, BTreeMap::from([(CURRENT, maps)]));
                assert_eq!(simulation.used, Some(maps));
            }
        }
    }

    #[test]
    fn recovery_keeps_complete_maps_and_cleanup_removes_all_others() {
        let found = Directories::from([CURRENT, OLD, OLDER]);

        assert_eq!(plan_recovery(&found, LAYOUT), []);
        let removed = [OLDER, OLD].map(DirectoryChange::Remove);
        assert_eq!(plan_cleanup(&found, LAYOUT), removed);
    }

    #[test]
    fn only_exact_names_are_directories_of_maps() {
        for directory in [CURRENT, NEXT, OLD, OLDER] {
            assert_eq!(
                Directory::parse_name(&directory.to_string()),
                Some(directory)
            );
        }
        for name in ["v01", "v+1", "v", "v1-", "v1-older", "1", "links", "V1"] {
            assert_eq!(Directory::parse_name(name), None, "{name}");
        }
    }
}
