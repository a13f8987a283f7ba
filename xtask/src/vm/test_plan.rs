//! The content of machines: the kernel tests and the programs under test, as static binaries, and the
//! few programs of this machine that they start.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::initramfs::Overlay;
use crate::{static_build::Profile, workspace};

/// The programs of this machine that tests start.
const HOST: [&str; 10] = [
    "ip", "tc", "cat", "chroot", "sh", "sleep", "true", "stat", "nice", "setpriv",
];

/// The built programs that machines run.
const MACHINES: [&str; 5] = ["culvert", "culvert-lab", "culvert-guest", "netns", "packet"];

/// The scale of loads: machines are slow.
const SCALE: &str = "0.05";

/// The file to which tests append their skips.
const SKIPS: &str = "/run/skips";

/// The number of concurrent tests in a machine with one CPU: many tests mostly wait.
const TESTS: u32 = 2;
/// The minimum number of tests that are split between two machines.
const FEW: usize = 20;

/// The prefix of tests that need two CPUs.
const RACE: &str = "race::";

/// Also runs the tests with `#[ignore]`, which marks those that do not depend on the kernel.
pub(crate) const MARKED_TOO: &str = "--include-ignored";

/// Makes a test program report the duration of each test: an unstable option of libtest, which accepts
/// it while this variable is set.
const TIMES: [&str; 2] = ["-Zunstable-options", "--report-time"];
const UNSTABLE: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// The maximum run time of one program, in seconds.
pub(super) const LIMIT: u64 = 2400;

/// The programs that were built.
#[derive(Debug)]
pub(crate) struct Programs {
    built: BTreeMap<String, PathBuf>,
}

impl Programs {
    /// Builds the programs.
    pub(crate) fn build() -> Result<Self> {
        Self::build_with(&[])
    }

    /// Builds the programs, and other test targets at the same time.
    pub(crate) fn build_with(others: &[&str]) -> Result<Self> {
        let programs = [programs::CULVERT, programs::LAB];
        let build = Profile::Vm.cargo("build")?;
        let [culvert, lab] = programs::build(build, programs)?;
        // A separate build: in one build with a test, the product's crate would get the features of its
        // own tests, and most crates would be built twice.
        let mut command = Profile::Vm.cargo("build")?;
        command
            .args(["--package", "tunnel-tests", "--bin", "culvert-guest"])
            .args(["--test", "netns", "--test", "packet"])
            .args(others);
        let mut built = programs::run_build(&mut command)?;
        built.insert("culvert".to_owned(), culvert);
        built.insert("culvert-lab".to_owned(), lab);
        built.retain(|name, _| MACHINES.contains(&name.as_str()));
        for name in MACHINES {
            ensure!(built.contains_key(name), "cargo build did not name {name}");
        }
        Ok(Self { built })
    }

    pub(crate) fn path(&self, name: &str) -> Result<&Path> {
        let path = self.built.get(name).map(PathBuf::as_path);
        path.with_context(|| format!("there is no program {name}"))
    }

    /// Returns the names of a program's tests that contain one of the filters, among those selected by
    /// options.
    fn tests(&self, name: &str, filter: &[String], options: &[&str]) -> Result<Vec<String>> {
        let mut command = Command::new(self.path(name)?);
        let output = command.arg("--list").args(options).args(filter).output();
        let output = output.with_context(|| format!("cannot start {name}"))?;
        ensure!(output.status.success(), "{name} --list: {}", output.status);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }

    /// Returns the overlay of every machine, in addition to its kernel's modules and its plan.
    pub(crate) fn overlay(&self) -> Result<Overlay> {
        let mut overlay = Overlay::default();
        overlay.add_file(self.path("culvert-guest")?, "/init", 0o755);
        for (name, path) in &self.built {
            if name != "culvert-guest" {
                overlay.add_file(path, &format!("/bin/{name}"), 0o755);
            }
        }
        overlay.add_symlink("/usr/bin/sh", "/bin/sh");
        let mut libraries = BTreeSet::new();
        for name in HOST {
            let program = host::find_program(name)
                .with_context(|| format!("tests in machines need {name}, which isn't here"))?;
            overlay.add_file(&program, &format!("/usr/bin/{name}"), 0o755);
            libraries.extend(libraries_of(&program)?);
        }
        for library in &libraries {
            let path = Path::new(library);
            overlay.add_file(path, library, 0o755);
        }
        Ok(overlay)
    }
}

/// Returns the libraries that a program is linked with, as the loader finds them.
fn libraries_of(program: &Path) -> Result<BTreeSet<String>> {
    let output = Command::new("ldd").arg(program).output();
    let output = output.context("cannot start ldd")?;
    let listing = String::from_utf8_lossy(&output.stdout);
    let is_whole = output.status.success() && !listing.contains("not found");
    ensure!(is_whole, "ldd {}: {listing}", program.display());
    Ok(paths(&listing))
}

/// Returns the paths in the output of `ldd`.
fn paths(listing: &str) -> BTreeSet<String> {
    let words = listing.split_whitespace();
    let paths = words.filter(|word| word.starts_with('/') && !word.ends_with(':'));
    paths.map(str::to_owned).collect()
}

/// One program of a plan.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    name: &'static str,
    command: Vec<String>,
    is_interactive: bool,
}

/// The programs that a machine, or this one, runs.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// The name in output.
    pub(crate) name: &'static str,
    pub(crate) cpus: u32,
    entries: Vec<Entry>,
    /// The scale of the duration of loads.
    lasting: &'static str,
}

/// The tests to run, by their full names.
#[derive(Debug, Default)]
pub(crate) struct Wanted {
    packet: Vec<String>,
    netns: Vec<String>,
    /// The netns tests that need two CPUs.
    race: Vec<String>,
    /// True if each program is loaded for the verifier's costs.
    verify: bool,
}

impl Wanted {
    /// Selects the tests of a filter; without one, those that depend on the kernel, or all.
    pub(crate) fn of(programs: &Programs, filter: &[String], is_whole: bool) -> Result<Self> {
        let packet = programs.tests("packet", filter, &[])?;
        let mut netns = programs.tests("netns", filter, &[])?;
        if filter.is_empty() && !is_whole {
            let marked = programs.tests("netns", &[], &["--ignored"])?;
            println!(
                "{} netns tests that no kernel decides are left to `cargo xtask test`",
                marked.len()
            );
            netns.retain(|name| !marked.contains(name));
        }
        let (race, netns) = netns.into_iter().partition(|name| name.starts_with(RACE));
        let wanted = Self {
            packet,
            netns,
            race,
            verify: filter.is_empty(),
        };
        ensure!(
            !(wanted.packet.is_empty() && wanted.netns.is_empty() && wanted.race.is_empty()),
            "no test has {} in its name",
            filter.join(" or ")
        );
        Ok(wanted)
    }

    /// Returns plans for machines with one CPU: all tests that don't need two, split between two
    /// machines if they are many, so that no CPU of this machine idles during the last kernel.
    pub(crate) fn dealt(&self) -> Vec<Plan> {
        if self.netns.len() < FEW {
            return self.suite("tests", TESTS).into_iter().collect();
        }
        let half = |start: usize| self.netns.iter().skip(start).step_by(2).cloned().collect();
        let first = Self {
            packet: self.packet.clone(),
            netns: half(0),
            ..Self::default()
        };
        let second = Self {
            netns: half(1),
            verify: self.verify,
            ..Self::default()
        };
        let plans = [
            first.suite("tests-1", TESTS),
            second.suite("tests-2", TESTS),
        ];
        plans.into_iter().flatten().collect()
    }

    /// Returns a plan of all tests that don't need two CPUs, with this number of concurrent netns tests.
    pub(crate) fn suite(&self, name: &'static str, at_a_time: u32) -> Option<Plan> {
        let tiers = [
            ("packet", 1, &self.packet),
            ("netns", at_a_time, &self.netns),
        ];
        let tiers = tiers.into_iter().filter(|(_, _, names)| !names.is_empty());
        let tests = tiers.map(|(program, threads, names)| tests(program, threads, names));
        let entries: Vec<Entry> = tests.chain(self.verify.then(verify)).collect();
        (!entries.is_empty()).then_some(Plan {
            name,
            cpus: 1,
            entries,
            lasting: SCALE,
        })
    }

    /// Returns the plan of the tests that need two CPUs, at full length.
    pub(crate) fn race(&self) -> Option<Plan> {
        (!self.race.is_empty()).then(|| Plan {
            name: "race",
            cpus: 2,
            entries: vec![tests("netns", 1, &self.race)],
            lasting: "1",
        })
    }
}

/// Returns the entry for these tests of a program, with this number of concurrent tests, including
/// marked ones.
fn tests(program: &'static str, at_a_time: u32, names: &[String]) -> Entry {
    let options = [
        format!("/bin/{program}"),
        format!("--test-threads={at_a_time}"),
        MARKED_TOO.to_owned(),
        "--exact".to_owned(),
    ];
    let times = TIMES.map(str::to_owned);
    Entry {
        name: program,
        command: [&options[..], &times, names].concat(),
        is_interactive: false,
    }
}

fn verify() -> Entry {
    Entry {
        name: "verify",
        command: ["/bin/culvert-lab", "verify"].map(str::to_owned).to_vec(),
        is_interactive: false,
    }
}

impl Plan {
    /// Returns a minimal plan, which proves that a machine works.
    pub(crate) fn nothing() -> Self {
        let entry = Entry {
            name: "nothing",
            command: vec!["/usr/bin/true".to_owned()],
            is_interactive: false,
        };
        Self {
            name: "trial",
            cpus: 1,
            entries: vec![entry],
            lasting: SCALE,
        }
    }

    /// Returns the plan of a shell.
    pub(crate) fn shell() -> Self {
        Self {
            name: "shell",
            cpus: 2,
            entries: vec![Entry {
                name: "shell",
                command: vec!["/usr/bin/sh".to_owned()],
                is_interactive: true,
            }],
            lasting: SCALE,
        }
    }

    /// Renders the plan for the guest.
    pub(crate) fn json(&self) -> Value {
        let entries = self.entries.iter().map(|entry| {
            json!({
                "name": entry.name,
                "command": entry.command,
                "interactive": entry.is_interactive,
                "seconds": if entry.is_interactive { u64::from(u32::MAX) } else { LIMIT },
            })
        });
        json!({
            "environment": {
                "PATH": "/usr/bin:/bin",
                "CULVERT_BIN": "/bin/culvert",
                "CULVERT_LAB_BIN": "/bin/culvert-lab",
                "CULVERT_SCALE": SCALE,
                "CULVERT_LASTING": self.lasting,
                "CULVERT_SKIPS": SKIPS,
                UNSTABLE.0: UNSTABLE.1,
            },
            "entries": entries.collect::<Vec<_>>(),
        })
    }

    /// Returns the commands for this machine: each program by its name, with its environment, except the
    /// path for skips.
    pub(crate) fn commands(&self, programs: &Programs) -> Result<Vec<(&'static str, Command)>> {
        let one = |entry: &Entry| {
            let (program, arguments) = entry.command.split_first().context("an empty command")?;
            let name = program.strip_prefix("/bin/").unwrap_or(program);
            let mut command = Command::new(programs.path(name)?);
            command
                .args(arguments)
                .env("CULVERT_BIN", programs.path("culvert")?)
                .env("CULVERT_LAB_BIN", programs.path("culvert-lab")?)
                .env("CULVERT_SCALE", SCALE)
                .env("CULVERT_LASTING", self.lasting)
                .env(UNSTABLE.0, UNSTABLE.1);
            Ok((entry.name, command))
        };
        self.entries.iter().map(one).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_libraries_of_a_program_are_those_with_a_path_and_the_loader() {
        let listing = "\tlinux-vdso.so.1 (0x00007ffe)\n\
            \tlibmnl.so.0 => /lib/x86_64-linux-gnu/libmnl.so.0 (0x00007f)\n\
            \t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n";

        let found = Vec::from_iter(paths(listing)).join(" ");
        let wanted = "/lib/x86_64-linux-gnu/libmnl.so.0 /lib64/ld-linux-x86-64.so.2";
        assert_eq!(found, wanted);
    }

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn command(plan: &Plan) -> String {
        plan.entries[0].command.join(" ")
    }

    #[test]
    fn what_is_named_runs_and_races_run_at_their_whole_length() {
        let one = Wanted {
            netns: names(&["hooks::a"]),
            ..Wanted::default()
        };
        let race = Wanted {
            race: names(&["race::b"]),
            ..Wanted::default()
        };

        let plans = one.dealt();
        assert_eq!(plans.len(), 1);
        let said = command(&plans[0]);
        assert!(said.starts_with("/bin/netns --test-threads=2 "), "{said}");
        assert!(said.ends_with(" hooks::a"), "{said}");
        assert!(one.race().is_none() && race.dealt().is_empty());
        let plan = race.race().expect("a plan");
        assert!(command(&plan).ends_with(" race::b"));
        assert_eq!(plan.json()["environment"]["CULVERT_LASTING"], "1");
    }

    #[test]
    fn many_tests_are_dealt_to_two_machines_each_to_one_of_them() {
        let all: Vec<String> = (0..=FEW)
            .map(|number| format!("hooks::t{number}"))
            .collect();
        let wanted = Wanted {
            packet: names(&["guard::a"]),
            netns: all.clone(),
            verify: true,
            ..Wanted::default()
        };

        let plans = wanted.dealt();

        assert_eq!(plans.len(), 2);
        let words = |plan: &Plan| -> Vec<String> {
            let entries = plan.entries.iter().flat_map(|it| it.command.clone());
            entries.collect()
        };
        let [first, second] = [words(&plans[0]), words(&plans[1])];
        for test in &all {
            assert!(first.contains(test) != second.contains(test), "{test}");
        }
        assert!(first.contains(&"guard::a".to_owned()) && second.contains(&"verify".to_owned()));
    }
}
