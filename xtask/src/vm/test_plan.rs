//! Selects tests, and divides them into plans for virtual machines and for this machine.

use std::{collections::BTreeSet, process::Command};

use anyhow::{Context as _, Result, bail, ensure};
use serde_json::{Value, json};

use super::guest_binaries::MachinePrograms;

/// Factor by which tests scale their loads, since the virtual machines are slow.
const SCALE: &str = "0.05";

/// Path of the file, in a virtual machine, to which tests append their skips.
const SKIPS: &str = "/run/skips";

/// Number of tests that run concurrently in a virtual machine with one CPU; many tests spend most of their
/// time waiting.
const CONCURRENT_TESTS: u32 = 2;
/// If there are at least this many netns tests, they are split between two virtual machines.
const MIN_TO_SPLIT: usize = 20;

/// The program with the packet tests.
const PACKET: &str = "packet";
/// Prefix of the names of tests that need two CPUs.
const RACE: &str = "race::";

/// libtest option that also runs tests marked `#[ignore]`, which do not depend on the kernel.
pub(crate) const INCLUDE_IGNORED: &str = "--include-ignored";

/// Options that make libtest print how long each test took. They are unstable.
const REPORT_TIME: [&str; 2] = ["-Zunstable-options", "--report-time"];
/// Variable that makes a stable libtest accept unstable options.
const ALLOW_UNSTABLE: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// Maximum run time of a single program, in seconds.
pub(super) const PROGRAM_SECONDS: u64 = 5400;

/// One program in a plan.
#[derive(Clone, Debug)]
pub(crate) struct Entry {
    name: &'static str,
    command: Vec<String>,
    is_interactive: bool,
}

/// The programs that a virtual machine or this machine runs.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Name of the plan in the output.
    pub(crate) name: &'static str,
    pub(crate) cpus: u32,
    entries: Vec<Entry>,
    /// Factor by which tests scale the duration of their loads.
    duration_scale: &'static str,
}

/// The tests to run, by their full names.
#[derive(Clone, Debug, Default)]
pub(crate) struct TestSelection {
    packet: Vec<String>,
    netns: Vec<String>,
    /// The netns tests that need two CPUs.
    race: Vec<String>,
    /// True if `culvert-lab verify`, which reports the verifier's costs for the programs, should run too.
    verify: bool,
}

impl TestSelection {
    /// Selects the tests that match a filter. Without a filter, selects those that depend on the kernel.
    pub(crate) fn new(programs: &MachinePrograms, filter: &[String]) -> Result<Self> {
        let packet = programs.list_tests(PACKET, filter, &[])?;
        let mut netns = programs.list_tests("netns", filter, &[])?;
        if filter.is_empty() {
            let ignored = programs.list_tests("netns", &[], &["--ignored"])?;
            println!(
                "leaving out {} netns tests that do not depend on the kernel; `cargo xtask test` \
                 runs them",
                ignored.len()
            );
            netns.retain(|name| !ignored.contains(name));
        }
        let (race, netns) = netns.into_iter().partition(|name| name.starts_with(RACE));
        let selection = Self {
            packet,
            netns,
            race,
            verify: filter.is_empty(),
        };
        let is_empty =
            selection.packet.is_empty() && selection.netns.is_empty() && selection.race.is_empty();
        ensure!(!is_empty, "no test has {} in its name", filter.join(" or "));
        Ok(selection)
    }

    /// Returns the same selection with only those netns tests that are in one of the modules, but not in a submodule of it, and
    /// with the packet tests only if one of the modules is [`PACKET`]. Returns an error if a module has no test.
    pub(crate) fn in_modules(&self, modules: &[&str]) -> Result<Self> {
        let module_of = |name: &String| {
            let found = name.rsplit_once("::");
            modules
                .iter()
                .find(|it| Some(**it) == found.map(|(module, _)| module))
        };
        let only = |names: &[String]| -> Vec<String> {
            let chosen = names.iter().filter(|name| module_of(name).is_some());
            chosen.cloned().collect()
        };
        let (netns, race) = (only(&self.netns), only(&self.race));
        let mut used: BTreeSet<_> = netns.iter().chain(&race).filter_map(module_of).collect();
        let packet = if let Some(module) = modules.iter().find(|module| **module == PACKET) {
            used.insert(module);
            self.packet.clone()
        } else {
            Vec::new()
        };
        let unused = modules.iter().find(|module| !used.contains(module));
        if let Some(unused) = unused {
            bail!("no test is in the module {unused}, which xtask/src/vm/kernels.rs lists");
        }
        Ok(Self {
            packet,
            netns,
            race,
            verify: self.verify,
        })
    }

    /// Returns the plans for virtual machines with one CPU, which contain all tests that do not need two. If
    /// there are many tests, they are split between two virtual machines, so that both of the host's CPUs are
    /// used until the end.
    pub(crate) fn single_cpu_plans(&self) -> Vec<Plan> {
        if self.netns.len() < MIN_TO_SPLIT {
            return self.plan("tests", CONCURRENT_TESTS).into_iter().collect();
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
            first.plan("tests-1", CONCURRENT_TESTS),
            second.plan("tests-2", CONCURRENT_TESTS),
        ];
        plans.into_iter().flatten().collect()
    }

    /// Returns a plan for all tests that do not need two CPUs, or `None` if there are none. At most
    /// `concurrent` netns tests run at the same time.
    pub(crate) fn plan(&self, name: &'static str, concurrent: u32) -> Option<Plan> {
        let tiers = [
            (PACKET, 1, &self.packet),
            ("netns", concurrent, &self.netns),
        ];
        let tiers = tiers.into_iter().filter(|(_, _, names)| !names.is_empty());
        let tests = tiers.map(|(program, concurrent, names)| tests(program, concurrent, names));
        let entries: Vec<Entry> = tests.chain(self.verify.then(verify)).collect();
        (!entries.is_empty()).then_some(Plan {
            name,
            cpus: 1,
            entries,
            duration_scale: SCALE,
        })
    }

    /// Returns the plan for the tests that need two CPUs, with loads of full duration.
    pub(crate) fn race_plan(&self) -> Option<Plan> {
        (!self.race.is_empty()).then(|| Plan {
            name: "race",
            cpus: 2,
            entries: vec![tests("netns", 1, &self.race)],
            duration_scale: "1",
        })
    }
}

/// Returns the entry that runs the given tests from a test program, at most `concurrent` at the same time.
fn tests(program: &'static str, concurrent: u32, names: &[String]) -> Entry {
    let options = [
        format!("/bin/{program}"),
        format!("--test-threads={concurrent}"),
        INCLUDE_IGNORED.to_owned(),
        "--exact".to_owned(),
    ];
    let report_time = REPORT_TIME.map(str::to_owned);
    Entry {
        name: program,
        command: [&options[..], &report_time, names].concat(),
        is_interactive: false,
    }
}

/// Returns the entry that reports the verifier's costs for the programs.
fn verify() -> Entry {
    Entry {
        name: "verify",
        command: ["/bin/culvert-lab", "verify"].map(str::to_owned).to_vec(),
        is_interactive: false,
    }
}

impl Plan {
    /// Returns a plan with a single program, which proves that a virtual machine boots.
    pub(crate) fn probe() -> Self {
        let entry = Entry {
            name: "true",
            command: vec!["/usr/bin/true".to_owned()],
            is_interactive: false,
        };
        Self {
            name: "probe",
            cpus: 1,
            entries: vec![entry],
            duration_scale: SCALE,
        }
    }

    /// Returns the plan for an interactive shell.
    pub(crate) fn shell() -> Self {
        Self {
            name: "shell",
            cpus: 2,
            entries: vec![Entry {
                name: "shell",
                command: vec!["/usr/bin/sh".to_owned()],
                is_interactive: true,
            }],
            duration_scale: SCALE,
        }
    }

    /// Returns the plan as JSON, for a virtual machine's init process (`culvert-guest`).
    pub(crate) fn json(&self) -> Value {
        let entries = self.entries.iter().map(|entry| {
            json!({
                "name": entry.name,
                "command": entry.command,
                "interactive": entry.is_interactive,
                "seconds": if entry.is_interactive { u64::from(u32::MAX) } else { PROGRAM_SECONDS },
            })
        });
        json!({
            "environment": {
                "PATH": "/usr/bin:/bin",
                "CULVERT_BIN": "/bin/culvert",
                "CULVERT_LAB_BIN": "/bin/culvert-lab",
                "CULVERT_SCALE": SCALE,
                "CULVERT_LASTING": self.duration_scale,
                "CULVERT_SKIPS": SKIPS,
                ALLOW_UNSTABLE.0: ALLOW_UNSTABLE.1,
            },
            "entries": entries.collect::<Vec<_>>(),
        })
    }

    /// Returns each program's name, and the command that runs it on this machine. The caller sets the path of
    /// the skip file.
    pub(crate) fn native_commands(
        &self,
        programs: &MachinePrograms,
    ) -> Result<Vec<(&'static str, Command)>> {
        let command = |entry: &Entry| {
            let (program, arguments) = entry
                .command
                .split_first()
                .context("the plan has an empty command")?;
            let name = program.strip_prefix("/bin/").unwrap_or(program);
            let mut command = Command::new(programs.path(name)?);
            command
                .args(arguments)
                .env("CULVERT_BIN", programs.path("culvert")?)
                .env("CULVERT_LAB_BIN", programs.path("culvert-lab")?)
                .env("CULVERT_SCALE", SCALE)
                .env("CULVERT_LASTING", self.duration_scale)
                .env(ALLOW_UNSTABLE.0, ALLOW_UNSTABLE.1);
            Ok((entry.name, command))
        };
        self.entries.iter().map(command).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(names: &[&str]) -> Vec<String> {
        names.iter().map(|&name| name.to_owned()).collect()
    }

    fn command(plan: &Plan) -> String {
        plan.entries[0].command.join(" ")
    }

    #[test]
    fn selected_tests_run_and_race_tests_run_with_loads_of_full_duration() {
        let one = TestSelection {
            netns: names(&["hooks::a"]),
            ..TestSelection::default()
        };
        let race = TestSelection {
            race: names(&["race::b"]),
            ..TestSelection::default()
        };

        let plans = one.single_cpu_plans();
        assert_eq!(plans.len(), 1);
        let text = command(&plans[0]);
        assert!(text.starts_with("/bin/netns --test-threads=2 "), "{text}");
        assert!(text.ends_with(" hooks::a"), "{text}");
        assert!(one.race_plan().is_none() && race.single_cpu_plans().is_empty());
        let plan = race.race_plan().expect("a plan");
        assert!(command(&plan).ends_with(" race::b"));
        assert_eq!(plan.json()["environment"]["CULVERT_LASTING"], "1");
    }

    #[test]
    fn a_kernel_runs_the_tests_of_its_modules_and_each_module_has_one() {
        let all = TestSelection {
            netns: names(&["packets::a", "packets::links::b", "hooks::c"]),
            race: names(&["race::d"]),
            packet: names(&["errors::e"]),
            verify: true,
        };
        let select = |modules: &[&str]| all.in_modules(modules).expect("known modules");

        let selected = select(&["packets", "race"]);
        assert_eq!(selected.netns, ["packets::a"]);
        assert!(selected.packet.is_empty() && selected.verify);
        assert_eq!(select(&["packet"]).packet, ["errors::e"]);
        assert_eq!(selected.race, ["race::d"]);
        let error = all.in_modules(&["link"]).expect_err("no such module");
        assert!(error.to_string().contains("module link,"), "{error}");
    }

    #[test]
    fn many_tests_are_split_between_two_machines() {
        let all: Vec<String> = (0..=MIN_TO_SPLIT)
            .map(|number| format!("hooks::t{number}"))
            .collect();
        let selection = TestSelection {
            packet: names(&["guard::a"]),
            netns: all.clone(),
            verify: true,
            ..TestSelection::default()
        };

        let plans = selection.single_cpu_plans();

        assert_eq!(plans.len(), 2);
        let arguments = |plan: &Plan| -> Vec<String> {
            let commands = plan.entries.iter().map(|entry| entry.command.clone());
            commands.flatten().collect()
        };
        let [first, second] = [arguments(&plans[0]), arguments(&plans[1])];
        for test in &all {
            assert!(first.contains(test) != second.contains(test), "{test}");
        }
        assert!(first.contains(&"guard::a".to_owned()) && second.contains(&"verify".to_owned()));
    }
}
