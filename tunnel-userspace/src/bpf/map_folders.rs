//! The names of the folders of maps, and the steps that replace one set of maps by another. Pure.
//!
//! The maps in `v<layout>` are in use, or will be once the programs are attached. Those in `v<layout>-next`
//! are being filled. Those in `v<layout>-old` were replaced, and are read until every program is replaced.
//! If the process is killed after any step, the next one finds a complete set of maps:
//!
//! 1. `v1-next` is created next to `v1` or `v0`, and filled
//! 2. `v1` becomes `v1-old`
//! 3. `v1-next` becomes `v1`
//! 4. the programs are replaced
//! 5. `v1-old`, or `v0`, is removed
//!
//! The daemon doesn't write the old maps after the first step, so both sets keep the same content.

use std::{collections::BTreeSet, fmt};

/// The role of a folder of maps.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) enum FolderRole {
    /// The maps are in use.
    Current,
    /// The maps are being filled.
    Next,
    /// The maps were replaced.
    Old,
}

/// A folder of maps.
#[derive(Clone, Copy, Debug, Eq, Ord, PartialEq, PartialOrd)]
pub(super) struct Folder {
    pub(super) layout: u32,
    pub(super) role: FolderRole,
}

impl Folder {
    pub(super) const fn new(layout: u32, role: FolderRole) -> Self {
        Self { layout, role }
    }

    /// Parses the name of a folder of maps; returns none for any other name.
    pub(super) fn parse_name(name: &str) -> Option<Self> {
        let rest = name.strip_prefix('v')?;
        let (layout, role) = match rest.split_once('-') {
            None => (rest, FolderRole::Current),
            Some((layout, "next")) => (layout, FolderRole::Next),
            Some((layout, "old")) => (layout, FolderRole::Old),
            Some(_) => return None,
        };
        let folder = Self::new(layout.parse().ok()?, role);
        // Rejects names that parse but are written differently, such as with a leading zero.
        (folder.to_string() == name).then_some(folder)
    }
}

// The BPF file system doesn't allow dots in names, hence the dash.
impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = match self.role {
            FolderRole::Current => "",
            FolderRole::Next => "-next",
            FolderRole::Old => "-old",
        };
        write!(f, "v{}{suffix}", self.layout)
    }
}

/// One step of a change of the folders.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum FolderChange {
    /// Remove all files of a folder, then the folder.
    Remove(Folder),
    /// Rename the first folder to the second.
    Rename(Folder, Folder),
}

type Folders = BTreeSet<Folder>;

/// Returns the folder with the complete set of maps of a layout, if there is one.
pub(super) fn complete_set(found: &Folders, layout: u32) -> Option<Folder> {
    let exists = |role| found.contains(&Folder::new(layout, role));
    let role = if exists(FolderRole::Current) {
        FolderRole::Current
    } else if !exists(FolderRole::Old) {
        // The maps in the folder `next` may be incomplete.
        return None;
    } else if exists(FolderRole::Next) {
        // The old maps are renamed only after the new ones are filled.
        FolderRole::Next
    } else {
        FolderRole::Old
    };
    Some(Folder::new(layout, role))
}

/// Returns the steps that complete or undo the unfinished change of an earlier process.
pub(super) fn plan_recovery(found: &Folders, layout: u32) -> Vec<FolderChange> {
    let [current, next] =
        [FolderRole::Current, FolderRole::Next].map(|role| Folder::new(layout, role));
    let complete = complete_set(found, layout);
    let is_unfinished = complete != Some(next) && found.contains(&next);
    let discarded = is_unfinished.then_some(FolderChange::Remove(next));
    let restored = complete.filter(|folder| *folder != current);
    let restored = restored.map(|folder| FolderChange::Rename(folder, current));
    discarded.into_iter().chain(restored).collect()
}

/// Returns the steps that replace the current maps by the filled ones.
pub(super) fn plan_promotion(found: &Folders, layout: u32) -> Vec<FolderChange> {
    let [current, next, old] = [FolderRole::Current, FolderRole::Next, FolderRole::Old]
        .map(|role| Folder::new(layout, role));
    let mut steps = Vec::new();
    if found.contains(&current) {
        if found.contains(&old) {
            steps.push(FolderChange::Remove(old));
        }
        steps.push(FolderChange::Rename(current, old));
    }
    steps.push(FolderChange::Rename(next, current));
    steps
}

/// Returns the steps that remove all maps except the current ones of this layout, which the programs use.
pub(super) fn plan_cleanup(found: &Folders, layout: u32) -> Vec<FolderChange> {
    let current = Folder::new(layout, FolderRole::Current);
    let others = found.iter().filter(|folder| **folder != current);
    others.copied().map(FolderChange::Remove).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const LAYOUT: u32 = 1;
    const CURRENT: Folder = Folder::new(LAYOUT, FolderRole::Current);
    const NEXT: Folder = Folder::new(LAYOUT, FolderRole::Next);
    const OLD: Folder = Folder::new(LAYOUT, FolderRole::Old);
    const OLDER: Folder = Folder::new(0, FolderRole::Current);

    /// A set of maps, numbered in the order of creation.
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

    /// The folders, as seen by a process that is killed before one of its steps.
    #[derive(Clone, Debug, Default)]
    struct Simulation {
        folders: BTreeMap<Folder, Maps>,
        /// The maps that the programs use.
        used: Option<Maps>,
        steps_done: usize,
        kill_at: usize,
    }

    #[derive(Debug)]
    struct Killed;

    impl Simulation {
        fn found(&self) -> Folders {
            self.folders.keys().copied().collect()
        }

        fn step(&mut self) -> Result<(), Killed> {
            if self.steps_done == self.kill_at {
                return Err(Killed);
            }
            self.steps_done += 1;
            Ok(())
        }

        fn run(&mut self, steps: Vec<FolderChange>) -> Result<(), Killed> {
            for step in steps {
                self.step()?;
                match step {
                    FolderChange::Remove(folder) => {
                        self.folders
                            .get_mut(&folder)
                            .expect("the folder exists")
                            .is_complete = false;
                        self.step()?;
                        self.folders.remove(&folder);
                    }
                    FolderChange::Rename(from, to) => {
                        let maps = self.folders.remove(&from).expect("the folder exists");
                        assert_eq!(self.folders.insert(to, maps), None, "{to} exists already");
                    }
                }
            }
            Ok(())
        }

        /// Simulates a start with new maps, which may be killed before any step.
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
            assert_eq!(self.folders.insert(NEXT, maps), None);
            self.step()?;
            maps.is_complete = true;
            self.folders.insert(NEXT, maps);
            self.run(plan_promotion(&self.found(), LAYOUT))?;
            self.step()?;
            self.used = Some(maps);
            self.run(plan_cleanup(&self.found(), LAYOUT))
        }

        /// Checks that a start finds a complete set, at least as new as the one that the programs use.
        fn expect_consistent(&self) {
            let found =
                complete_set(&self.found(), LAYOUT).or_else(|| complete_set(&self.found(), 0));
            let maps = found.and_then(|folder| self.folders.get(&folder));
            let maps = maps.unwrap_or_else(|| panic!("no complete set of maps: {self:?}"));
            assert!(maps.is_complete, "{self:?}");
            let is_new = self.used.is_none_or(|used| used.number <= maps.number);
            assert!(is_new, "{self:?}");
        }
    }

    fn simulations() -> [Simulation; 2] {
        [CURRENT, OLDER].map(|folder| Simulation {
            folders: BTreeMap::from([(folder, complete_maps(0))]),
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
                assert_eq!(simulation.folders, BTreeMap::from([(CURRENT, maps)]));
                assert_eq!(simulation.used, Some(maps));
            }
        }
    }

    #[test]
    fn recovery_keeps_complete_maps_and_cleanup_removes_all_others() {
        let found = Folders::from([CURRENT, OLD, OLDER]);

        assert_eq!(plan_recovery(&found, LAYOUT), []);
        let removed = [OLDER, OLD].map(FolderChange::Remove);
        assert_eq!(plan_cleanup(&found, LAYOUT), removed);
    }

    #[test]
    fn only_exact_names_are_folders_of_maps() {
        for folder in [CURRENT, NEXT, OLD, OLDER] {
            assert_eq!(Folder::parse_name(&folder.to_string()), Some(folder));
        }
        for name in ["v01", "v+1", "v", "v1-", "v1-older", "1", "links", "V1"] {
            assert_eq!(Folder::parse_name(name), None, "{name}");
        }
    }
}
