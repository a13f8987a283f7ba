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
use crate::workspace;

/// The target is named so that the flags are for it alone, not for build scripts and macros too.
const TARGET: &str = "x86_64-unknown-linux-gnu";
/// Nothing is looked for at run time, nor relocated: a start costs an emulated machine 20 times as
/// much.
const FLAGS: &str = "-C target-feature=+crt-static -C relocation-model=static";
const FLAGS_VARIABLE: &str = "CARGO_TARGET_X86_64_UNKNOWN_LINUX_GNU_RUSTFLAGS";
/// Random numbers come from the kernel alone: what else is gathered when a program draws its first,
/// from the unevenness of its own clock, takes an emulated machine most of a second.
const NO_JITTER: &str = "AWS_LC_SYS_NO_JITTER_ENTROPY";

/// Programs of this machine that tests start.
const HOST: [&str; 8] = ["ip", "tc", "cat", "sh", "sleep", "true", "stat", "nice"];

/// The size of loads: machines are slow.
const SCALE: &str = "0.05";

/// Where tests name themselves that can't run on a kernel.
const SKIPS: &str = "/run/skips";

/// The netns tests in which kernels differ most: sockets, refusals, variants of programs, features.
const QUICK: [&str; 8] = [
    "datagrams::",
    "features::",
    "flows::",
    "hooks::",
    "natives::",
    "refused::",
    "rewrite::",
    "untouched::",
];

/// How long one program may run, in seconds.
const LIMIT: u64 = 600;

/// The programs that were built.
#[derive(Debug)]
pub(crate) struct Programs {
    built: BTreeMap<String, PathBuf>,
}

impl Programs {
    /// Builds them.
    pub(crate) fn build() -> Result<Self> {
        let mut command = workspace::cargo("build");
        command
            .args(["--profile", "vm", "--target", TARGET])
            .arg("--target-dir")
            .arg(workspace::root().join("target/vm/build"))
            .args(["--package", "tunnel-userspace", "--bin", "culvert"])
            .args(["--package", "tunnel-tests", "--bin", "culvert-lab"])
            .args([
                "--bin",
                "culvert-guest",
                "--test",
                "netns",
                "--test",
                "packet",
            ])
            .env(FLAGS_VARIABLE, FLAGS)
            .env(NO_JITTER, "1");
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
    Ok(paths(&String::from_utf8_lossy(&output.stdout)))
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

fn tests(name: &'static str, more: &[&str], filter: &[String]) -> Entry {
    let mut command = vec![format!("/bin/{name}")];
    command.extend(more.iter().map(|word| (*word).to_owned()));
    command.extend_from_slice(filter);
    Entry {
        name,
        command,
        is_interactive: false,
    }
}

impl Plan {
    /// For a machine with one CPU: what the filter names, or everything but what needs two CPUs.
    pub(crate) fn suite(filter: &[String], is_quick: bool) -> Self {
        let mut netns = filter.to_vec();
        if is_quick {
            netns.extend(QUICK.map(str::to_owned));
        }
        let mut entries = vec![
            tests("packet", &["--test-threads=1"], filter),
            tests("netns", &["--test-threads=2", "--skip=race::"], &netns),
        ];
        if filter.is_empty() {
            entries.push(Entry {
                name: "verify",
                command: ["/bin/culvert-lab", "verify"].map(str::to_owned).to_vec(),
                is_interactive: false,
            });
        }
        Self {
            name: "tests",
            cpus: 1,
            entries,
            lasting: SCALE,
        }
    }

    /// What needs two CPUs, at its whole length.
    pub(crate) fn race(filter: &[String]) -> Self {
        let filter: Vec<String> = match filter {
            [] => vec!["race::".to_owned()],
            given => given.to_vec(),
        };
        let more: &[&str] = &["--test-threads=1"];
        Self {
            name: "race",
            cpus: 2,
            entries: vec![tests("netns", more, &filter)],
            lasting: "1",
        }
    }

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
                .env("CULVERT_LASTING", self.lasting);
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
    fn a_filter_leaves_out_what_is_measured_and_races_run_at_their_whole_length() {
        let filter = ["hooks".to_owned()];

        assert_eq!(Plan::suite(&[], true).entries.len(), 3);
        assert_eq!(Plan::suite(&filter, false).entries.len(), 2);
        let race = Plan::race(&[]).json();
        assert_eq!(race["environment"]["CULVERT_LASTING"], "1");
        assert_eq!(race["entries"][0]["command"][2], "race::");
    }
}
