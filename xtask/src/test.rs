//! `cargo xtask test`: runs the test tiers.

use std::{process::Command, time::Duration};

use anyhow::{Result, ensure};
use clap::ValueEnum;

use crate::{
    host,
    progress::{self, Outcome, Row},
    setup,
    static_build::Profile,
    vm::{guest_binaries::MachinePrograms, test_plan::INCLUDE_IGNORED},
    workspace,
    workspace_binaries::{self, CULVERT, LAB},
};

/// Cargo options for the targets that CI builds together with those for the virtual machines.
const CI_TARGETS: [&str; 10] = [
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

/// The packages whose tests the golden tier runs.
const GOLDEN_PACKAGES: [&str; 7] = [
    "tunnel-bench",
    "tunnel-cluster",
    "tunnel-demo",
    "tunnel-e2e",
    "tunnel-fuzz",
    "tunnel-reference",
    "tunnel-tests",
];

/// The test tiers, ordered by the privileges that they need.
#[derive(Clone, Copy, Debug, Eq, PartialEq, ValueEnum)]
pub(crate) enum Tier {
    /// Unit tests.
    Unit,
    /// The contents of the maps for given Kubernetes objects.
    Golden,
    /// The tunnel from end to end, over loopback.
    Tunnel,
    /// tc programs on single packets (needs root).
    Packet,
    /// Real sockets with real kernel programs in network namespaces (needs root).
    Netns,
    /// Hostile pods, tenants and peers: the part of the tiers `netns` and `tunnel` that attacks (needs root).
    Attack,
}

/// The filter for the tests that the tier `attack` runs. Their modules are `attack` in the tier `netns`, and
/// `attacks` in the tier `tunnel`.
const ATTACK: &str = "attack";

impl Tier {
    /// The tiers that together run every test once.
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
            Self::Attack => ATTACK,
        }
    }

    const fn needs_root(self) -> bool {
        match self {
            Self::Unit | Self::Golden | Self::Tunnel => false,
            Self::Packet | Self::Netns | Self::Attack => true,
        }
    }
}

/// Runs one tier or all of them, and lists those that are left out because they need root.
pub(crate) fn run(tier: Option<Tier>, args: &[String]) -> Result<()> {
    let tiers = tier.map_or_else(|| Tier::ALL.to_vec(), |tier| vec![tier]);
    let (runnable, left_out) = split(&tiers, host::is_root());
    let network = runnable.iter().any(|tier| tier.needs_root());
    setup::ensure(setup::Scope {
        network,
        ..setup::Scope::default()
    })?;

    let mut rows = Vec::new();
    if host::is_ci() && tier.is_none() {
        let build = || MachinePrograms::build_with(&CI_TARGETS).map(|_| Outcome::Passed);
        rows.push(progress::run_part("build", build));
    }
    let run = |tier: &Tier| progress::run_part(tier.name(), || run_tier(*tier, args));
    rows.extend(runnable.iter().map(run));
    rows.extend(left_out.iter().map(|tier| Row {
        name: tier.name().to_owned(),
        outcome: Outcome::LeftOut("needs root"),
        took: Duration::ZERO,
    }));
    let is_good = progress::summarise("tier", &rows);
    let may_leave_out = left_out.is_empty() || (tier.is_none() && !host::is_ci());
    if let Some(line) = left_out_line(&left_out) {
        println!("{line}");
    }
    ensure!(is_good, "a test tier failed");
    ensure!(
        may_leave_out,
        "a test tier that must run was left out: run it as root"
    );
    Ok(())
}

/// Splits the tiers into those that can run and those that cannot, because they need root.
fn split(tiers: &[Tier], is_root: bool) -> (Vec<Tier>, Vec<Tier>) {
    tiers.iter().partition(|tier| is_root || !tier.needs_root())
}

fn left_out_line(left_out: &[Tier]) -> Option<String> {
    let names: Vec<&str> = left_out.iter().map(|tier| tier.name()).collect();
    (!names.is_empty()).then(|| format!("left out (need root): {}", names.join(", ")))
}

/// Returns a Cargo command for tests that run Culvert's programs. In CI it uses the same profile as virtual
/// machines and clusters, so that everything is built once; elsewhere it uses the dev profile, which rebuilds
/// fastest.
fn cargo(subcommand: &str) -> Result<Command> {
    if host::is_ci() {
        Profile::Vm.cargo(subcommand)
    } else {
        Ok(workspace::cargo(subcommand))
    }
}

fn run_tier(tier: Tier, args: &[String]) -> Result<Outcome> {
    let (packages, targets): (&[&str], &[&str]) = match tier {
        Tier::Unit => (&[], &[]),
        Tier::Golden => (
            &GOLDEN_PACKAGES,
            &["--lib", "--bins", "--test", "golden", "--test", "corpus"],
        ),
        Tier::Tunnel => (&["tunnel-tests"], &["--test", "tunnel"]),
        Tier::Packet => (&["tunnel-tests"], &["--test", "packet"]),
        Tier::Netns => (&["tunnel-tests"], &["--test", "lab", "--test", "netns"]),
        Tier::Attack => (&["tunnel-tests"], &["--test", "netns", "--test", "tunnel"]),
    };
    let mut command = match tier {
        Tier::Unit => workspace::cargo("test"),
        Tier::Golden | Tier::Tunnel | Tier::Packet | Tier::Netns | Tier::Attack => cargo("test")?,
    };
    command.args(packages.iter().flat_map(|name| ["--package", *name]));
    command.args(targets);
    if !matches!(tier, Tier::Unit | Tier::Golden) {
        let [culvert, lab] = workspace_binaries::build(cargo("build")?, [CULVERT, LAB])?;
        command
            .env("CULVERT_BIN", culvert)
            .env("CULVERT_LAB_BIN", lab);
    }
    command.arg("--");
    if matches!(tier, Tier::Netns | Tier::Attack) {
        command.arg(INCLUDE_IGNORED);
    }
    if tier == Tier::Attack {
        command.arg(ATTACK);
    }
    command.args(args);
    Ok(progress::run_visibly(&mut command)?.into())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_root_the_tiers_that_need_it_are_left_out_and_named() {
        assert_eq!(split(&Tier::ALL, true), (Tier::ALL.to_vec(), Vec::new()));
        assert_eq!(left_out_line(&[]), None);

        let (runnable, left_out) = split(&Tier::ALL, false);
        assert_eq!(runnable, [Tier::Unit, Tier::Golden, Tier::Tunnel]);
        let line = left_out_line(&left_out).expect("a line");
        assert_eq!(line, "left out (need root): packet, netns");
    }
}
