//! What machines run: the kernel tests and the programs under test, as static binaries, and the few
//! programs of this machine that they start.

use std::{
    collections::{BTreeMap, BTreeSet},
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context as _, Result, ensure};
use serde_json::{Value, json};

use super::initramfs::Overlay;
use crate::{statics::Profile, workspace};

/// Programs of this machine that tests start.
const HOST: [&str; 10] = [
    "ip", "tc", "cat", "chroot", "sh", "sleep", "true", "stat", "nice", "setpriv",
];

/// The size of loads: machines are slow.
const SCALE: &str = "0.05";

/// Where tests name themselves that can't run on a kernel.
const SKIPS: &str = "/run/skips";

/// How the names of those tests start that need two CPUs.
const RACE: &str = "race::";

/// Runs also the tests with `#[ignore]`, which marks those that no kernel decides.
pub(crate) const MARKED_TOO: &str = "--include-ignored";

/// Has a test program tell how long each test took: an option of libtest that waits to be stable, and
/// that libtest takes as long as this variable is set.
const TIMES: [&str; 2] = ["-Zunstable-options", "--report-time"];
const UNSTABLE: (&str, &str) = ("RUSTC_BOOTSTRAP", "1");

/// How long one program may run, in seconds.
pub(super) const LIMIT: u64 = 2400;

/// The programs that were built.
#[derive(Debug)]
pub(crate) struct Programs {
    built: BTreeMap<String, PathBuf>,
}

impl Programs {
    /// Builds them.
    pub(crate) fn build() -> Result<Self> {
        let mut command = Profile::Vm.build()?;
        command
            .args(["--package", "tunnel-userspace", "--bin", "culvert"])
            .args(["--package", "tunnel-tests", "--bin", "culvert-lab"])
            .args([
                "--bin",
                "culvert-guest",
                "--test",
                "netns",
                "--test",
                "packet",
            ]);
        let built = workspace::built(&mut command)?;
        for name in ["culvert", "culvert-lab", "culvert-guest", "netns", "packet"] {
            ensure!(built.contains_key(name), "cargo build did not name {name}");
        }
        Ok(Self { built })
    }

    pub(crate) fn path(&self, name: &str) -> Result<&Path> {
        let path = self.built.get(name).map(PathBuf::as_path);
        path.with_context(|| format!("there is no program {name}"))
    }

    /// The names of a program's tests in which one of these occurs.
    fn tests(&self, name: &str, filter: &[String]) -> Result<Vec<String>> {
        let mut command = Command::new(self.path(name)?);
        let output = command.arg("--list").args(filter).output();
        let output = output.with_context(|| format!("cannot start {name}"))?;
        ensure!(output.status.success(), "{name} --list: {}", output.status);
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        let names = text.lines().filter_map(|line| line.strip_suffix(": test"));
        Ok(names.map(str::to_owned).collect())
    }

    /// What every machine gets beside its kernel's modules and its plan.
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
            let program = workspace::program(name)
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

/// The libraries that a program is linked with, as the loader finds them.
fn libraries_of(program: &Path) -> Result<BTreeSet<String>> {
    let output = Command::new("ldd").arg(program).output();
    let output = output.context("cannot start ldd")?;
    let listing = String::from_utf8_lossy(&output.stdout);
    let is_whole = output.status.success() && !listing.contains("not found");
    ensure!(is_whole, "ldd {}: {listing}", program.display());
    Ok(paths(&listing))
}

/// The paths in what `ldd` prints.
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

/// What a machine, or this one, is to run.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// Its name in what is printed.
    pub(crate) name: &'static str,
    pub(crate) cpus: u32,
    entries: Vec<Entry>,
    /// How long loads last.
    lasting: &'static str,
}

/// Which tests are to run.
#[derive(Debug)]
pub(crate) enum Wanted {
    /// Those that a kernel decides.
    Decided,
    /// All of them.
    All,
    /// These, by their whole names: packet tests, netns tests, and those that need two CPUs.
    Named([Vec<String>; 3]),
}

impl Wanted {
    /// What a filter names, or everything, or what a kernel decides.
    pub(crate) fn of(programs: &Programs, filter: &[String], is_whole: bool) -> Result<Self> {
        if filter.is_empty() {
            return Ok(if is_whole { Self::All } else { Self::Decided });
        }
        let packet = programs.tests("packet", filter)?;
        let netns = programs.tests("netns", filter)?;
        let (race, netns): (Vec<_>, Vec<_>) =
            netns.into_iter().partition(|name| name.starts_with(RACE));
        ensure!(
            !(packet.is_empty() && netns.is_empty() && race.is_empty()),
            "no test has {} in its name",
            filter.join(" or ")
        );
        Ok(Self::Named([packet, netns, race]))
    }

    /// For a machine with one CPU, so many netns tests at a time: all that don't need two.
    pub(crate) fn suite(&self, at_a_time: u32) -> Option<Plan> {
        let one = "--test-threads=1".to_owned();
        let threads = format!("--test-threads={at_a_time}");
        let entries = match self {
            Self::Named([packet, netns, _]) => [("packet", one, packet), ("netns", threads, netns)]
                .into_iter()
                .filter(|(_, _, names)| !names.is_empty())
                .map(|(name, threads, names)| exactly(name, threads, names))
                .collect(),
            Self::All | Self::Decided => {
                let netns = [threads, format!("--skip={RACE}")];
                let netns = netns.into_iter().chain(self.marked());
                vec![tests("packet", [one]), tests("netns", netns), verify()]
            }
        };
        (!entries.is_empty()).then_some(Plan {
            name: "tests",
            cpus: 1,
            entries,
            lasting: SCALE,
        })
    }

    /// What needs two CPUs, at its whole length.
    pub(crate) fn race(&self) -> Option<Plan> {
        let one = "--test-threads=1".to_owned();
        let entry = match self {
            Self::All | Self::Decided => {
                let race = [one, RACE.to_owned()];
                tests("netns", race.into_iter().chain(self.marked()))
            }
            Self::Named([_, _, names]) if !names.is_empty() => exactly("netns", one, names),
            Self::Named(_) => return None,
        };
        Some(Plan {
            name: "race",
            cpus: 2,
            entries: vec![entry],
            lasting: "1",
        })
    }

    /// What a test program is told to run also those that no kernel decides.
    fn marked(&self) -> Option<String> {
        match self {
            Self::All | Self::Named(_) => Some(MARKED_TOO.to_owned()),
            Self::Decided => None,
        }
    }
}

fn tests(name: &'static str, arguments: impl IntoIterator<Item = String>) -> Entry {
    let program = [format!("/bin/{name}")];
    let times = TIMES.map(str::to_owned);
    Entry {
        name,
        command: program.into_iter().chain(times).chain(arguments).collect(),
        is_interactive: false,
    }
}

fn exactly(name: &'static str, threads: String, names: &[String]) -> Entry {
    let options = [threads, "--exact".to_owned(), MARKED_TOO.to_owned()];
    tests(name, options.into_iter().chain(names.iter().cloned()))
}

fn verify() -> Entry {
    Entry {
        name: "verify",
        command: ["/bin/culvert-lab", "verify"].map(str::to_owned).to_vec(),
        is_interactive: false,
    }
}

impl Plan {
    /// A shell.
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

    /// For the guest.
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

    /// The same for this machine: each program with its environment, but where to note skips.
    pub(crate) fn commands(&self, programs: &Programs) -> Result<Vec<Command>> {
        let one = |entry: &Entry| -> Result<Command> {
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
            Ok(command)
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

        let paths: Vec<String> = paths(listing).into_iter().collect();

        assert_eq!(
            paths,
            [
                "/lib/x86_64-linux-gnu/libmnl.so.0",
                "/lib64/ld-linux-x86-64.so.2"
            ]
        );
    }

    #[test]
    fn what_is_named_runs_and_races_run_at_their_whole_length() {
        let names = |names: &[&str]| {
            names
                .iter()
                .map(|&name| name.to_owned())
                .collect::<Vec<_>>()
        };
        let one = Wanted::Named([Vec::new(), names(&["hooks::a"]), Vec::new()]);
        let race = Wanted::Named([Vec::new(), Vec::new(), names(&["race::b"])]);
        let times = TIMES.join(" ");

        assert_eq!(Wanted::All.suite(2).map(|it| it.entries.len()), Some(3));
        let command = |plan: Plan| plan.entries[0].command.join(" ");
        let expected = format!("/bin/netns {times} --test-threads=2 --exact {MARKED_TOO} hooks::a");
        assert_eq!(one.suite(2).map(command), Some(expected));
        assert!(one.race().is_none() && race.suite(2).is_none());
        let json = race.race().expect("a plan").json();
        assert_eq!(json["environment"]["CULVERT_LASTING"], "1");
        let last = json["entries"][0]["command"]
            .as_array()
            .and_then(|it| it.last());
        assert_eq!(last.expect("a word"), "race::b");
    }

    #[test]
    fn what_no_kernel_decides_runs_only_where_it_is_asked_for() {
        let runs_marked = |wanted: &Wanted| {
            let plans = [wanted.suite(2), wanted.race()].into_iter().flatten();
            let all = plans
                .flat_map(|plan| plan.entries)
                .flat_map(|it| it.command);
            all.filter(|word| word == MARKED_TOO).count()
        };

        assert_eq!(runs_marked(&Wanted::Decided), 0);
        assert_eq!(runs_marked(&Wanted::All), 2);
    }
}
