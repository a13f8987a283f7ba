//! The test tiers.

use std::{process::Command, time::Duration};

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::{
    progress::{self, Outcome, Row},
    setup,
    statics::Profile,
    vm::suite::{MARKED_TOO, Programs},
    workspace,
};

/// The targets that CI builds in one call, besides those that machines run.
const ALL: [&str; 10] = [
    "--test",
    "golden",
    "--test",
    "lab",
    "--test",
    "tunnel",
    "--package",
    "tunnel-e2e",
    "--bin",
    "culvert-e2e",
];

/// The packages of the laboratory's unit tests and the golden cases.
const HOUSE: [&str; 7] = [
    "tunnel-bench",
    "tunnel-cluster",
    "tunnel-demo",
    "tunnel-e2e",
    "tunnel-fuzz",
    "tunnel-reference",
    "tunnel-tests",
];

/// A tier, ordered by the privileges that it needs.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Tier {
    /// Pure code, in unit tests.
    Unit,
    /// Kubernetes objects to map content.
    Golden,
    /// The tunnel from end to end over loopback.
    Tunnel,
    /// tc programs on packets (root).
    Packet,
    /// Real sockets through real programs (root).
    Netns,
}

impl Tier {
    const ALL: [Self; 5] = [
        Self::Unit,
        Self::Golden,
        Self::Tunnel,
        Self::Packet,
        Self::Netns,
    ];

    const fn name(self) -> &'static str {
        match self {
            Self::Unit => "unit",
            Self::Golden => "golden",
            Self::Tunnel => "tunnel",
            Self::Packet => "packet",
            Self::Netns => "netns",
        }
    }

    const fn needs_root(self) -> bool {
        match self {
            Self::Unit | Self::Golden | Self::Tunnel => false,
            Self::Packet | Self::Netns => true,
        }
    }
}

/// Runs one tier or all, and prints the skipped ones.
pub(crate) fn run(tier: Option<Tier>, args: &[String]) -> Result<()> {
    let tiers = tier.map_or_else(|| Tier::ALL.to_vec(), |tier| vec![tier]);
    let (able, left_out) = split(&tiers, workspace::is_root());
    let network = able.iter().any(|tier| tier.needs_root());
    setup::ensure(setup::Scope {
        network,
        ..setup::Scope::default()
    })?;

    let mut rows = Vec::new();
    if workspace::is_ci() && tier.is_none() {
        let build = || Programs::build_with(&ALL).map(|_| Outcome::Passed);
        rows.push(progress::part("build", build));
    }
    let run = |tier: &Tier| progress::part(tier.name(), || run_tier(*tier, args));
    rows.extend(able.iter().map(run));
    rows.extend(left_out.iter().map(|tier| Row {
        name: tier.name().to_owned(),
        outcome: Outcome::LeftOut("needs root"),
        took: Duration::ZERO,
    }));
    let is_good = progress::summarise("tier", &rows);
    let is_enough = left_out.is_empty() || (tier.is_none() && !workspace::is_ci());
    if let Some(line) = left_out_line(&left_out) {
        println!("{line}");
    }
    ensure!(is_good, "a test tier failed");
    ensure!(is_enough, "a tier that had to run was left out");
    Ok(())
}

/// Returns the tiers that can run, and those that would need root.
fn split(tiers: &[Tier], is_root: bool) -> (Vec<Tier>, Vec<Tier>) {
    tiers.iter().partition(|tier| is_root || !tier.needs_root())
}

fn left_out_line(left_out: &[Tier]) -> Option<String> {
    let names: Vec<&str> = left_out.iter().map(|tier| tier.name()).collect();
    (!names.is_empty()).then(|| format!("left out (need root): {}", names.join(", ")))
}

/// Returns a `cargo` that builds for tests of complete programs: in CI with the profile of machines and
/// clusters, so that programs are built once; otherwise with the dev profile, which rebuilds fastest.
fn cargo(subcommand: &str) -> Result<Command> {
    if workspace::is_ci() {
        Profile::Vm.cargo(subcommand)
    } else {
        Ok(workspace::cargo(subcommand))
    }
}

fn run_tier(tier: Tier, args: &[String]) -> Result<Outcome> {
    let (packages, targets): (&[&str], &[&str]) = match tier {
        Tier::Unit => (&[], &[]),
        Tier::Golden => (
            &HOUSE,
            &["--lib", "--bins", "--test", "golden", "--test", "corpus"],
        ),
        Tier::Tunnel => (&["tunnel-tests"], &["--test", "tunnel"]),
        Tier::Packet => (&["tunnel-tests"], &["--test", "packet"]),
        Tier::Netns => (&["tunnel-tests"], &["--test", "lab", "--test", "netns"]),
    };
    let mut command = match tier {
        Tier::Unit => workspace::cargo("test"),
        Tier::Golden | Tier::Tunnel | Tier::Packet | Tier::Netns => cargo("test")?,
    };
    command.args(packages.iter().flat_map(|name| ["--package", *name]));
    command.args(targets);
    if matches!(tier, Tier::Tunnel | Tier::Packet | Tier::Netns) {
        let programs = [workspace::CULVERT, workspace::LAB];
        let [culvert, lab] = workspace::build_programs(cargo("build")?, programs)?;
        command
            .env("CULVERT_BIN", culvert)
            .env("CULVERT_LAB_BIN", lab);
    }
    command.arg("--");
    if tier == Tier::Netns {
        command.arg(MARKED_TOO);
    }
    command.args(args);
    Ok(progress::visible(&mut command)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_runs_every_tier_and_without_root_those_that_need_it_are_left_out_and_named() {
        assert_eq!(split(&Tier::ALL, true), (Tier::ALL.to_vec(), Vec::new()));
        assert_eq!(left_out_line(&[]), None);

        let (able, left_out) = split(&Tier::ALL, false);
        assert_eq!(able, [Tier::Unit, Tier::Golden, Tier::Tunnel]);
        let line = left_out_line(&left_out).expect("a line");
        assert_eq!(line, "left out (need root): packet, netns");
    }
}
