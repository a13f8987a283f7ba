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
pub(super) enum Stage {
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
    pub(super) stage: Stage,
}

impl Folder {
    pub(super) const fn new(layout: u32, stage: Stage) -> Self {
        Self { layout, stage }
    }

    /// Parses the name of a folder of maps; returns none for any other name.
    pub(super) fn of_name(name: &str) -> Option<Self> {
        let rest = name.strip_prefix('v')?;
        let (layout, stage) = match rest.split_once('-') {
            None => (rest, Stage::Current),
            Some((layout, "next")) => (layout, Stage::Next),
            Some((layout, "old")) => (layout, Stage::Old),
            Some(_) => return None,
        };
        let folder = Self::new(layout.parse().ok()?, stage);
        // Rejects names that parse but are written differently, such as with a leading zero.
        (folder.to_string() == name).then_some(folder)
    }
}

// The BPF file system doesn't allow dots in names, hence the dash.
impl fmt::Display for Folder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stage = match self.stage {
            Stage::Current => "",
            Stage::Next => "-next",
            Stage::Old => "-old",
        };
        write!(f, "v{}{stage}", self.layout)
    }
}

/// One step of a change of the folders.
#[derive(Clone, Copy, Debug, Eq, PartialEq)]
pub(super) enum Step {
    /// Remove all files of a folder, then the folder.
    Remove(Folder),
    /// Rename the first folder to the second.
    Rename(Folder, Folder),
}

type Folders = BTreeSet<Folder>;

/// Returns the folder with the complete set of maps of a layout, if there is one.
pub(super) fn whole(found: &Folders, layout: u32) -> Option<Folder> {
    let is_there = |stage| found.contains(&Folder::new(layout, stage));
    let stage = if is_there(Stage::Current) {
        Stage::Current
    } else if !is_there(Stage::Old) {
        // The maps in the folder `next` may be incomplete.
        return None;
    } else if is_there(Stage::Next) {
        // The old maps are renamed only after the new ones are filled.
        Stage::Next
    } else {
        Stage::Old
    };
    Some(Folder::new(layout, stage))
}

/// Returns the steps that complete or undo the unfinished change of an earlier process.
pub(super) fn recovery(found: &Folders, layout: u32) -> Vec<Step> {
    let [current, next] = [Stage::Current, Stage::Next].map(|stage| Folder::new(layout, stage));
    let whole = whole(found, layout);
    let is_unfinished = whole != Some(next) && found.contains(&next);
    let discarded = is_unfinished.then_some(Step::Remove(next));
    let restored = whole.filter(|whole| *whole != current);
    let restored = restored.map(|whole| Step::Rename(whole, current));
    discarded.into_iter().chain(restored).collect()
}

/// Returns the steps that replace the current maps by the filled ones.
pub(super) fn promotion(found: &Folders, layout: u32) -> Vec<Step> {
    let [current, next, old] =
        [Stage::Current, Stage::Next, Stage::Old].map(|stage| Folder::new(layout, stage));
    let mut steps = Vec::new();
    if found.contains(&current) {
        if found.contains(&old) {
            steps.push(Step::Remove(old));
        }
        steps.push(Step::Rename(current, old));
    }
    steps.push(Step::Rename(next, current));
    steps
}

/// Returns the steps that remove all maps except the current ones of this layout, which the programs use.
pub(super) fn leftovers(found: &Folders, layout: u32) -> Vec<Step> {
    let current = Folder::new(layout, Stage::Current);
    let others = found.iter().filter(|folder| **folder != current);
    others.copied().map(Step::Remove).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    const LAYOUT: u32 = 1;
    const CURRENT: Folder = Folder::new(LAYOUT, Stage::Current);
    const NEXT: Folder = Folder::new(LAYOUT, Stage::Next);
    const OLD: Folder = Folder::new(LAYOUT, Stage::Old);
    const OLDER: Folder = Folder::new(0, Stage::Current);

    /// A set of maps, numbered by creation. It may be incomplete.
    #[derive(Clone, Copy, Debug, Eq, PartialEq)]
    struct Maps {
        made: u32,
        is_whole: bool,
    }

    const fn whole_maps(made: u32) -> Maps {
        Maps {
            made,
            is_whole: true,
        }
    }

    /// The folders, as seen by a process that is killed before one of its steps.
    #[derive(Clone, Debug, Default)]
    struct Disk {
        folders: BTreeMap<Folder, Maps>,
        /// The maps that the programs use.
        read: Option<Maps>,
        moves: usize,
        limit: usize,
    }

    #[derive(Debug)]
    struct Killed;

    impl Disk {
        fn found(&self) -> Folders {
            self.folders.keys().copied().collect()
        }

        fn step(&mut self) -> Result<(), Killed> {
            if self.moves == self.limit {
                return Err(Killed);
            }
            self.moves += 1;
            Ok(())
        }

        fn run(&mut self, steps: Vec<Step>) -> Result<(), Killed> {
            for step in steps {
                self.step()?;
                match step {
                    Step::Remove(folder) => {
                        self.folders.get_mut(&folder).expect("is there").is_whole = false;
                        self.step()?;
                        self.folders.remove(&folder);
                    }
                    Step::Rename(from, to) => {
                        let maps = self.folders.remove(&from).expect("is there");
                        assert_eq!(self.folders.insert(to, maps), None, "{to} is in the way");
                    }
                }
            }
            Ok(())
        }

        /// Simulates a start with new maps, which may be killed before any step.
        fn start(&mut self, made: u32) -> Result<(), Killed> {
            for layout in [0, LAYOUT] {
                self.run(recovery(&self.found(), layout))?;
            }
            let found = self.found();
            assert!(
                found.contains(&CURRENT) || found.contains(&OLDER),
                "{self:?}"
            );
            let mut maps = Maps {
                made,
                is_whole: false,
            };
            self.step()?;
            assert_eq!(self.folders.insert(NEXT, maps), None);
            self.step()?;
            maps.is_whole = true;
            self.folders.insert(NEXT, maps);
            self.run(promotion(&self.found(), LAYOUT))?;
            self.step()?;
            self.read = Some(maps);
            self.run(leftovers(&self.found(), LAYOUT))
        }

        /// Checks that a start finds a complete set, at least as new as the one that the programs use.
        fn is_sound(&self) {
            let found = whole(&self.found(), LAYOUT).or_else(|| whole(&self.found(), 0));
            let maps = found.and_then(|folder| self.folders.get(&folder));
            let maps = maps.unwrap_or_else(|| panic!("no complete set of maps: {self:?}"));
            assert!(maps.is_whole, "{self:?}");
            let is_new = self.read.is_none_or(|read| read.made <= maps.made);
            assert!(is_new, "{self:?}");
        }
    }

    fn disks() -> [Disk; 2] {
        [CURRENT, OLDER].map(|folder| Disk {
            folders: BTreeMap::from([(folder, whole_maps(0))]),
            read: Some(whole_maps(0)),
            moves: 0,
            limit: usize::MAX,
        })
    }

    #[test]
    fn kills_at_any_two_steps_leave_complete_maps_and_the_next_start_completes_the_change() {
        for disk in disks() {
            for (first, second) in (0..16).flat_map(|one| (0..16).map(move |two| (one, two))) {
                let mut disk = disk.clone();
                for (made, limit) in [(1, first), (2, second)] {
                    (disk.moves, disk.limit) = (0, limit);
                    let _killed = disk.start(made);
                    disk.is_sound();
                }
                (disk.moves, disk.limit) = (0, usize::MAX);
                disk.start(3).expect("this start is not killed");

                let maps = whole_maps(3);
                assert_eq!(disk.folders, BTreeMap::from([(CURRENT, maps)]));
                assert_eq!(disk.read, Some(maps));
            }
        }
    }

    #[test]
    fn recovery_keeps_complete_maps_and_leftovers_removes_all_others() {
        let found = Folders::from([CURRENT, OLD, OLDER]);

        assert_eq!(recovery(&found, LAYOUT), []);
        let removed = [OLDER, OLD].map(Step::Remove);
        assert_eq!(leftovers(&found, LAYOUT), removed);
    }

    #[test]
    fn only_exact_names_are_folders_of_maps() {
        for folder in [CURRENT, NEXT, OLD, OLDER] {
            assert_eq!(Folder::of_name(&folder.to_string()), Some(folder));
        }
        for name in ["v01", "v+1", "v", "v1-", "v1-older", "1", "links", "V1"] {
            assert_eq!(Folder::of_name(name), None, "{name}");
        }
    }
}
